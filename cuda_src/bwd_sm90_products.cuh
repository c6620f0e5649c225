// The Hopper backwards with keys as rows, what their main loops share: descriptors, masks, results.
#pragma once
#include "bwd_sm90_steps.cuh"
#include "ptx/matrix.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "tile/row_values.cuh"
#include "tile/smem_tile.cuh"

// Rows of 16 bytes without swizzle: 8 rows are 128 bytes. Columns 8..15 of the k step read columns
// 0..7 again (panel distance 0); the A operand is zero there.
DC_FN u64 row_values_descriptor(u32 smem) {
  u64 r;
  asm("mov.b64 %0, {%1, %2};" : "=l"(r) : "r"(smem >> 4), "r"(128u >> 4));
  return r;
}

// A zero that the compiler takes for a variable: a constant it would write anew before each
// product, in the middle of a group.
DC_FN u32 opaque_zero() {
  u32 zero = 0;
  asm volatile("" : "+r"(zero));
  return zero;
}

// Scores of keys that the diagonal hides: selected away before exp2, for they may be anything.
// `key` is the key of this lane's first row; columns are q rows from q_row0 on.
template <int N>
DC_FN void hide_keys(float (&s)[N], int q_row0, int offset, int key, int lane) {
  const int first = q_row0 + offset + 2 * (lane % 4) - key;  // visible: column + first >= 0
#pragma unroll
  for (int j = 0; j < N / 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (first + 8 * j + e % 2 - 8 * (e / 2) < 0) s[4 * j + e] = HIDE;
}

// A warp's 16 rows of panel number `panel` of dk or dv, scaled and rounded, to shared memory;
// fragment(k) is where this lane's fragment of 16 columns goes.
template <int N, class Fragment>
DC_FN void stage_rows(const float (&acc)[N], int panel, float scale, const Fragment& fragment) {
#pragma unroll
  for (int k = 0; k < PANEL_COLUMNS / 16 && 32 * panel + 8 * k < N; ++k) {
    const auto word = [&](int i) {
      const int at = 32 * panel + 8 * k + 2 * i;
      return pack(acc[at] * scale, acc[at + 1] * scale);
    };
    stmatrix_x4(fragment(k), word(0), word(1), word(2), word(3));
  }
}
