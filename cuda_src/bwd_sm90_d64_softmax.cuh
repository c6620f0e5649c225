// bwd_sm90_d64, the softmax warpgroups: S, P, dP, dS and dq of every second step.
//
// q rows are the rows of S and dP, so lse and delta are two numbers each a thread, dS is the A
// operand of dq as it lies in registers, and a warpgroup makes the whole part of dq by itself. Step
// t of warpgroup w = t % 2; the other one is in another phase of its own step:
//
//   S(t)                            from the step before, or the start of the kv tile
//   P = exp2(S * scale_log2 - lse_log2)  -> p[w]
//   dq_part(t - 2) -> dq_accum      at its turn, between the exponentials; it may be of the kv tile
//                                   before
//   dP = dout v^T                   when dq's registers are free; under it P is handed on
//   dS = P (dP - delta)                  -> ds[w]
//   dq = dS k
//   S(t + 2) = q k^T                queued behind dq; under both dS is handed on
//
// Registers of 160: S or P 64; dP 64, of which dS takes 32 packed and dq 32 in turn.
#pragma once
#include "bwd_sm90_d64_layout.cuh"
#include "bwd_sm90_scores.cuh"
#include "ptx/math.cuh"
#include "ptx/stmatrix.cuh"
#include "tile/smem_tile.cuh"

constexpr int N_K_STEP = HEAD_DIM / 16, N_KEY_STEP = KV_TILE / 16;
// Steps of descriptors: 16 bytes are 1.
constexpr u32 K_STEP = K_STEP_BYTES / 16, ROWS_STEP = K_STEP_ROWS_BYTES / 16;

// Two [64][KV_TILE] products of a kv tile: a b^T, both with HEAD_DIM columns.
DC_FN void start_scores(float (&s)[64], u32 a, u32 b) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < N_K_STEP; ++k)
    if (k == 0)
      wgmma_ss_first<K_MAJOR, K_MAJOR>(s, descriptor(a), descriptor(b));
    else
      wgmma_ss<K_MAJOR, K_MAJOR>(s, descriptor(a + k * K_STEP), descriptor(b + k * K_STEP));
}

DC_FN void compute_scores(SharedStorage& smem, const BackwardParams& params, int w, int warp,
                          int lane) {
  const Barriers& barriers = smem.barriers;
  const u32 p_full = smem_address(&barriers.p_full[w]);
  const u32 p_empty = smem_address(&barriers.p_empty[w]);
  const u32 ds_full = smem_address(&barriers.ds_full[w]);
  const u32 ds_empty = smem_address(&barriers.ds_empty[w]);
  const u32 turn = smem_address(&barriers.turn[w]), dq_added = smem_address(&barriers.dq_added[w]);
  // This lane's 16 bytes of a fragment of 16 columns, as stmatrix wants them; column chunks k are
  // at ^ (k % 4 * 32), and a panel on for k > 3.
  const u32 tile_row = 16 * warp + lane % 16;
  const u32 p_at = smem_address(smem.p[w]) + tile_row * PANEL_ROW_BYTES +
                   ((u32(lane / 16) ^ tile_row % 8) << 4);
  const auto fragment = [](u32 at, int k) {
    return (at ^ u32(k % 4 * K_STEP_BYTES)) + k / 4 * SCORE_PANEL_BYTES;
  };
  const int row = 16 * warp + lane / 4;  // of the tile

  float s[64];
  int n = 0;      // batches so far
  int begin = 0, end = 0;  // steps before batch n, and before the next one
  bool masked = false;     // as batch n says
  const auto open_batch = [&]() {
    wait_for_batch(barriers, n);
    const Batch& batch = smem.batches[n % N_BATCH];
    end = begin + warp_uniform(batch.count);
    masked = warp_uniform(batch.masked != 0);
  };
  const auto close_batch = [&]() {
    begin = end;
    next_batch(barriers, n, lane);
  };
  const auto q_rows = [&](int t) {
    return descriptor_low(smem_address(smem.q)) + t % N_STAGE * (Q_TILE_BYTES / 16);
  };
  const auto wait_for_stage = [&](int t) {
    mbarrier_wait(smem_address(&barriers.stage_full[t % N_STAGE]), full_parity(t / N_STAGE));
  };

  // What a step needs to know before S is there.
  float lse_log2 = 0.f, lse_log2_8 = 0.f;
  const auto look_up = [&](int t) {
    while (t >= end) {
      close_batch();
      open_batch();
    }
    const u32 lse_at = smem_address(&smem.lse_log2[t % N_STAGE][row]);
    lse_log2 = ld_shared_f32(lse_at), lse_log2_8 = ld_shared_f32(lse_at + 32);
  };

  float dq[32];
  float4* dq_at = nullptr;
  Send send = Send::NOTHING;  // what dq holds: the part of our step before, of any kv tile
  const schedule::Shape shape =
      schedule::make_shape(params.q_len, params.kv_len, params.mask_offset);
  const bool in_team = schedule::team_size(shape) > 1;
  // Where no step of ours will; `t` is the next one.
  const auto send_now = [&](int t) {
    if (send == Send::NOTHING) return;
    mbarrier_wait(turn, full_parity(t / N_SOFTMAX - 1));
    send_dq<8>(dq, 0, dq_at, send);
    mbarrier_arrive_warp(dq_added, lane);
    send = Send::NOTHING;
  };

  for (;;) {  // kv tiles
    open_batch();
    const Batch& first = smem.batches[n % N_BATCH];
    int t = begin + ((begin ^ w) & 1);
    const bool stop = warp_uniform(first.stop != 0);
    const int kv_end = begin + (stop ? 0 : warp_uniform(smem.steps_left[n % N_BATCH]));
    // A part must not wait for a batch that waits until the part's own batch is free.
    if (t >= kv_end) send_now(t);
    if (stop) return;
    const int kv_tile = warp_uniform(first.kv_tile0), kv_stage = kv_tile % N_KV_STAGE;
    const u32 k_rows = descriptor_low(smem_address(smem.k[kv_stage]));
    const u32 v_rows = descriptor_low(smem_address(smem.v[kv_stage]));
    // Also without a step of our own: else we could arrive for the next tile of this stage before
    // the others have arrived for this one.
    const bool has_steps = begin < kv_end;
    if (has_steps)
      mbarrier_wait(smem_address(&barriers.kv_full[kv_stage]), full_parity(kv_tile / N_KV_STAGE));
    if (t < kv_end) {
      wait_for_stage(t);
      start_scores(s, q_rows(t), k_rows);
      wgmma_commit();
      look_up(t);
      wgmma_wait<0>();
    }
#pragma unroll 1
    while (t < kv_end) {
      const Batch& batch = smem.batches[n % N_BATCH];
      const Step& step = batch.steps[t - begin];
      const int use = t / N_SOFTMAX;
      float dp[64];
      u32 ds[32];  // packed, as A operand
      if (masked)
        hide_unseen(s, Mask{params.q_len, params.kv_len, params.mask_offset},
                    step.q_tile * Q_TILE + row, batch.row0 + 2 * (lane % 4));
      random_delay(t);
      mbarrier_wait(p_empty, empty_parity(use));
      if (send != Send::NOTHING) mbarrier_wait(turn, full_parity(use - 1));
#pragma unroll
      for (int k = 0; k < N_KEY_STEP; ++k) {
        // Additions in one go would keep the warps for as long by themselves.
        if (k % 2 == 0) send_dq<2>(dq, k, dq_at, send);
        u32 p[4];
        take_exponentials(p, s, k, params.scale_log2, lse_log2, lse_log2_8);
        stmatrix_x4(fragment(p_at, k), p[0], p[1], p[2], p[3]);
      }
      if (send != Send::NOTHING) mbarrier_arrive_warp(dq_added, lane);
      dq_at = reinterpret_cast<float4*>(params.dq_accum) +
              i64(step.tile_index) * (Q_TILE * HEAD_DIM / 4) + 32 * warp + lane;
      send = how_to_send(step);
      start_scores(dp, q_rows(t) + (N_STAGE * Q_TILE_BYTES) / 16, v_rows);
      wgmma_commit();
      mbarrier_arrive_warp(p_full, lane);
      const u32 delta_at = smem_address(&smem.delta[t % N_STAGE][row]);
      const float delta = ld_shared_f32(delta_at), delta_8 = ld_shared_f32(delta_at + 32);
      mbarrier_wait(ds_empty, empty_parity(use));
      wgmma_wait<0>();
#pragma unroll
      for (int k = 0; k < N_KEY_STEP; ++k) {
        multiply_scores(ds, s, dp, k, delta, delta_8);
        stmatrix_x4(fragment(p_at, k) + N_SOFTMAX * SCORE_BYTES, ds[4 * k], ds[4 * k + 1],
                    ds[4 * k + 2], ds[4 * k + 3]);
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < N_KEY_STEP; ++k) {
        const u64 b = descriptor(k_rows + k * ROWS_STEP);
        if (k == 0)
          wgmma_rs_first<MN_MAJOR>(dq, ds[0], ds[1], ds[2], ds[3], b);
        else
          wgmma_rs<MN_MAJOR>(dq, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3], b);
      }
      wgmma_commit();
      if (t + N_SOFTMAX < kv_end) {
        wait_for_stage(t + N_SOFTMAX);
        start_scores(s, q_rows(t + N_SOFTMAX), k_rows);
        wgmma_commit();
      }
      mbarrier_arrive_warp(ds_full, lane);
      t += N_SOFTMAX;
      if (t < kv_end) look_up(t);  // under S; `step` is another one from here on
      wgmma_wait<0>();             // dq and S
    }
    if (has_steps) mbarrier_arrive_warp(smem_address(&barriers.kv_empty[kv_stage]), lane);
    for (bool is_last = false; !is_last;) {
      const Batch& batch = smem.batches[n % N_BATCH];
      is_last = warp_uniform(batch.is_last != 0);
      // A CTA of a team gets its next work when the turns of all its parts have come: they must not
      // wait for that work.
      if (in_team && warp_uniform(batch.ends_work != 0)) send_now(t);
      close_batch();
      if (!is_last) open_batch();
    }
  }
}
