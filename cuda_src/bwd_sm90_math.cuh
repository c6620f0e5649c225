// bwd_sm90, the consumers: the five products, dk and dv.
//
// Warpgroup w holds keys 64 w .. 64 w + 63 of the kv tile as rows (S^T and dP^T are [key][q row]),
// so P and dS are the A operands of dv and dk as they lie in registers; dq needs dS of all keys,
// through shared memory, and each warpgroup makes the dq columns from 64 w on (dq_columns).
//
// Step t (products of both warpgroups run beside one another and beside the other's arithmetic):
//
//   S  = -lse / scale + k q^T       rows[t], q[t]
//   dP = -delta       + v dout^T    rows[t], dout[t]; under it
//   P  = exp2(S * scale_log2)
//   dv += P dout                    behind dP; under it
//   dS = P dP                       -> ds[t]
//   dq(t - 1) = ds[t - 1]^T k       a step late: its dS has long been there
//   dk += dS q
//   dq_part(t - 1) -> dq[t - 1]
//
// Registers of 240: dk 64 + dv 64, k of the first K_REGISTER_STEPS k steps 12 or 8 (with 96 columns
// dk 48 + dv 48, k 24), constant columns 8; and, not all at once, S 32, dP 32 (dP's become dq),
// packed P 16 and dS 16.
#pragma once
#include "bwd_sm90_layout.cuh"
#include "bwd_sm90_products.cuh"
#include "bwd_sm90_store.cuh"
#include "ptx/math.cuh"
#include "ptx/stmatrix.cuh"

constexpr int N_K_STEP = HEAD_DIM / 16;
// Every product of S that reads k from registers leaves 8 KB of shared memory bandwidth to others.
// With 96 columns there is room for all of k; with 128 ptxas serialises the products if it is one k
// step more than here, and that of CUDA 13.5 does so one k step earlier than that of 12.9 and 13.0;
// those between are taken as 13.5, untested. Bits do not depend on it: the products are the same.
constexpr int K_REGISTER_STEPS = HEAD_DIM == 96 ? N_K_STEP
                                 : __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ > 1300 ? 2 : 3;
// From one panel of 64 columns to the next.
constexpr int KV_PANEL_BYTES = KV_TILE * PANEL_ROW_BYTES, Q_PANEL_BYTES = Q_TILE * PANEL_ROW_BYTES;

// What a consumer thread knows all along.
struct Consumer {
  int w, warp, lane;   // warpgroup among the consumers, warp within, lane
  u32 k_rows, v_rows;  // low descriptors: its 64 keys as A of S and dP
  u32 k_columns;       // k as B of dq: its columns
  u32 fragment_at;     // in ds[0]: the 16 bytes of a lane, as stmatrix wants them, of 16 q rows

  DC_FN Consumer(const SharedStorage& smem, int w, int warp, int lane)
      : w(w), warp(warp), lane(lane) {
    k_rows = descriptor_low(smem_address(smem.k) + w * 64 * PANEL_ROW_BYTES);
    v_rows = descriptor_low(smem_address(smem.v) + w * 64 * PANEL_ROW_BYTES);
    k_columns = descriptor_low(smem_address(smem.k) + w * KV_PANEL_BYTES, KV_PANEL_BYTES);
    const u32 row = 64 * w + 16 * warp + lane % 16;
    fragment_at = smem_address(smem.ds) + row * PANEL_ROW_BYTES + ((lane / 16 ^ row % 8) << 4);
  }

  // The same of columns 16 k and on in `tile`, which has rows of 128 bytes.
  DC_FN u32 fragment(const SharedStorage& smem, u32 tile, int k) const {
    return (fragment_at ^ u32(k * K_STEP_BYTES)) + (tile - smem_address(smem.ds));
  }
};

// Registers that live as long as a kv tile.
struct KvTile {
  float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];
  u32 k[K_REGISTER_STEPS][4];  // A operand of the first k steps of S
  u32 lse_ones[2];              // A operand that brings in lse, and hides keys that do not exist
};

// Stage of step t; -1 is a step, too: the one before the first, whose barriers count as passed.
static_assert(N_STAGE == 2, "stages and parities are bits of the step's number");
DC_FN int stage_of(int t) { return t & 1; }

// dS of step t is complete, and dq of step t - 1 of both warpgroups is done.
DC_FN void wait_ds(const SharedStorage& smem, int t) {
  wait_written(smem_address(&smem.barriers.ds_full[stage_of(t)]), full_parity(t >> 1));
}

// dq[64 q rows][its columns] = dS^T k.
template <int N>
DC_FN void start_dq(float (&dq)[N], const SharedStorage& smem, const Consumer& me, int t) {
  const u32 ds = descriptor_low(smem_address(smem.ds), DS_BYTES) + stage_of(t) * (DS_BYTES / 16);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < KV_TILE / 16; ++k) {
    const u64 a = descriptor(ds + mn_major_step(k));
    const u64 b = descriptor(me.k_columns + mn_major_step(k));
    if (k == 0)
      wgmma_ss_first<MN_MAJOR, MN_MAJOR>(dq, a, b);
    else
      wgmma_ss<MN_MAJOR, MN_MAJOR>(dq, a, b);
  }
  wgmma_commit();
}

// Hands dq of step t to its writer.
template <int N>
DC_FN void store_dq_part(const float (&dq)[N], SharedStorage& smem, const Consumer& me, int t) {
  const int slot = stage_of(t);
  const u32 at = smem_address(smem.dq) + slot * DQ_BYTES + me.w * DQ_PANEL_BYTES +
                 (32 * me.warp + me.lane) * 16;
  random_delay(t);
  mbarrier_wait(smem_address(&smem.barriers.dq_empty[slot]), empty_parity(t >> 1));
#pragma unroll
  for (int j = 0; j < N / 4; ++j)
    st_shared_v4(at + j * WARPGROUP_SIZE * 16, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2],
                 dq[4 * j + 3]);
  mbarrier_arrive_warp(smem_address(&smem.barriers.dq_full[slot]), me.lane);
}

// Step t of the kernel (counted over all kv tiles), in STAGE: a constant, for what is computed from
// it would delay the products. The step is the first of its kv tile or not; its batch ends before
// t_end, and all of it is cut by the diagonal, or nothing.
template <int DQ_COLUMNS, int STAGE>
DC_FN void visit(KvTile& kv, SharedStorage& smem, const BackwardParams& params, const Consumer& me,
                 int step, int t_end, bool is_first, u32 delta_ones, u32 zero, const Batch& batch,
                 bool masked) {
  const int t = (step & ~1) | STAGE;  // `step`, but now stage_of(t) and stage_of(t - 1) are known
  const int stage = stage_of(t);
  const u32 q = stage * (Q_TILE_BYTES / 16);  // from stage 0, in units of descriptors
  const u32 q_rows = descriptor_low(smem_address(smem.q)) + q;
  const u32 dout_rows = descriptor_low(smem_address(smem.dout)) + q;
  const u32 q_columns = descriptor_low(smem_address(smem.q), Q_PANEL_BYTES) + q;
  const u32 dout_columns = descriptor_low(smem_address(smem.dout), Q_PANEL_BYTES) + q;
  const u64 rows = row_values_descriptor(smem_address(smem.rows) + stage * ROW_TILE_BYTES);
  float s[32], dp[32], dq[DQ_COLUMNS / 2];
  u32 p[16], ds[16];  // packed, as A operands

  mbarrier_wait(smem_address(&smem.barriers.q_full[stage]), full_parity(t >> 1));
  mbarrier_wait(smem_address(&smem.barriers.dout_full[stage]), full_parity(t >> 1));
  wgmma_fence();
  wgmma_rs_first_bf16<K_MAJOR>(s, kv.lse_ones[0], kv.lse_ones[1], zero, zero, rows);
#pragma unroll
  for (int k = 0; k < N_K_STEP; ++k) {
    const u64 b = descriptor(q_rows + k_major_step(k, Q_PANEL_BYTES));
    if (k < K_REGISTER_STEPS) {
      const u32(&a)[4] = kv.k[k % K_REGISTER_STEPS];
      wgmma_rs<K_MAJOR>(s, a[0], a[1], a[2], a[3], b);
    } else
      wgmma_ss<K_MAJOR, K_MAJOR>(s, descriptor(me.k_rows + k_major_step(k, KV_PANEL_BYTES)), b);
  }
  wgmma_commit();
  wgmma_fence();
  wgmma_rs_first_bf16<K_MAJOR>(dp, delta_ones, delta_ones, zero, zero, rows);
#pragma unroll
  for (int k = 0; k < N_K_STEP; ++k)
    wgmma_ss<K_MAJOR, K_MAJOR>(dp, descriptor(me.v_rows + k_major_step(k, KV_PANEL_BYTES)),
                               descriptor(dout_rows + k_major_step(k, Q_PANEL_BYTES)));
  wgmma_commit();
  wgmma_wait<1>();  // S
  keep_below(s);
  if (masked)
    hide_keys(s, batch.steps[batch.count - (t_end - t)].q_tile * Q_TILE, params.mask_offset,
              batch.row0 + 64 * me.w + 16 * me.warp + me.lane / 4, me.lane);
#pragma unroll
  for (int e = 0; e < 32; ++e) s[e] = exp2_approx(s[e] * params.scale_log2);  // P
#pragma unroll
  for (int j = 0; j < Q_TILE / 8; ++j) {
    p[2 * j] = pack(s[4 * j], s[4 * j + 1]);
    p[2 * j + 1] = pack(s[4 * j + 2], s[4 * j + 3]);
  }
  wait_ds(smem, t - 1);  // and so ds[stage], which dq of step t - 2 has read, is free
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Q_TILE / 16; ++k)
    wgmma_rs<MN_MAJOR>(kv.dv, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                       descriptor(dout_columns + mn_major_step(k)));
  wgmma_commit();
  wgmma_wait<1>();  // dP
  keep_below(dp);
#pragma unroll
  for (int j = 0; j < Q_TILE / 8; ++j) {
    ds[2 * j] = pack(s[4 * j] * dp[4 * j], s[4 * j + 1] * dp[4 * j + 1]);
    ds[2 * j + 1] = pack(s[4 * j + 2] * dp[4 * j + 2], s[4 * j + 3] * dp[4 * j + 3]);
  }
  const u32 ds_tile = smem_address(smem.ds) + stage * DS_BYTES;
#pragma unroll
  for (int k = 0; k < Q_TILE / 16; ++k)
    stmatrix_x4(me.fragment(smem, ds_tile, k), ds[4 * k], ds[4 * k + 1], ds[4 * k + 2],
                ds[4 * k + 3]);
  // In the first step of a kv tile the product is of old bytes, and dropped: leaving it out there
  // makes ptxas serialise the products.
  start_dq(dq, smem, me, t - 1);
#pragma unroll
  for (int k = 0; k < Q_TILE / 16; ++k)
    wgmma_rs<MN_MAJOR>(kv.dk, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3],
                       descriptor(q_columns + mn_major_step(k)));
  wgmma_commit();
  wgmma_wait<1>();  // dv(t), dq(t - 1) done; dk(t) may run on
  mbarrier_arrive_warp(smem_address(&smem.barriers.ds_full[stage]), me.lane);
  if (!is_first) store_dq_part(dq, smem, me, t - 1);
  wgmma_wait<0>();
  mbarrier_arrive_warp(smem_address(&smem.barriers.stage_empty[stage]), me.lane);
}

// Step t where the diagonal hides all of this warpgroup's keys: its P and dS are zeros, which leave
// dk and dv as they are, and the tensor cores to the other one.
template <int DQ_COLUMNS>
DC_FN void visit_hidden(SharedStorage& smem, const Consumer& me, int t, bool is_first) {
  const int stage = stage_of(t);
  float dq[DQ_COLUMNS / 2];
  wait_ds(smem, t - 1);
  start_dq(dq, smem, me, t - 1);
  const u32 ds_tile = smem_address(smem.ds) + stage * DS_BYTES;
#pragma unroll
  for (int k = 0; k < Q_TILE / 16; ++k)
    stmatrix_x4(me.fragment(smem, ds_tile, k), 0, 0, 0, 0);
  wgmma_wait<0>();
  mbarrier_arrive_warp(smem_address(&smem.barriers.ds_full[stage]), me.lane);
  if (!is_first) store_dq_part(dq, smem, me, t - 1);
  mbarrier_arrive_warp(smem_address(&smem.barriers.stage_empty[stage]), me.lane);
}

// What a consumer needs of a kv tile before its first step.
DC_FN void take_kv_tile(KvTile& kv, const SharedStorage& smem, const BackwardParams& params,
                        const Consumer& me, const Batch& batch) {
  const int key = batch.row0 + 64 * me.w + 16 * me.warp + me.lane / 4;
  const int key_end = Mask{params.q_len, params.kv_len, params.mask_offset}.last_key_end();
  kv.lse_ones[0] = lse_columns(me.lane, key >= key_end);
  kv.lse_ones[1] = lse_columns(me.lane, key + 8 >= key_end);
  mbarrier_wait(smem_address(&smem.barriers.kv_full), full_parity(batch.kv_tile0));
#pragma unroll
  for (int k = 0; k < K_REGISTER_STEPS; ++k)
    ldmatrix_x4(kv.k[k],
                me.fragment(smem, smem_address(smem.k) + k / 4 * KV_PANEL_BYTES, k % 4));
}

template <int DQ_COLUMNS>
DC_FN void consume(SharedStorage& smem, const BackwardParams& params, const BackwardMaps& maps,
                   int w, int warp, int lane) {
  const Consumer me(smem, w, warp, lane);
  const Barriers& barriers = smem.barriers;
  const u32 zero = opaque_zero(), delta_ones = delta_columns(lane);
  KvTile kv;
  int n = 0, t = 0;  // batches and steps so far

  for (;;) {  // kv tiles
    wait_for_batch(barriers, n);
    if (warp_uniform(smem.batches[n % N_BATCH].stop != 0)) break;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) kv.dk[i] = kv.dv[i] = 0.f;
    if (warp_uniform(smem.batches[n % N_BATCH].count > 0))
      take_kv_tile(kv, smem, params, me, smem.batches[n % N_BATCH]);
    wait_for_panels<0>(PANELS + w);  // behind the wait for k and v: long done, as a rule
    int is_first = 1;  // first step of the kv tile
    for (;;) {
      const Batch& batch = smem.batches[n % N_BATCH];
      const int t_end = t + warp_uniform(batch.count);
      const bool masked = DC_CAUSAL && warp_uniform(batch.masked != 0);
      const auto hidden = [&](int step) {  // whether the diagonal hides all keys of this warpgroup
        const int q_end = (batch.steps[batch.count - (t_end - step)].q_tile + 1) * Q_TILE;
        return masked && warp_uniform(q_end + params.mask_offset <= batch.row0 + 64 * w);
      };
      while (t < t_end) {  // two loops: with one, ptxas serialises the products of some schedules
#pragma unroll 1
        for (; t < t_end && !hidden(t); ++t, is_first = 0) {
          if (stage_of(t) == 1)
            visit<DQ_COLUMNS, 1>(kv, smem, params, me, t, t_end, is_first, delta_ones, zero, batch,
                                 masked);
          else
            visit<DQ_COLUMNS, 0>(kv, smem, params, me, t, t_end, is_first, delta_ones, zero, batch,
                                 masked);
        }
        if (t < t_end) {
          visit_hidden<DQ_COLUMNS>(smem, me, t, is_first);
          ++t, is_first = 0;
        }
      }
      if (warp_uniform(batch.is_last != 0)) break;
      next_batch(barriers, n, lane);
      wait_for_batch(barriers, n);
    }
    const Batch& batch = smem.batches[n % N_BATCH];
    const auto send = [&](const TensorMap& map, const float(&sum)[HEAD_DIM / 2], int panel,
                          float scale, int stage) {  // through the place of dS
      const u32 tile = smem_address(smem.ds) + stage * DS_BYTES;
      stage_rows(sum, panel, scale, [&](int k) { return me.fragment(smem, tile, k); });
      send_panel(map, tile + 64 * w * PANEL_ROW_BYTES, 64 * panel, batch.row0 + 64 * w, batch,
                 PANELS + w);
    };
    float dq[DQ_COLUMNS / 2];
    wait_ds(smem, t - 1);
    start_dq(dq, smem, me, t - 1);  // of old bytes, and dropped, if the kv tile had no step
    send(maps.dv, kv.dv, 0, 1.f, stage_of(t));  // no product reads there since the last wait_ds
    wgmma_wait<0>();
    if (!is_first) {  // first of all, for the next k comes while dv and dk are stored
      mbarrier_arrive_warp(smem_address(&barriers.k_empty), lane);
      store_dq_part(dq, smem, me, t - 1);
      mbarrier_wait(smem_address(&barriers.k_empty), full_parity(batch.kv_tile0));
    }
    send(maps.dv, kv.dv, 1, 1.f, stage_of(t - 1));  // both warpgroups are done with k and dS
    wait_for_panels<1>(PANELS + w);
    send(maps.dk, kv.dk, 0, params.scale, stage_of(t));
    wait_for_panels<1>(PANELS + w);
    send(maps.dk, kv.dk, 1, params.scale, stage_of(t - 1));
    next_batch(barriers, n, lane);
  }
  finish_panels();
}
