// Types, constants and small arithmetic that every source shares. No system header anywhere: NVRTC
// then needs no include path, and the host's C++ compiler can read the schedule headers.
#pragma once

#if defined(__CUDACC__)
#define DC_FN __device__ __forceinline__
#else
#define DC_FN inline
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(i64) == 8,
              "types");

constexpr int WARP_SIZE = 32;

DC_FN constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
DC_FN constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
DC_FN constexpr int min_int(int a, int b) { return a < b ? a : b; }
DC_FN constexpr int max_int(int a, int b) { return a > b ? a : b; }

#if defined(__CUDACC__)
// Hides from the compiler that x is the same in every round of a loop: what depends on it is then
// computed inside, not before the loop and kept in registers.
DC_FN void compute_late(int& x) { asm volatile("" : "+r"(x)); }
#endif
