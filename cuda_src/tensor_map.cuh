// A tensor map: address, sizes, strides and box of an array, for the copy engine (sm_90).
#pragma once
#include "common.cuh"

// What cuTensorMapEncodeTiled makes. It must lie in kernel parameters (`__grid_constant__`).
struct alignas(64) TensorMap {
  u64 opaque[16];
};
