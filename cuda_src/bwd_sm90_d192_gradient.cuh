// bwd_sm90_d192, the warpgroups that hold dv and dk of the kv tile.
//
// Both are held transposed, [column][key], in N_PANEL pieces of 64 columns: all operands come from
// shared memory, and each product has all keys as columns. dv^T += dout^T P, dk^T += q^T dS.
#pragma once
#include "bwd_sm90_d192_layout.cuh"
#include "bwd_sm90_clear.cuh"
#include "bwd_sm90_transposed.cuh"

// Role of the dv warpgroup, or of the dk warpgroup.
template <bool IS_DV>
DC_FN void sum_gradient(SharedStorage& smem, const BackwardParams& params, int warp, int lane) {
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
    if (warp_uniform(smem.batches[n % N_BATCH].stop != 0)) return;
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
    const int key0 = batch.row0;
    const Strides strides = IS_DV ? params.dv_strides : params.dk_strides;
    Element* to = (IS_DV ? params.dv : params.dk) + batch.batch * strides.batch +
                  batch.kv_head * strides.head + key0 * strides.row;
    next_batch(barriers, n, lane);
    int thread = 32 * warp + lane;
    compute_late(thread);  // registers are short: nothing that follows from it outlives a kv tile
    if (!has_steps) {
      clear_keys(to, strides.row, params.kv_len - key0, thread);
      continue;
    }
    const int stage = (t + 1) % N_SCORE_STAGE;  // of step t - 1
    const u32 tile = smem_address(scores[0]) + stage * SCORE_BYTES;
#pragma unroll
    for (int panel = 0; panel < N_PANEL; ++panel) {
      named_barrier_sync(GRADIENTS + IS_DV, WARPGROUP_SIZE);  // all are done with what lies there
      stage_transposed(sum[panel], tile, IS_DV ? 1.f : params.scale, warp, lane);
      named_barrier_sync(GRADIENTS + IS_DV, WARPGROUP_SIZE);
      store_keys(tile, to + 64 * panel, strides.row, params.kv_len - key0,
                 DC_HEAD_DIM - 64 * panel, thread);
    }
    mbarrier_arrive_warp(smem_address(&scores_empty[stage]), lane);
  }
}
