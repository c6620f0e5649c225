// lse and delta of a row as operands of a product: one k step of wgmma brings them into S and dP.
//
// A row tile has 16 bytes for each q row: 8 bfloat16 numbers, the n rows of a K_MAJOR operand
// without swizzle (8 rows of 16 bytes are one core matrix, 128 bytes on is the next).
//
//   column  0  1  2           3  4  5      6     7
//   holds   -lse / scale      -delta       HIDE  0
//
// A float32 is the sum of three bfloat16 parts. So the product with an A operand of ones in columns
// 0..2 starts S with -lse / scale, exact to float32, and exp2(S * scale_log2) is P. Ones in columns
// 3..5 start dP with -delta. A one in column 6 hides a key: S is then so low that P is exactly 0.
// A q row that does not exist or sees no key has (HIDE, 0, 0) for its lse: P is 0 for every key.
// The operand is bfloat16 in float16 builds too, for the range.
#pragma once
#include "common.cuh"

constexpr int ROW_VALUE_BYTES = 16;

// Times any scale_log2 that is allowed still far below the least exponent, and far from overflow.
// config.py gives this kernel scales of 2^-20 to 2^20 only.
constexpr float HIDE = -1e30f;

constexpr u32 BF16_ONE_LOW = 0x3f80u, BF16_ONES = 0x3f803f80u;

// The two A registers of a lane (columns 2 (lane % 4) and on): ones where the three parts are.
DC_FN u32 lse_columns(int lane, bool hide) {
  const int pair = lane % 4;
  return pair == 0 ? BF16_ONES : pair == 1 ? BF16_ONE_LOW : pair == 3 && hide ? BF16_ONE_LOW : 0u;
}
DC_FN u32 delta_columns(int lane) {
  const int pair = lane % 4;
  return pair == 1 ? BF16_ONE_LOW << 16 : pair == 2 ? BF16_ONES : 0u;
}

// `lo` and `hi` as bfloat16, round to nearest even.
DC_FN u32 pack_bf16(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
DC_FN float bf16_part(float x) { return __uint_as_float(pack_bf16(0.f, x) & 0xffff0000u); }

// The 16 bytes of one row.
DC_FN uint4 pack_row_values(float minus_lse, float minus_delta) {
  const float l0 = bf16_part(minus_lse), l1 = bf16_part(minus_lse - l0), l2 = minus_lse - l0 - l1;
  const float d0 = bf16_part(minus_delta), d1 = bf16_part(minus_delta - d0);
  const float d2 = minus_delta - d0 - d1;
  return make_uint4(pack_bf16(l0, l1), pack_bf16(l2, d0), pack_bf16(d1, d2), pack_bf16(HIDE, 0.f));
}

// A row whose P must be 0.
DC_FN uint4 hidden_row_values() {
  return make_uint4(pack_bf16(HIDE, 0.f), 0u, 0u, pack_bf16(HIDE, 0.f));
}
