// The Hopper backwards whose dk and dv go through the place of scores: a kv tile without any.
#pragma once
#include "bwd_sm90_steps.cuh"
#include "tile/smem_tile.cuh"

// Zeros instead: no row sees a key of the tile.
DC_FN void clear_keys(Element* gmem, i64 row_stride, int n_key, int thread) {
  constexpr int CHUNKS = DC_HEAD_DIM / 8;
  const u32 zeros[4] = {0, 0, 0, 0};
  for (int i = thread; i < min_int(CTA_KEYS, n_key) * CHUNKS; i += WARPGROUP_SIZE)
    store_8(gmem + i / CHUNKS * row_stride + i % CHUNKS * 8, zeros);
}
