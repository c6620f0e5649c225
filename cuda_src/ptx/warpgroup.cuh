// What the roles of a CTA need: named barriers, and registers handed from role to role (sm_90).
#pragma once
#include "common.cuh"

constexpr int WARPGROUP_SIZE = 128;

// A value that is the same for the whole warp, made known as such: what follows from it stays in
// uniform registers, and branches on it need no reconvergence. Only votes and reductions of the
// warp tell the compiler so, and only if every exit of the loops around is known to be uniform.
DC_FN bool warp_uniform(bool x) { return __any_sync(0xffffffffu, x); }
DC_FN int warp_uniform(int x) { return int(__reduce_or_sync(0xffffffffu, u32(x))); }

// Number of this thread's warpgroup, and of its warp within. The shuffle tells the compiler that
// they are the same for the whole warp: descriptors then stay in uniform registers.
DC_FN int warpgroup_index() {
  return __shfl_sync(0xffffffffu, int(threadIdx.x) / WARPGROUP_SIZE, 0);
}
DC_FN int warp_in_warpgroup() {
  return __shfl_sync(0xffffffffu, int(threadIdx.x) / WARP_SIZE % 4, 0);
}

// Number of this thread, read anew at each call: what is computed from it stays where the call
// stands, instead of in registers across a loop. PTX ISA: special registers, %tid.
DC_FN int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Registers a thread of this warpgroup may use from here on: a multiple of 8. The pool is what the
// CTA was launched with (registers a thread times threads); a raise waits until others dropped
// enough.
// PTX ISA: setmaxnreg.
template <int N>
DC_FN void raise_registers() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
DC_FN void drop_registers() {
  static_assert(N % 8 == 0 && N >= 24 && N <= 256, "setmaxnreg");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// Waits until n_thread threads (whole warps; those that wait and those that only arrive) have come.
// Barrier 0 is __syncthreads. PTX ISA: bar.sync.
DC_FN void named_barrier_sync(int barrier, int n_thread) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(n_thread) : "memory");
}

// PTX ISA: bar.arrive.
DC_FN void named_barrier_arrive(int barrier, int n_thread) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(n_thread) : "memory");
}
