// bwd_sm90_d192, the warpgroups that hold dv and dk of the kv tile.
//
// Both are held transposed, [column][key], in N_PANEL pieces of 64 columns: all operands come from
// shared memory, and each product has all keys as columns. dv^T += dout^T P, dk^T += q^T dS.
#pragma once
#include "bwd_sm90_d192_layout.cuh"
#include "bwd_sm90_clear.cuh"
#include "bwd_sm90_store.cuh"
#include "bwd_sm90_transposed.cuh"

// Role of the dv warpgroup, or of the dk warpgroup.
template <bool IS_DV>
DC_FN void sum_gradient(SharedStorage& smem, const BackwardParams& params,
                        const BackwardMaps& maps, int warp, int lane) {
  constexpr int N_STAGE = IS_DV ? N_DOUT_STAGE : N_Q_STAGE;
  const Barriers& barriers = smem.barriers;
  const auto& scores = IS_DV ? smem.p : smem.ds;
  const auto& scores_full = IS_DV ? barriers.p_full : barriers.ds_full;
  const auto& scores_empty = IS_DV ? barriers.p_empty : barriers.ds_empty;
  const u32 rows_at = smem_address(IS_DV ? smem.dout[0] : smem.q[0]);
  const u32 empty_at = smem_address(IS_DV ? barriers.dout_empty : barriers.q_empty);
  int n = 0, t = 0;  // batches and steps so far
  for (;;) {  // kv tiles
    wait_for_batch(barriers, n);
    if (warp_uniform(smem.batches[n % N_BATCH].stop != 0)) break;
    const bool has_steps = warp_uniform(smem.batches[n % N_BATCH].count != 0);
    float sum[N_PANEL][KV_TILE / 2];
#pragma unroll
    for (int panel = 0; panel < N_PANEL; ++panel)
#pragma unroll
      for (int i = 0; i < KV_TILE / 2; ++i) sum[panel][i] = 0.f;
    for (;;) {
      const Batch& batch = smem.batches[n % N_BATCH];
      const bool is_last = warp_uniform(batch.is_last != 0);
      const int end = t + warp_uniform(batch.count);
#pragma unroll 1
      for (; t < end; ++t) {
        const int stage = t % N_SCORE_STAGE, row_stage = t % N_STAGE;
        const u32 a = descriptor_low(rows_at) + row_stage * (Q_TILE_BYTES / 16);
        const u32 b = descriptor_low(smem_address(scores[0])) + stage * (SCORE_BYTES / 16);
        random_delay(t);
        const u32 full = smem_address(&scores_full[stage]), parity = full_parity(t / N_SCORE_STAGE);
        if (IS_DV)
          mbarrier_wait(full, parity);
        else
          wait_written(full, parity);
        wgmma_fence();
#pragma unroll
        for (int panel = 0; panel < N_PANEL; ++panel)
#pragma unroll
          for (int k = 0; k < Q_TILE / 16; ++k)
            wgmma_ss<MN_MAJOR, K_MAJOR>(
                sum[panel], descriptor(a + panel * (Q_PANEL_BYTES / 16) + mn_major_step(k)),
                descriptor(b + k_major_step(k, 0)));
        wgmma_commit();
        wgmma_wait<0>();
        mbarrier_arrive_warp(empty_at + 8 * row_stage, lane);
        // The last scores of a kv tile stay ours: dk or dv goes through their place.
        if (!is_last || t + 1 < end) mbarrier_arrive_warp(smem_address(&scores_empty[stage]), lane);
      }
      if (is_last) break;
      next_batch(barriers, n, lane);
      wait_for_batch(barriers, n);
    }
    const Batch& batch = smem.batches[n % N_BATCH];
    const int late_lane = thread_index() % WARP_SIZE;  // anew: registers are short
    const TensorMap& map = IS_DV ? maps.dv : maps.dk;
    if (!has_steps) {
      clear_keys(params, IS_DV, batch);
      next_batch(barriers, n, late_lane);
      continue;
    }
    const int stage = (t + 1) % N_SCORE_STAGE;  // of step t - 1
    const u32 tile = smem_address(scores[0]) + stage * SCORE_BYTES;
#pragma unroll
    for (int panel = 0; panel < N_PANEL; ++panel) {
      wait_for_panels<0>(PANELS + IS_DV);
      stage_transposed(sum[panel], tile, IS_DV ? 1.f : params.scale, warp, lane);
      send_panel(map, tile, 64 * panel, batch.row0, batch, PANELS + IS_DV);
    }
    wait_for_panels<0>(PANELS + IS_DV);
    mbarrier_arrive_warp(smem_address(&scores_empty[stage]), late_lane);
    next_batch(barriers, n, late_lane);
  }
  finish_panels();
}
