// The Hopper backwards that store scores, or dk and dv, transposed: accumulators whose columns
// become rows.
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

// The first n_key keys of such a tile, row by row, to gmem[key][n_column], by a warpgroup.
DC_FN void store_keys(u32 tile, Element* gmem, i64 row_stride, int n_key, int n_column,
                      int thread) {
  const int chunk = thread % 8;
  if (8 * chunk >= n_column) return;
#pragma unroll
  for (int key = thread / 8; key < KV_TILE; key += WARPGROUP_SIZE / 8) {
    if (key >= n_key) return;
    u32 word[4];
    ld_shared_v4(word, tile + key * PANEL_ROW_BYTES + ((chunk ^ key % 8) << 4));
    store_8(gmem + key * row_stride + 8 * chunk, word);
  }
}
