// Keeps the threads of a CTA busy for a number of clock cycles: the load under which
// `python -m dashcupy check --stress` compares bits. With all shared memory of an SM there is one
// CTA an SM.
#include "common.cuh"

extern "C" __global__ void spin(i64 cycles) {
  const i64 begin = clock64();
  while (clock64() - begin < cycles) {
  }
}
