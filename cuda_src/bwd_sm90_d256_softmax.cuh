// bwd_sm90_d256, the softmax warpgroup: S, P, dP, dS and dq of every step.
//
// q rows are the rows of S and dP, as in bwd_sm90_d192. Step t:
//
//   S = q k^T
//   dq(t - 1) = dS k                this CTA's columns: its own keys, then the other CTA's
//   dP = dout v^T                   under these three:
//   P = exp2(S * scale_log2 - lse_log2)  -> p
//   dq_part(t - 1) -> dq_accum           at its turn: half of it at once, half with dS
//   dS = P (dP - delta)                  -> ds, and by the exchange warp to the other CTA
//
// dq is a step late, so that dS of the other CTA comes under S, and so that the additions to L2 run
// beside products. Those read their registers late: nothing is written over them before dS is done.
#pragma once
#include "bwd_sm90_d256_layout.cuh"
#include "bwd_sm90_scores.cuh"
#include "bwd_sm90_transposed.cuh"
#include "ptx/stmatrix.cuh"

constexpr int N_K_STEP = HEAD_DIM / 16, N_KEY_STEP = CTA_KEYS / 16;
constexpr int N_SCORE = CTA_KEYS / 2, N_DQ = 64 * DQ_PANELS / 2;  // accumulators of a thread

// [64][CTA_KEYS] = a b^T; the columns of a are in two places, each half of them.
DC_FN void start_scores(float (&s)[N_SCORE], u32 rows, u32 more_rows, u32 keys) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < N_K_STEP; ++k) {
    const int half_k = k % (N_K_STEP / 2);
    const u64 a =
        descriptor((k == half_k ? rows : more_rows) + k_major_step(half_k, PANEL_BYTES));
    const u64 b = descriptor(keys + k_major_step(k, PANEL_BYTES));
    if (k == 0)
      wgmma_ss_first<K_MAJOR, K_MAJOR>(s, a, b);
    else
      wgmma_ss<K_MAJOR, K_MAJOR>(s, a, b);
  }
  wgmma_commit();
}

// This CTA's columns of dq: first its own keys, then the other's.
DC_FN void start_dq(float (&dq)[N_DQ], u32 ds, u32 keys, u32 ds_other, u32 keys_other) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < N_KEY_STEP; ++k) {
    const u64 a = descriptor(ds + mn_major_step(k)), b = descriptor(keys + mn_major_step(k));
    if (k == 0)
      wgmma_ss_first<MN_MAJOR, MN_MAJOR>(dq, a, b);
    else
      wgmma_ss<MN_MAJOR, MN_MAJOR>(dq, a, b);
  }
#pragma unroll
  for (int k = 0; k < N_KEY_STEP; ++k)
    wgmma_ss<MN_MAJOR, MN_MAJOR>(dq, descriptor(ds_other + mn_major_step(k)),
                                 descriptor(keys_other + mn_major_step(k)));
  wgmma_commit();
}

DC_FN void compute_scores(SharedStorage& smem, const BackwardParams& params, int warp, int lane) {
  const Barriers& barriers = smem.barriers;
  const int rank = cta_rank();
  const int row = 16 * warp + lane / 4;  // of the tile
  const u32 k_rows = descriptor_low(smem_offset(smem.k));
  const u32 k_columns = descriptor_low(smem_offset(smem.k) + rank * OTHER_KEYS_BYTES, PANEL_BYTES);
  const u32 k_other = descriptor_low(smem_offset(smem.k_other), PANEL_BYTES);
  const u32 dout_empty = cluster_address(smem_address(barriers.dout_empty), DOUT_CTA);
  const u32 ds_taken = cluster_address(smem_address(&barriers.ds_taken), 1 - rank);

  float s[N_SCORE], dp[N_SCORE], dq[N_DQ];
  int n = 0, t = 0;  // batches and steps so far
  int end = 0;       // steps up to the end of batch n
  Slot slot;         // of dout
  const auto open_batch = [&]() {
    wait_for_batch(barriers, n);
    end += warp_uniform(smem.batches[n % N_BATCH].count);
  };
  const auto start_s = [&]() {
    const int stage = t % N_Q_STAGE;
    const u32 rows = descriptor_low(smem_offset(smem.q)) + stage * (Q_TILE_BYTES / 16);
    mbarrier_wait(smem_address(&barriers.q_full[stage]), full_parity(t / N_Q_STAGE));
    start_scores(s, rows, rows + HALF_BYTES / 16, k_rows);
  };
  const auto start_dp = [&]() {
    u32 rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half, slot.advance()) {
      mbarrier_wait(smem_address(&barriers.dout_full[slot.number]), slot.parity);
      rows[half] = descriptor_low(smem_offset(smem.dout)) + slot.number * (HALF_BYTES / 16);
    }
    start_scores(dp, rows[0], rows[1], descriptor_low(smem_offset(smem.v)));
  };
  // dq of step t - 1; without such a step of old bytes, and dropped: leaving it out makes ptxas
  // serialise the products.
  const auto start_dq_before = [&](bool is_there) {
    if (is_there) {
      mbarrier_wait(smem_address(&barriers.ds_full), full_parity(t - 1));
      mbarrier_wait(smem_address(&barriers.other_full), full_parity(t - 1));
    }
    start_dq(dq, descriptor_low(smem_offset(smem.ds)), k_columns,
             descriptor_low(smem_offset(smem.ds_other)), k_other);
  };
  // It is done, its dS is free, and its turn has come.
  const auto open_turn_before = [&]() {
    mbarrier_arrive_warp(smem_address(&barriers.ds_taken), lane);
    mbarrier_free_cluster_warp(ds_taken, lane);
    random_delay(t);
    mbarrier_wait(smem_address(&barriers.turn[0]), full_parity(t - 1));
  };
  const auto end_turn_before = [&]() {
    mbarrier_arrive_warp(smem_address(&barriers.dq_added[0]), lane);
  };

  for (;;) {  // kv tiles
    open_batch();
    if (warp_uniform(smem.batches[n % N_BATCH].stop != 0)) return;
    const int kv_begin = t, kv_end = t + warp_uniform(smem.steps_left[n % N_BATCH]);
    if (t < kv_end)
      mbarrier_wait(smem_address(&barriers.kv_full),
                    full_parity(warp_uniform(smem.batches[n % N_BATCH].kv_tile0)));
    float4* dq_at = nullptr;     // of the step before
    Send send = Send::NOTHING;
#pragma unroll 1
    for (; t < kv_end; ++t) {
      if (t == end) {
        next_batch(barriers, n, lane);
        open_batch();
      }
      const Batch& batch = smem.batches[n % N_BATCH];
      const Step& step = batch.steps[t - end + batch.count];
      const int q_stage = t % N_Q_STAGE, stage = t % N_P_STAGE;
      start_s();
      start_dq_before(t > kv_begin);
      const int dout_slot = slot.number;
      start_dp();
      const u32 lse_at = smem_address(&smem.lse_log2[q_stage][row]);
      const float lse_log2 = ld_shared_f32(lse_at), lse_log2_8 = ld_shared_f32(lse_at + 32);
      const u32 delta_at = smem_address(&smem.delta[q_stage][row]);
      const float delta = ld_shared_f32(delta_at), delta_8 = ld_shared_f32(delta_at + 32);
      random_delay(t);
      mbarrier_wait(smem_address(&barriers.p_empty[stage]), empty_parity(t / N_P_STAGE));
      wgmma_wait<2>();  // S
      keep_below(s);
      hide_unseen_of(s, params, batch, step);
      store_exponentials(s, transposed_fragment(smem_address(smem.p[stage]), warp, lane),
                         params.scale_log2, lse_log2, lse_log2_8);
      mbarrier_arrive_warp(smem_address(&barriers.p_full[stage]), lane);

      wgmma_wait<1>();  // dq of the step before
      keep_below(dq);
      if (t > kv_begin) open_turn_before();
      send_dq<N_DQ / 8>(dq, 0, dq_at, send);
      mbarrier_wait(smem_address(&barriers.ds_empty), empty_parity(t));
      mbarrier_wait(smem_address(&barriers.ds_taken), empty_parity(t));
      wgmma_wait<0>();  // dP
      keep_below(dp);
      mbarrier_free_cluster_warp(dout_empty + 8 * dout_slot, lane);
      mbarrier_free_cluster_warp(dout_empty + 8 * next_slot(dout_slot), lane);
      if (t + 1 == kv_end) mbarrier_arrive_warp(smem_address(&barriers.v_empty), lane);
      const u32 ds_at = transposed_fragment(smem_address(smem.ds), warp, lane);
#pragma unroll
      for (int k = 0; k < N_KEY_STEP; ++k) {
        u32 ds[N_SCORE / 2];
        multiply_scores(ds, s, dp, k, delta, delta_8);
        send_dq<N_DQ / 32>(dq, N_DQ / 8 + k * N_DQ / 32, dq_at, send);
        stmatrix_x4_trans(ds_at + 16 * k * PANEL_ROW_BYTES, ds[4 * k], ds[4 * k + 1],
                          ds[4 * k + 2], ds[4 * k + 3]);
      }
      fence_async_smem();
      mbarrier_arrive_warp(smem_address(&barriers.ds_full), lane);
      keep_alive(dq);
      if (t > kv_begin) end_turn_before();
      dq_at = reinterpret_cast<float4*>(params.dq_accum) +
              i64(step.tile_index) * (Q_TILE * HEAD_DIM / 4) +
              rank * (N_DQ / 4 * WARPGROUP_SIZE) + 32 * warp + lane;
      send = how_to_send(step);
    }
    if (kv_end > kv_begin) {
      start_dq_before(true);
      wgmma_wait<0>();
      keep_below(dq);
      mbarrier_arrive_warp(smem_address(&barriers.k_empty), lane);
      open_turn_before();
      send_dq<N_DQ / 4>(dq, 0, dq_at, send);
      end_turn_before();
    }
    next_batch(barriers, n, lane);
  }
}
