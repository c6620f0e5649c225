// bwd_sm90_d192, the softmax warpgroup: S, P, dP, dS and dq of every step.
//
// q rows are the rows of S and dP, as in bwd_sm90_d64. Step t:
//
//   S(t)                            from the iteration before, or the start of the kv tile
//   dP = dout v^T                   under it:
//   P = exp2(S * scale_log2 - lse_log2)  -> p[t]
//   dS = P (dP - delta)                  -> ds[t]
//   dq = dS k                       64 columns at a time
//   dq_part -> dq_accum             at its turn, while the next columns are computed
//   S(t + 1) = q k^T                runs while the last columns are sent
//
// Registers of 136: S 48 + dP 48, whose places dq takes in turn, and dS packed 24.
#pragma once
#include "bwd_sm90_d192_layout.cuh"
#include "bwd_sm90_scores.cuh"
#include "bwd_sm90_transposed.cuh"
#include "ptx/stmatrix.cuh"

constexpr int N_K_STEP = HEAD_DIM / 16, N_KEY_STEP = KV_TILE / 16;
constexpr int N_SCORE = KV_TILE / 2;  // accumulators of a thread

// [64][KV_TILE]: a b^T, both with HEAD_DIM columns.
DC_FN void start_scores(float (&s)[N_SCORE], u32 rows, u32 keys) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < N_K_STEP; ++k) {
    const u64 a = descriptor(rows + k_major_step(k, Q_PANEL_BYTES));
    const u64 b = descriptor(keys + k_major_step(k, KV_PANEL_BYTES));
    if (k == 0)
      wgmma_ss_first<K_MAJOR, K_MAJOR>(s, a, b);
    else
      wgmma_ss<K_MAJOR, K_MAJOR>(s, a, b);
  }
  wgmma_commit();
}

// A panel of dq: 64 q rows, 64 columns.
DC_FN void start_dq(float (&dq)[32], const u32 (&ds)[4 * N_KEY_STEP], u32 keys, int panel) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < N_KEY_STEP; ++k) {
    const u64 b = descriptor(keys + panel * (KV_PANEL_BYTES / 16) + mn_major_step(k));
    if (k == 0)
      wgmma_rs_first<MN_MAJOR>(dq, ds[0], ds[1], ds[2], ds[3], b);
    else
      wgmma_rs<MN_MAJOR>(dq, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3], b);
  }
  wgmma_commit();
}

DC_FN void compute_scores(SharedStorage& smem, const BackwardParams& params, int warp, int lane) {
  const Barriers& barriers = smem.barriers;
  const int row = 16 * warp + lane / 4;  // of the tile
  const u32 k_rows = descriptor_low(smem_address(smem.k));
  const u32 v_rows = descriptor_low(smem_address(smem.v));

  float s[N_SCORE];
  int n = 0, t = 0;  // batches and steps so far
  int end = 0;       // steps up to the end of batch n
  const auto open_batch = [&]() {
    wait_for_batch(barriers, n);
    end += warp_uniform(smem.batches[n % N_BATCH].count);
  };
  const auto start_s = [&](int step) {
    const int stage = step % N_Q_STAGE;
    mbarrier_wait(smem_address(&barriers.q_full[stage]), full_parity(step / N_Q_STAGE));
    start_scores(s, descriptor_low(smem_address(smem.q)) + stage * (Q_TILE_BYTES / 16), k_rows);
  };

  for (;;) {  // kv tiles
    open_batch();
    if (warp_uniform(smem.batches[n % N_BATCH].stop != 0)) return;
    const int kv_end = t + warp_uniform(smem.steps_left[n % N_BATCH]);
    if (t < kv_end) {
      mbarrier_wait(smem_address(&barriers.kv_full),
                    full_parity(warp_uniform(smem.batches[n % N_BATCH].kv_tile0)));
      start_s(t);
      wgmma_wait<0>();
    }
#pragma unroll 1
    while (t < kv_end) {
      if (t == end) {
        next_batch(barriers, n, lane);
        open_batch();
      }
      const Batch& batch = smem.batches[n % N_BATCH];
      const Step& step = batch.steps[t - end + batch.count];
      const int q_stage = t % N_Q_STAGE, dout_stage = t % N_DOUT_STAGE;
      const int stage = t % N_SCORE_STAGE, use = t / N_SCORE_STAGE;
      float dp[N_SCORE];
      mbarrier_wait(smem_address(&barriers.dout_full[dout_stage]), full_parity(t / N_DOUT_STAGE));
      start_scores(dp, descriptor_low(smem_address(smem.dout)) + dout_stage * (Q_TILE_BYTES / 16),
                   v_rows);
      const u32 lse_at = smem_address(&smem.lse_log2[q_stage][row]);
      const float lse_log2 = ld_shared_f32(lse_at), lse_log2_8 = ld_shared_f32(lse_at + 32);
      random_delay(t);
      mbarrier_wait(smem_address(&barriers.p_empty[stage]), empty_parity(use));
      hide_unseen_of(s, params, batch, step);
      store_exponentials(s, transposed_fragment(smem_address(smem.p[stage]), warp, lane),
                         params.scale_log2, lse_log2, lse_log2_8);
      mbarrier_arrive_warp(smem_address(&barriers.p_full[stage]), lane);

      const u32 delta_at = smem_address(&smem.delta[q_stage][row]);
      const float delta = ld_shared_f32(delta_at), delta_8 = ld_shared_f32(delta_at + 32);
      mbarrier_wait(smem_address(&barriers.ds_empty[stage]), empty_parity(use));
      wgmma_wait<0>();  // dP
      keep_below(dp);
      mbarrier_arrive_warp(smem_address(&barriers.dout_empty[dout_stage]), lane);
      if (t + 1 == kv_end) mbarrier_arrive_warp(smem_address(&barriers.v_empty), lane);
      const u32 ds_at = transposed_fragment(smem_address(smem.ds[stage]), warp, lane);
      u32 ds[4 * N_KEY_STEP];  // packed, as A operand
#pragma unroll
      for (int k = 0; k < N_KEY_STEP; ++k) {
        multiply_scores(ds, s, dp, k, delta, delta_8);
        stmatrix_x4_trans(ds_at + 16 * k * PANEL_ROW_BYTES, ds[4 * k], ds[4 * k + 1],
                          ds[4 * k + 2], ds[4 * k + 3]);
      }
      // Panels of dq, in the accumulators of P and dP, which have been used; the last one in those
      // of dP, for S of the next step is under way beside it.
      const auto accumulators = [&](int panel) -> float(&)[32] {
        return reinterpret_cast<float(&)[32]>((N_PANEL - panel) % 2 ? dp : s);
      };
      start_dq(accumulators(0), ds, k_rows, 0);
      start_dq(accumulators(1), ds, k_rows, 1);
      mbarrier_arrive_warp(smem_address(&barriers.ds_full[stage]), lane);
      float4* dq_at = reinterpret_cast<float4*>(params.dq_accum) +
                      i64(step.tile_index) * (Q_TILE * HEAD_DIM / 4) + 32 * warp + lane;
      const Send send = how_to_send(step);
      random_delay(t);
#pragma unroll
      for (int i = 0; i < N_PANEL; ++i) {
        float(&dq)[32] = accumulators(i);
        wgmma_wait<1>();  // panel i
        keep_below(dq);
        if (i == 0) mbarrier_wait(smem_address(&barriers.turn[0]), full_parity(t));
        send_dq<8>(dq, 0, dq_at + i * (8 * WARPGROUP_SIZE), send);
        if (i + 2 < N_PANEL) {
          start_dq(dq, ds, k_rows, i + 2);
        } else if (i + 2 == N_PANEL) {
          if (t + 1 < kv_end) {
            start_s(t + 1);
          } else {          // an empty group
            wgmma_fence();  // without it ptxas puts one in, and says so
            wgmma_commit();
          }
        }
      }
      if (t + 1 == kv_end) mbarrier_arrive_warp(smem_address(&barriers.k_empty), lane);
      mbarrier_arrive_warp(smem_address(&barriers.dq_added[0]), lane);
      ++t;
      wgmma_wait<0>();
    }
    // Once round: the last step is in the last batch. Without a loop ptxas serialises the products.
    for (bool is_last = false; !is_last;) {
      is_last = warp_uniform(smem.batches[n % N_BATCH].is_last != 0);
      next_batch(barriers, n, lane);
      if (!is_last) open_batch();
    }
  }
}
