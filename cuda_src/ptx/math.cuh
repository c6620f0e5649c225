// Special functions.
#pragma once
#include "common.cuh"

// 2^x; 2^-inf = 0; subnormal results flush to 0. PTX ISA: ex2.
DC_FN float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Base-2 logarithm; of 0: -inf. PTX ISA: lg2.
DC_FN float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to one unit in the last place, without the slow path of a division. PTX ISA: rcp.
DC_FN float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DC_FN float infinity() { return __uint_as_float(0x7f800000u); }

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
