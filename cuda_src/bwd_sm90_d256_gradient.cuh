// bwd_sm90_d256, the warpgroups that hold dv and dk of the CTA's keys.
//
// Keys are the rows of both, and all operands come from shared memory: dv += P^T dout and
// dk += dS^T q.
#pragma once
#include "bwd_sm90_d256_layout.cuh"
#include "bwd_sm90_clear.cuh"
#include "bwd_sm90_products.cuh"
#include "bwd_sm90_store.cuh"

// Half of the columns: += scores^T rows.
DC_FN void start_product(float (&sum)[HEAD_DIM / 4], u32 scores, u32 rows) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Q_TILE / 16; ++k)
    wgmma_ss<K_MAJOR, MN_MAJOR>(sum, descriptor(scores + k_major_step(k, 0)),
                                descriptor(rows + mn_major_step(k)));
  wgmma_commit();
}

// Role of the dv warpgroup, or of the dk warpgroup.
template <bool IS_DV>
DC_FN void sum_gradient(SharedStorage& smem, const BackwardParams& params,
                        const BackwardMaps& maps, int warp, int lane) {
  const Barriers& barriers = smem.barriers;
  const u32 scores = smem_address(IS_DV ? smem.p[0] : smem.ds);
  const u32 scores_full = smem_address(IS_DV ? barriers.p_full : &barriers.ds_full);
  const u32 scores_empty = smem_address(IS_DV ? barriers.p_empty : &barriers.ds_empty);
  constexpr int N_STAGE = IS_DV ? N_P_STAGE : 1;
  const u32 rows_empty = cluster_address(
      smem_address(IS_DV ? barriers.dout_empty : barriers.q_empty), IS_DV ? DOUT_CTA : Q_CTA);
  Slot slot;
  int n = 0, t = 0;  // batches and steps so far
  for (;;) {  // kv tiles
    wait_for_batch(barriers, n);
    if (warp_uniform(smem.batches[n % N_BATCH].stop != 0)) break;
    const bool has_steps = warp_uniform(smem.batches[n % N_BATCH].count != 0);
    float sum[2][HEAD_DIM / 4];  // halves of the columns
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 4; ++i) sum[half][i] = 0.f;
    for (;;) {
      const Batch& batch = smem.batches[n % N_BATCH];
      const bool is_last = warp_uniform(batch.is_last != 0);
      const int end = t + warp_uniform(batch.count);
#pragma unroll 1
      for (; t < end; ++t) {
        const int stage = t % N_STAGE;
        const u32 a = descriptor_low(smem_offset(IS_DV ? smem.p[0] : smem.ds)) +
                      stage * (SCORE_BYTES / 16);
        random_delay(t);
        mbarrier_wait(scores_full + 8 * stage, full_parity(t / N_STAGE));
        if constexpr (IS_DV) {
          const Slot first = slot;
#pragma unroll
          for (int half = 0; half < 2; ++half, slot.advance()) {
            mbarrier_wait(smem_address(&barriers.dout_full[slot.number]), slot.parity);
            start_product(sum[half], a, descriptor_low(smem_offset(smem.dout), PANEL_BYTES) +
                                            slot.number * (HALF_BYTES / 16));
          }
          wgmma_wait<1>();
          mbarrier_free_cluster_warp(rows_empty + 8 * first.number, lane);
          wgmma_wait<0>();
          mbarrier_free_cluster_warp(
              rows_empty + 8 * next_slot(first.number), lane);
        } else {
          const int q_stage = t % N_Q_STAGE;
#pragma unroll
          for (int half = 0; half < 2; ++half)
            start_product(sum[half], a, descriptor_low(smem_offset(smem.q), PANEL_BYTES) +
                                            q_stage * (Q_TILE_BYTES / 16) +
                                            half * (HALF_BYTES / 16));
          wgmma_wait<0>();
          mbarrier_free_cluster_warp(rows_empty + 8 * q_stage, lane);
        }
        // The last scores of a kv tile stay ours: dk or dv goes through their place.
        if (!is_last || t + 1 < end) mbarrier_arrive_warp(scores_empty + 8 * stage, lane);
      }
      if (is_last) break;
      next_batch(barriers, n, lane);
      wait_for_batch(barriers, n);
    }
    const Batch& batch = smem.batches[n % N_BATCH];
    const TensorMap& map = IS_DV ? maps.dv : maps.dk;
    if (!has_steps) {
      clear_keys(params, IS_DV, batch);
      next_batch(barriers, n, lane);
      continue;
    }
    const int stage = (t - 1) % N_STAGE;
    if (!IS_DV)  // dq of both CTAs is made of it, too
      mbarrier_wait(smem_address(&barriers.ds_taken), full_parity(t - 1));
    const int row = 16 * warp + lane % 16;  // this lane's, as stmatrix wants it
    const u32 tile = scores + stage * SCORE_BYTES;
    const auto fragment = [&](int k) {
      return tile + row * PANEL_ROW_BYTES + (((2 * k + lane / 16) ^ row % 8) << 4);
    };
#pragma unroll
    for (int panel = 0; panel < N_PANEL; ++panel) {
      wait_for_panels<0>(PANELS + IS_DV);  // the first time: all are done with what lies there
      stage_rows(sum[panel / 2], panel % 2, IS_DV ? 1.f : params.scale, fragment);
      send_panel(map, tile, 64 * panel, batch.row0, batch, PANELS + IS_DV);
    }
    wait_for_panels<0>(PANELS + IS_DV);
    mbarrier_arrive_warp(scores_empty + 8 * stage, lane);
    next_batch(barriers, n, lane);
  }
  finish_panels();
}
