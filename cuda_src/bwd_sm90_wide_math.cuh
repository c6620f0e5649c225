// bwd_sm90_wide, the consumers: the five products, dk and dv.
//
// All 64 keys of the kv tile are rows (S^T and dP^T are [key][q row]). Warpgroup w computes scores
// of q rows 32 w .. 32 w + 31, and dk, dv and dq of the columns of its panels. So it has half of P
// and dS in registers, as A operands of dv and dk as they lie there, and takes the other half from
// shared memory; dq needs dS transposed, all of it from there.
//
// Step t, in the order in which products are issued and run:
//
//   S  = -lse / scale + k q^T       rows[t], q[t]
//   dq(t - 1) = ds[t - 1]^T k       first panel; a step late: its dS has long been there
//     P = exp2(S * scale_log2) -> p[t]
//   dP = -delta       + v dout^T    rows[t], dout[t]
//   dv += P dout                    own q rows first, then those of the other warpgroup
//     dq(t - 1) -> dq               first panel
//   dq(t - 1) = ds[t - 1]^T k       second panel
//     dS = P dP -> ds[t]
//   dk += dS q                      as dv; may run on into the next step
//     dq(t - 1) -> dq               second panel, when the writer has added the first one
//
// Registers of 240: dk 64 + dv 64, S 16 + dP 16, a panel of dq 32, packed P and dS 16.
#pragma once
#include "bwd_sm90_products.cuh"
#include "bwd_sm90_wide_layout.cuh"
#include "ptx/math.cuh"

constexpr int N_K_STEP = HEAD_DIM / 16;
constexpr int Q_ROWS = Q_TILE / N_CONSUMER;  // whose scores a warpgroup computes
constexpr int OWN_K_STEPS = Q_ROWS / 16;
// From one panel of 64 columns to the next.
constexpr int KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES, Q_PANEL_BYTES = Q_TILE * PANEL_ROW_BYTES;

// Stage of step t, of what lies there twice; -1 is a step, too: the one before the first.
static_assert(N_Q_STAGE == 2 && N_SCORE_STAGE == 2, "a bit of the step's number");
DC_FN int stage_of(int t) { return t & 1; }

// What a consumer thread knows all along.
struct Consumer {
  int w, warp, lane;  // warpgroup among the consumers, warp within, lane
  int first_panel;    // of its columns
  u32 fragment_at, swizzle_row;  // a lane's row in a panel, as stmatrix wants it
  u32 lse_ones[2];    // A operand that brings in lse, and hides keys that do not exist
  u32 delta_ones, zero;

  DC_FN Consumer(int w, int warp, int lane)
      : w(w), warp(warp), lane(lane), first_panel(w * PANELS),
        delta_ones(delta_columns(lane)), zero(opaque_zero()) {
    const u32 row = 16 * warp + lane % 16;
    fragment_at = row * PANEL_ROW_BYTES;
    swizzle_row = row % 8;
  }

  // From a panel to this lane's 16 bytes of the fragment of 16 columns number k.
  DC_FN u32 fragment(int k) const {
    return fragment_at + (((2 * k + lane / 16) ^ swizzle_row) << 4);
  }
};

// Columns of dk and dv of a kv tile.
struct Sums {
  float dk[32 * PANELS], dv[32 * PANELS];
};

// S or dP: what the row values bring in, and the product of all keys and a warpgroup's q rows.
DC_FN void start_scores(float (&d)[Q_ROWS / 2], const u32 (&ones)[2], u32 zero, u64 rows,
                        u32 keys, u32 q_rows) {
  wgmma_fence();
  wgmma_rs_first_bf16<K_MAJOR>(d, ones[0], ones[1], zero, zero, rows);
#pragma unroll
  for (int k = 0; k < N_K_STEP; ++k)
    wgmma_ss<K_MAJOR, K_MAJOR>(d, descriptor(keys + k_major_step(k, KV_PANEL_BYTES)),
                               descriptor(q_rows + k_major_step(k, Q_PANEL_BYTES)));
  wgmma_commit();
}

// acc += scores * columns: own q rows, with scores from registers ...
template <int N>
DC_FN void start_own_rows(float (&acc)[N], const u32 (&scores)[4 * OWN_K_STEPS], u32 columns,
                          int w) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < OWN_K_STEPS; ++k)
    wgmma_rs<MN_MAJOR>(acc, scores[4 * k], scores[4 * k + 1], scores[4 * k + 2],
                       scores[4 * k + 3],
                       descriptor(columns + mn_major_step(k) + w * mn_major_step(OWN_K_STEPS)));
  wgmma_commit();
}

// ... and those of the other warpgroup, from shared memory.
template <int N>
DC_FN void start_other_rows(float (&acc)[N], u32 scores, u32 columns, int w) {
  scores += (1 - w) * k_major_step(OWN_K_STEPS, 0);
  columns += (1 - w) * mn_major_step(OWN_K_STEPS);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < OWN_K_STEPS; ++k)
    wgmma_ss<K_MAJOR, MN_MAJOR>(acc, descriptor(scores + k_major_step(k, 0)),
                                descriptor(columns + mn_major_step(k)));
  wgmma_commit();
}

// A panel of dq of step t: 64 q rows, 64 columns.
DC_FN void start_dq(float (&dq)[32], const SharedStorage& smem, int panel, int t) {
  const u32 ds = descriptor_low(smem_address(smem.ds[stage_of(t)]));
  const u32 k_columns = descriptor_low(smem_address(smem.k) + panel * KV_PANEL_BYTES);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < KV_TILE / 16; ++k) {
    const u64 a = descriptor(ds + mn_major_step(k)), b = descriptor(k_columns + mn_major_step(k));
    if (k == 0)
      wgmma_ss_first<MN_MAJOR, MN_MAJOR>(dq, a, b);
    else
      wgmma_ss<MN_MAJOR, MN_MAJOR>(dq, a, b);
  }
  wgmma_commit();
}

// Hands panel i of step t to its writer.
DC_FN void store_dq_panel(const float (&dq)[32], SharedStorage& smem, const Consumer& me, int i,
                          int t) {
  const int n_use = PANELS * t + i;  // uses of the slot before
  const u32 at = smem_address(smem.dq[me.w]) + (32 * me.warp + me.lane) * 16;
  random_delay(n_use);
  mbarrier_wait(smem_address(&smem.barriers.dq_empty[me.w]), empty_parity(n_use));
#pragma unroll
  for (int j = 0; j < 8; ++j)
    st_shared_v4(at + j * WARPGROUP_SIZE * 16, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2],
                 dq[4 * j + 3]);
  mbarrier_arrive_warp(smem_address(&smem.barriers.dq_full[i][me.w]), me.lane);
}

// This warpgroup's scores into a tile of them.
DC_FN void store_scores(u32 tile, const u32 (&scores)[4 * OWN_K_STEPS], const Consumer& me) {
#pragma unroll
  for (int k = 0; k < OWN_K_STEPS; ++k)
    stmatrix_x4(tile + me.fragment(OWN_K_STEPS * me.w + k), scores[4 * k], scores[4 * k + 1],
                scores[4 * k + 2], scores[4 * k + 3]);
}

DC_FN void pack_scores(u32 (&packed)[4 * OWN_K_STEPS], const float (&x)[Q_ROWS / 2]) {
#pragma unroll
  for (int i = 0; i < 4 * OWN_K_STEPS; ++i) packed[i] = pack(x[2 * i], x[2 * i + 1]);
}

// All warps have stored their scores of step t. The fence: they were ordinary stores, products read
// them through the async proxy.
DC_FN void wait_scores(const u64& full, int t) {
  mbarrier_wait(smem_address(&full), full_parity(t));
  fence_async_smem();
}

// Step t of the kernel (counted over all kv tiles), the first of its kv tile or not; its batch ends
// before t_end, and all of it is cut by the diagonal, or nothing.
//
// In the first step of a kv tile the products for dq are of old bytes, and dropped: leaving them
// out there makes ptxas serialise the products.
DC_FN void visit(Sums& sums, SharedStorage& smem, const BackwardParams& params,
                 const Consumer& me, int t, int t_end, bool is_first, const Batch& batch,
                 bool masked) {
  const Barriers& barriers = smem.barriers;
  const int stage = stage_of(t), dout_stage = t % N_DOUT_STAGE;
  const u32 q = smem_address(smem.q[stage]), dout = smem_address(smem.dout[dout_stage]);
  const u32 p_tile = smem_address(smem.p[stage]), ds_tile = smem_address(smem.ds[stage]);
  const u32 own_rows = me.w * Q_ROWS * PANEL_ROW_BYTES;
  const u64 rows = row_values_descriptor(smem_address(smem.rows[stage]) +
                                         me.w * Q_ROWS * ROW_VALUE_BYTES);
  float s[Q_ROWS / 2], dp[Q_ROWS / 2], dq[32];
  u32 p[4 * OWN_K_STEPS], ds[4 * OWN_K_STEPS];  // packed, as A operands

  mbarrier_wait(smem_address(&barriers.q_full[stage]), full_parity(t / N_Q_STAGE));
  start_scores(s, me.lse_ones, me.zero, rows, descriptor_low(smem_address(smem.k)),
               descriptor_low(q + own_rows));
  start_dq(dq, smem, me.first_panel, t - 1);
  wgmma_wait<1>();  // S, and dk of the step before
  if (!is_first)
    mbarrier_arrive_warp(smem_address(&barriers.q_empty[stage_of(t - 1)]), me.lane);
  keep_below(s);
  if (masked) {
    const int thread = thread_index() % WARPGROUP_SIZE, lane = thread % WARP_SIZE;
    hide_keys(s, batch.steps[batch.count - (t_end - t)].q_tile * Q_TILE + me.w * Q_ROWS,
              params.mask_offset, batch.row0 + 16 * (thread / WARP_SIZE) + lane / 4, lane);
  }
#pragma unroll
  for (int e = 0; e < Q_ROWS / 2; ++e) s[e] = exp2_approx(s[e] * params.scale_log2);  // P
  pack_scores(p, s);
  store_scores(p_tile, p, me);
  mbarrier_arrive_warp(smem_address(&barriers.p_full), me.lane);

  mbarrier_wait(smem_address(&barriers.dout_full[dout_stage]), full_parity(t / N_DOUT_STAGE));
  const u32 delta_ones[2] = {me.delta_ones, me.delta_ones};
  start_scores(dp, delta_ones, me.zero, rows, descriptor_low(smem_address(smem.v)),
               descriptor_low(dout + own_rows));
  wgmma_wait<1>();  // the first panel of dq
  if (!is_first) store_dq_panel(dq, smem, me, 0, t - 1);
  const u32 dout_columns = descriptor_low(dout + me.first_panel * Q_PANEL_BYTES, Q_PANEL_BYTES);
  start_own_rows(sums.dv, p, dout_columns, me.w);
  wait_scores(barriers.p_full, t);
  start_other_rows(sums.dv, descriptor_low(p_tile), dout_columns, me.w);
  start_dq(dq, smem, me.first_panel + 1, t - 1);
  wgmma_wait<3>();  // dP
  keep_below(dp);
#pragma unroll
  for (int e = 0; e < Q_ROWS / 2; ++e) dp[e] *= s[e];
  pack_scores(ds, dp);
  store_scores(ds_tile, ds, me);
  mbarrier_arrive_warp(smem_address(&barriers.ds_full), me.lane);

  const u32 q_columns = descriptor_low(q + me.first_panel * Q_PANEL_BYTES, Q_PANEL_BYTES);
  start_own_rows(sums.dk, ds, q_columns, me.w);
  wgmma_wait<2>();  // dv
  mbarrier_arrive_warp(smem_address(&barriers.dout_empty[dout_stage]), me.lane);
  wait_scores(barriers.ds_full, t);
  start_other_rows(sums.dk, descriptor_low(ds_tile), q_columns, me.w);
  wgmma_wait<2>();  // the second panel of dq; dk(t) may run on
  if (!is_first) store_dq_panel(dq, smem, me, 1, t - 1);
}

DC_FN void consume(SharedStorage& smem, const BackwardParams& params, int w, int warp, int lane) {
  Consumer me(w, warp, lane);
  const Barriers& barriers = smem.barriers;
  const int key_end = Mask{params.q_len, params.kv_len, params.mask_offset}.last_key_end();
  Sums sums;
  int n = 0, t = 0, n_kv_tile = 0;  // batches, steps and kv tiles so far

  for (;;) {  // kv tiles
    wait_for_batch(barriers, n);
    if (warp_uniform(smem.batches[n % N_BATCH].stop != 0)) return;
    const int key0 = warp_uniform(smem.batches[n % N_BATCH].row0) + 16 * warp;
#pragma unroll
    for (int i = 0; i < 32 * PANELS; ++i) sums.dk[i] = sums.dv[i] = 0.f;
    me.lse_ones[0] = lse_columns(lane, key0 + lane / 4 >= key_end);
    me.lse_ones[1] = lse_columns(lane, key0 + lane / 4 + 8 >= key_end);
    if (warp_uniform(smem.batches[n % N_BATCH].count > 0))
      mbarrier_wait(smem_address(&barriers.kv_full),
                    full_parity(smem.batches[n % N_BATCH].kv_tile0));
    int is_first = 1;  // first step of the kv tile
    for (;;) {
      const Batch& batch = smem.batches[n % N_BATCH];
      const int t_end = t + warp_uniform(batch.count);
      const bool masked = DC_CAUSAL && warp_uniform(batch.masked != 0);
#pragma unroll 1
      for (; t < t_end; ++t, is_first = 0)
        visit(sums, smem, params, me, t, t_end, is_first, batch, masked);
      if (warp_uniform(batch.is_last != 0)) break;
      next_batch(barriers, n, lane);
      wait_for_batch(barriers, n);
    }
    wgmma_wait<0>();
    if (!is_first) {
      mbarrier_arrive_warp(smem_address(&barriers.v_empty), lane);
      mbarrier_arrive_warp(smem_address(&barriers.q_empty[stage_of(t - 1)]), lane);
#pragma unroll
      for (int panel = 0; panel < PANELS; ++panel) {
        float dq[32];
        start_dq(dq, smem, me.first_panel + panel, t - 1);
        wgmma_wait<0>();
        if (panel + 1 == PANELS) mbarrier_arrive_warp(smem_address(&barriers.k_empty), lane);
        store_dq_panel(dq, smem, me, panel, t - 1);
      }
    }
    const Batch& batch = smem.batches[n % N_BATCH];
    const int batch_index = batch.batch, kv_head = batch.kv_head;
    next_batch(barriers, n, lane);
    // When both are here no product reads ds, and the next dS is stored when both have gone on.
    mbarrier_arrive_warp(smem_address(&barriers.all_done), lane);
    mbarrier_wait(smem_address(&barriers.all_done), full_parity(n_kv_tile++));
    const u32 staging = smem_address(smem.ds[w]);
    const auto fragment = [&](int k) { return me.fragment(k); };
    const int column0 = PANEL_COLUMNS * me.first_panel;
    store_rows(sums.dv, staging, 16 * warp, fragment,
               params.dv + batch_index * params.dv_strides.batch +
                   kv_head * params.dv_strides.head,
               params.dv_strides.row, key0, params.kv_len, column0, 1.f, lane);
    store_rows(sums.dk, staging, 16 * warp, fragment,
               params.dk + batch_index * params.dk_strides.batch +
                   kv_head * params.dk_strides.head,
               params.dk_strides.row, key0, params.kv_len, column0, params.scale, lane);
  }
}
