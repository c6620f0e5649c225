// bwd_sm90_d64, the gradient warpgroup: dk and dv of the kv tile.
//
// It holds both transposed, [column][key], so that all operands come from shared memory and each
// product has 128 keys as columns: dv^T += dout^T P, dk^T += q^T dS. P of a step comes
// before its dS, so dv is started first.
#pragma once
#include "bwd_sm90_d64_layout.cuh"
#include "bwd_sm90_store.cuh"
#include "bwd_sm90_transposed.cuh"

DC_FN void sum_gradients(SharedStorage& smem, const BackwardParams& params,
                         const BackwardMaps& maps, int warp, int lane) {
  const Barriers& barriers = smem.barriers;
  int n = 0, t = 0;  // batches and steps so far
  for (;;) {  // kv tiles
    wait_for_batch(barriers, n);
    if (warp_uniform(smem.batches[n % N_BATCH].stop != 0)) break;
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
        wait_written(smem_address(&barriers.p_full[w]), full_parity(t / N_SOFTMAX));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Q_TILE / 16; ++k)
          wgmma_ss<MN_MAJOR, MN_MAJOR>(
              dv, descriptor(q + (N_STAGE * Q_TILE_BYTES + k * K_STEP_ROWS_BYTES) / 16),
              descriptor(p + k * K_STEP_ROWS_BYTES / 16));
        wgmma_commit();
        wait_written(smem_address(&barriers.ds_full[w]), full_parity(t / N_SOFTMAX));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Q_TILE / 16; ++k)
          wgmma_ss<MN_MAJOR, MN_MAJOR>(
              dk, descriptor(q + k * K_STEP_ROWS_BYTES / 16),
              descriptor(p + (N_SOFTMAX * SCORE_BYTES + k * K_STEP_ROWS_BYTES) / 16));
        wgmma_commit();
        wgmma_wait<1>();
        mbarrier_arrive_warp(smem_address(&barriers.p_empty[w]), lane);
        wgmma_wait<0>();
        mbarrier_arrive_warp(smem_address(&barriers.ds_empty[w]), lane);
        mbarrier_arrive_warp(smem_address(&barriers.stage_empty[stage]), lane);
      }
      if (warp_uniform(batch.is_last != 0)) break;
      next_batch(barriers, n, lane);
      wait_for_batch(barriers, n);
    }
    const Batch& batch = smem.batches[n % N_BATCH];
    wait_for_panels<0>(PANELS);
    stage_transposed(dk, smem_address(smem.dk), params.scale, warp, lane);
    send_panel(maps.dk, smem_address(smem.dk), 0, batch.row0, batch, PANELS);
    stage_transposed(dv, smem_address(smem.dv), 1.f, warp, lane);
    send_panel(maps.dv, smem_address(smem.dv), 0, batch.row0, batch, PANELS);
    next_batch(barriers, n, lane);
  }
  finish_panels();
}
