// The Hopper backwards, accumulators whose columns become rows: dk and dv of those that hold them
// transposed (bwd_sm90_d64, _d192), P and dS of those that store them so (_d192, _d256).
//
// Included behind a layout: KV_TILE.
#pragma once
#include "ptx/stmatrix.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
#include "tile/smem_tile.cuh"

// Address of this lane's row of one of four 8 x 8 matrices of a fragment that is stored transposed
// to a tile of rows of 128 bytes: 16 rows, the 16 columns that are rows of the warp's accumulators.
DC_FN u32 transposed_fragment(u32 tile, int warp, int lane) {
  return tile + (lane / 16 * 8 + lane % 8) * PANEL_ROW_BYTES +
         (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4);
}

// 64 columns of the transposed accumulators, scaled and rounded, to a tile [key][64 columns].
DC_FN void stage_transposed(const float (&acc)[KV_TILE / 2], u32 tile, float scale, int warp,
                            int lane) {
  const u32 at = transposed_fragment(tile, warp, lane);
#pragma unroll
  for (int j = 0; j < KV_TILE / 8; j += 2) {
    u32 r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = pack(acc[4 * j + 2 * i] * scale, acc[4 * j + 2 * i + 1] * scale);
    stmatrix_x4_trans(at + 8 * j * PANEL_ROW_BYTES, r[0], r[1], r[2], r[3]);
  }
}
