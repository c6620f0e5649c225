// The Hopper backwards whose dk and dv go through a place of the scores: a kv tile without scores.
#pragma once
#include "bwd_sm90_steps.cuh"
#include "tile/smem_tile.cuh"

// Zeros to dv or dk, by a warpgroup: no row sees a key of the tile.
DC_FN void clear_keys(const BackwardParams& params, bool is_dv, const Batch& batch) {
  constexpr int CHUNKS = DC_HEAD_DIM / 8;
  const Strides strides = is_dv ? params.dv_strides : params.dk_strides;
  Element* gmem = (is_dv ? params.dv : params.dk) + batch.batch * strides.batch +
                  batch.kv_head * strides.head + batch.row0 * strides.row;
  const u32 zeros[4] = {0, 0, 0, 0};
  const int n_chunk = min_int(CTA_KEYS, params.kv_len - batch.row0) * CHUNKS;
  for (int i = thread_index() % WARPGROUP_SIZE; i < n_chunk; i += WARPGROUP_SIZE)
    store_8(gmem + i / CHUNKS * strides.row + i % CHUNKS * 8, zeros);
}
