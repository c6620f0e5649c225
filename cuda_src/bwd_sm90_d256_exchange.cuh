// bwd_sm90_d256, what the CTAs of a pair do for one another: works, q and dout, and dS.
#pragma once
#include "bwd_sm90_d256_layout.cuh"
#include "ptx/memory.cuh"

// The next work of the pair, number n_work of it: CTA 0 takes it from the counter, when both are
// ready for it.
DC_FN int take_work_of_pair(SharedStorage& smem, const BackwardParams& params, int n_work,
                            int lane) {
  const Barriers& barriers = smem.barriers;
  int work = 0;
  if (lane == 0) {
    if (cta_rank() == 0) {
      mbarrier_wait<Arrivals::OF_CLUSTER>(smem_address(&barriers.work_wanted), full_parity(n_work));
      work = int(atomicAdd(params.work_counter, 1u));
      store_cluster(cluster_address(smem_address(&smem.work), 1), u32(work));
      mbarrier_arrive_cluster(cluster_address(smem_address(&barriers.work_came), 1));
    } else {
      mbarrier_arrive_cluster(cluster_address(smem_address(&barriers.work_wanted), 0));
      mbarrier_wait<Arrivals::OF_CLUSTER>(smem_address(&barriers.work_came), full_parity(n_work));
      work = int(ld_shared(smem_address(&smem.work)));
    }
  }
  return __shfl_sync(0xffffffffu, work, 0);
}

// The producer: k and v of each kv tile, q, its rows' lse and delta, and dout of each step.
DC_FN void load_tiles(SharedStorage& smem, const BackwardParams& params, const BackwardMaps& maps) {
  const Barriers& barriers = smem.barriers;
  const int rank = cta_rank();
  const int first_row = Mask{params.q_len, params.kv_len, params.mask_offset}.first_row();
  const int q_per_kv = params.n_q_head / params.n_kv_head;
  const u32 kv_full = smem_address(&barriers.kv_full);
  const auto load_keys = [&](const u8* to, const TensorMap& map, const Batch& batch, int row,
                             int first_panel, int n_panel) {
#pragma unroll 1
    for (int panel = 0; panel < n_panel; ++panel)
      tma_load(smem_address(to) + panel * PANEL_BYTES, map, kv_full, 64 * (first_panel + panel),
               row, batch.kv_head, batch.batch);
  };
  const auto load_rows = [](const u8* to, const TensorMap& map, u32 barrier, int row, int head,
                            int batch, int first_panel, int n_panel) {
#pragma unroll 1
    for (int panel = 0; panel < n_panel; ++panel)
      tma_load_multicast(smem_address(to) + panel * PANEL_BYTES, map, barrier, BOTH,
                         64 * (first_panel + panel), row, head, batch);
  };
  int t = 0, n_kv_tile = 0;  // steps, and kv tiles with steps, so far
  Slot slot;
  for (int n = 0;; ++n) {
    const Batch& batch = smem.batches[n % N_BATCH];
    wait_for_batch(barriers, n);
    if (batch.stop) return;
    mbarrier_arrive(smem_address(&barriers.batch_begun[n % N_BATCH]));
    for (int i = 0; i < batch.count; ++i, ++t) {
      const bool new_kv_tile = i == 0 && batch.is_first;
      if (new_kv_tile) {
        mbarrier_wait(smem_address(&barriers.v_empty), empty_parity(n_kv_tile));
        mbarrier_arrive_expect(kv_full, 2 * KEYS_BYTES + OTHER_KEYS_BYTES);
        load_keys(smem.v, maps.v, batch, batch.row0, 0, N_PANEL);
      }
      const int stage = t % N_Q_STAGE, use = t / N_Q_STAGE;
      const Step step = batch.steps[i];
      const int row = step.q_tile * Q_TILE - first_row;
      const int q_head = batch.kv_head * q_per_kv + step.q_head;
      const u32 q_full = smem_address(&barriers.q_full[stage]);
      random_delay(t);
      // Who loads waits until both CTAs are done with what was there, the other one until its
      // barrier's last phase has ended.
      mbarrier_wait(rank == Q_CTA ? smem_address(&barriers.q_empty[stage]) : q_full,
                    empty_parity(use));
      mbarrier_arrive_expect(q_full, Q_TILE_BYTES + 2 * Q_TILE * 4);
      if (rank == Q_CTA) {
        load_rows(smem.q[stage], maps.q, q_full, row, q_head, batch.batch, 0, N_PANEL);
        const i64 rows = i64(step.tile_index) * Q_TILE;
        bulk_load_multicast(smem_address(smem.lse_log2[stage]), params.lse_log2 + rows, Q_TILE * 4,
                            q_full, BOTH);
        bulk_load_multicast(smem_address(smem.delta[stage]), params.delta + rows, Q_TILE * 4,
                            q_full, BOTH);
      }
      if (new_kv_tile) {  // before dout, which is needed later
        mbarrier_wait(smem_address(&barriers.k_empty), empty_parity(n_kv_tile));
        load_keys(smem.k, maps.k, batch, batch.row0, 0, N_PANEL);
        load_keys(smem.k_other, maps.k, batch, batch.row0 + (1 - 2 * rank) * CTA_KEYS,
                  rank * DQ_PANELS, DQ_PANELS);
        ++n_kv_tile;
      }
#pragma unroll 1
      for (int half = 0; half < 2; ++half, slot.advance()) {
        const u32 dout_full = smem_address(&barriers.dout_full[slot.number]);
        mbarrier_wait(rank == DOUT_CTA ? smem_address(&barriers.dout_empty[slot.number])
                                       : dout_full,
                      slot.parity ^ 1);
        mbarrier_arrive_expect(dout_full, HALF_BYTES);
        if (rank == DOUT_CTA)
          load_rows(smem.dout[slot.number], maps.dout, dout_full, row, q_head, batch.batch,
                    half * HALF_PANELS, HALF_PANELS);
      }
    }
    free_batch(barriers, n);
  }
}

// The exchange warp: dS of each step to the other CTA. That its place there is free, the softmax
// warps know (ds_taken) before they store the next dS.
DC_FN void send_scores(SharedStorage& smem) {
  const Barriers& barriers = smem.barriers;
  const int other = 1 - cta_rank();
  int t = 0;
  for (int n = 0;; ++n) {
    const Batch& batch = smem.batches[n % N_BATCH];
    wait_for_batch(barriers, n);
    if (batch.stop) return;
    for (const int end = t + batch.count; t < end; ++t) {
      const u32 other_full = smem_address(&barriers.other_full);
      mbarrier_wait(smem_address(&barriers.ds_full), full_parity(t));
      mbarrier_arrive_expect(other_full, SCORE_BYTES);
      random_delay(t);
      bulk_copy_cluster(cluster_address(smem_address(smem.ds_other), other), smem_address(smem.ds),
                        SCORE_BYTES, cluster_address(other_full, other));
    }
    free_batch(barriers, n);
  }
}
