// bwd_sm90_d64, the gradient warpgroup: dk and dv of the kv tile.
//
// It holds both transposed, [column][key], so that all operands come from shared memory and each
// product has 128 keys as columns: dv^T += dout^T P, dk^T += q^T dS.
#pragma once
#include "bwd_sm90_d64_layout.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/smem_tile.cuh"

// The transposed accumulators, scaled and rounded, to a tile [key][HEAD_DIM].
DC_FN void stage_transposed(const float (&acc)[64], u32 tile, float scale, int warp, int lane) {
  // Lane's row of one of four 8 x 8 matrices: 16 keys, the 16 columns of this warp.
  const u32 at = tile + (lane / 16 * 8 + lane % 8) * PANEL_ROW_BYTES +
                 (((2 * warp + lane / 8 % 2) ^ (lane % 8)) << 4);
#pragma unroll
  for (int j = 0; j < 16; j += 2) {
    u32 r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = pack(acc[4 * j + 2 * i] * scale, acc[4 * j + 2 * i + 1] * scale);
    stmatrix_x4_trans(at + 8 * j * PANEL_ROW_BYTES, r[0], r[1], r[2], r[3]);
  }
}

// Keys of the tile that exist, row by row, to gmem[key][DC_HEAD_DIM].
DC_FN void store_keys(u32 tile, Element* gmem, i64 row_stride, int n_key, int thread) {
  const int chunk = thread % 8;
  if (8 * chunk >= DC_HEAD_DIM) return;
#pragma unroll
  for (int key = thread / 8; key < KV_TILE; key += WARPGROUP_SIZE / 8) {
    if (key >= n_key) return;
    u32 word[4];
    ld_shared_v4(word, tile + key * PANEL_ROW_BYTES + ((chunk ^ key % 8) << 4));
    store_8(gmem + key * row_stride + 8 * chunk, word);
  }
}

DC_FN void sum_gradients(SharedStorage& smem, const BackwardParams& params, int warp, int lane) {
  const Barriers& barriers = smem.barriers;
  int n = 0, t = 0;  // batches and steps so far
  const auto wait_for_batch = [&]() {
    mbarrier_wait(smem_address(&barriers.batch_full[n % N_BATCH]), full_parity(n / N_BATCH));
  };
  const auto next_batch = [&]() {
    mbarrier_arrive_warp(smem_address(&barriers.batch_empty[n % N_BATCH]), lane);
    ++n;
  };
  for (;;) {  // kv tiles
    wait_for_batch();
    if (warp_uniform(smem.batches[n % N_BATCH].stop != 0)) return;
    float dk[64], dv[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) dk[i] = dv[i] = 0.f;
    for (;;) {
      const Batch& batch = smem.batches[n % N_BATCH];
      const int end = t + warp_uniform(batch.count);
#pragma unroll 1
      for (; t < end; ++t) {
        const int w = t % N_SOFTMAX, stage = t % N_STAGE;
        const u32 q = descriptor_low(smem_address(smem.q)) + stage * (Q_TILE_BYTES / 16);
        const u32 p = descriptor_low(smem_address(smem.p), SCORE_PANEL_BYTES) +
                      w * (SCORE_BYTES / 16);
        random_delay(t);
        mbarrier_wait(smem_address(&barriers.scores_full[w]), full_parity(t / N_SOFTMAX));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Q_TILE / 16; ++k)
          wgmma_ss<MN_MAJOR, MN_MAJOR>(
              dv, descriptor(q + (N_STAGE * Q_TILE_BYTES + k * K_STEP_ROWS_BYTES) / 16),
              descriptor(p + k * K_STEP_ROWS_BYTES / 16));
#pragma unroll
        for (int k = 0; k < Q_TILE / 16; ++k)
          wgmma_ss<MN_MAJOR, MN_MAJOR>(
              dk, descriptor(q + k * K_STEP_ROWS_BYTES / 16),
              descriptor(p + (N_SOFTMAX * SCORE_BYTES + k * K_STEP_ROWS_BYTES) / 16));
        wgmma_commit();
        wgmma_wait<0>();
        mbarrier_arrive_warp(smem_address(&barriers.scores_empty[w]), lane);
        mbarrier_arrive_warp(smem_address(&barriers.stage_empty[stage]), lane);
      }
      if (warp_uniform(batch.is_last != 0)) break;
      next_batch();
      wait_for_batch();
    }
    const Batch& batch = smem.batches[n % N_BATCH];
    const int key0 = batch.row0, batch_index = batch.batch, kv_head = batch.kv_head;
    next_batch();
    const u32 dk_tile = smem_address(smem.dk), dv_tile = smem_address(smem.dv);
    named_barrier_sync(GRADIENTS, WARPGROUP_SIZE);  // all have stored the tile before
    stage_transposed(dk, dk_tile, params.scale, warp, lane);
    stage_transposed(dv, dv_tile, 1.f, warp, lane);
    named_barrier_sync(GRADIENTS, WARPGROUP_SIZE);
    store_keys(dk_tile, params.dk + batch_index * params.dk_strides.batch +
                            kv_head * params.dk_strides.head + key0 * params.dk_strides.row,
               params.dk_strides.row, params.kv_len - key0, 32 * warp + lane);
    store_keys(dv_tile, params.dv + batch_index * params.dv_strides.batch +
                            kv_head * params.dv_strides.head + key0 * params.dv_strides.row,
               params.dv_strides.row, params.kv_len - key0, 32 * warp + lane);
  }
}
