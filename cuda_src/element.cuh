// The 16-bit element types: raw bits in memory, float in arithmetic. DC_BF16 picks one per build.
#pragma once
#include "common.cuh"

#if DC_BF16 != 0 && DC_BF16 != 1
#error "DC_BF16 must be 1 (bfloat16) or 0 (float16)"
#endif

typedef u16 Element;

// Two floats to two elements, round to nearest even; `lo` in the low half.
DC_FN u32 pack(float lo, float hi) {
  u32 r;
#if DC_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#endif
  return r;
}

DC_FN float element_to_float(Element x) {
#if DC_BF16
  return __uint_as_float(u32(x) << 16);
#else
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
  return r;
#endif
}

DC_FN float unpack_lo(u32 x) { return element_to_float(Element(x & 0xffffu)); }
DC_FN float unpack_hi(u32 x) { return element_to_float(Element(x >> 16)); }
