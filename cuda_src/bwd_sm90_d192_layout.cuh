// bwd_sm90_d192: tiles, roles, what lies in shared memory, and the barriers between the roles.
#pragma once
#include "bwd_sm90_steps.cuh"
#include "params_bwd_sm90.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int Q_TILE = DC_Q_TILE, KV_TILE = DC_KV_TILE, HEAD_DIM = DC_HEAD_DIM_PAD;
constexpr int N_PANEL = HEAD_DIM / 64;  // of 64 columns
static_assert(Q_TILE == 64 && KV_TILE == 96 && HEAD_DIM == 192, "the tiles of the main loop");
static_assert(DC_HEAD_DIM % 8 == 0 && DC_HEAD_DIM <= HEAD_DIM, "columns past the end are zeros");

// Warpgroup 0 helps, one role a warp.
constexpr int SOFTMAX_WARPGROUP = 1, DV_WARPGROUP = 2, N_SOFTMAX = 1;
constexpr int WARPS = 4;  // of a warpgroup
constexpr int PRODUCER_WARP = 0, FIRST_TURN_WARP = 1, PLANNER_WARP = 3;
constexpr int N_Q_STAGE = 2, N_DOUT_STAGE = 2, N_SCORE_STAGE = 2;
constexpr int N_THREAD = WARPGROUP_SIZE * 4;
constexpr int HELPER_REGISTERS = 24, SOFTMAX_REGISTERS = 136, GRADIENT_REGISTERS = 176;
// 65536 registers for 512 threads are 128 each at launch; setmaxnreg shares those out.
static_assert(HELPER_REGISTERS + SOFTMAX_REGISTERS + 2 * GRADIENT_REGISTERS <= 128 * 4,
              "registers");

constexpr int Q_TILE_BYTES = Q_TILE * HEAD_DIM * 2, KV_TILE_BYTES = KV_TILE * HEAD_DIM * 2;
constexpr int Q_PANEL_BYTES = Q_TILE_BYTES / N_PANEL, KV_PANEL_BYTES = KV_TILE_BYTES / N_PANEL;
constexpr int SCORE_BYTES = KV_TILE * PANEL_ROW_BYTES;
constexpr int ROW_TILE_BYTES = 2 * Q_TILE * 4;  // lse and delta

// Keys that the diagonal hides, or that do not exist.
DC_FN bool needs_mask(const Mask& mask, int row0, int key0) {
  return mask.cuts(row0, key0, KV_TILE);
}

// Barrier          arrivals        signalled by                       waited on by  guards
// q_full[s]        1 + bytes       producer                           softmax       q, rows
// q_empty[s]       4 warps         dk, product of the step done       producer      q, rows
// dout_full[s]     1 + bytes       producer                           softmax       dout
// dout_empty[s]    8 warps         softmax, dP done; dv, product of   producer      dout
//                                  the step done
// kv_full          1 + bytes       producer                           softmax       k, v
// v_empty          4 warps         softmax, last dP of the tile done  producer      v
// k_empty          4 warps         softmax, last dq of the tile done  producer      k
// p_full[s]        4 warps         softmax, P stored                  dv            p
// p_empty[s]       4 warps         dv, product of the step done       softmax       p
// ds_full[s]       4 warps         softmax, dS stored                 dk            ds
// ds_empty[s]      4 warps         dk, product of the step done       softmax       ds
// turn[0]          1               turn warp, ticket has come         softmax       dq_accum
// dq_added[0]      4 warps         softmax, part of dq sent           turn warp     dq_accum, turn
// batch_full[s]    1               planner                            all others    batches
// batch_begun[s]   1               producer                           planner       the next work
// batch_empty[s]   BATCH_READERS   producer, turn warp, softmax, dv   planner       batches
//                                  and dk warps
// turns_came       1               turn warp, turn of the last part   planner       the next work
//                                  of a work has come
// PANELS + i       128 threads     dv, dk                             the same      p or ds, as
//                                                                                   dv or dk
//
// dv and dk warps need not wait for q and dout: P and dS are made of them. P and dS are written by
// ordinary stores and read by wgmma. For dS it is the dk warps who fence (wait_written), for P the
// softmax warps, before their arrival: without that ptxas serialises the products.
struct Barriers {
  u64 q_full[N_Q_STAGE], q_empty[N_Q_STAGE];
  u64 dout_full[N_DOUT_STAGE], dout_empty[N_DOUT_STAGE];
  u64 kv_full, v_empty, k_empty;
  u64 p_full[N_SCORE_STAGE], p_empty[N_SCORE_STAGE];
  u64 ds_full[N_SCORE_STAGE], ds_empty[N_SCORE_STAGE];
  u64 turn[N_SOFTMAX], dq_added[N_SOFTMAX];
  u64 batch_full[N_BATCH], batch_begun[N_BATCH], batch_empty[N_BATCH];
  u64 turns_came;
};
constexpr bool ONE_STAGE = false;
DC_FN const u64& q_empty(const Barriers& b, int stage) { return b.q_empty[stage]; }
DC_FN const u64& dout_empty(const Barriers& b, int stage) { return b.dout_empty[stage]; }
// ds_full of the step before would do, as in bwd_sm90: but without v_empty ptxas of CUDA 12.9, 13.0
// and 13.5 serialises the products of some builds.
DC_FN void wait_for_v(const Barriers& b, int n_kv_tile, int) {
  mbarrier_wait(smem_address(&b.v_empty), empty_parity(n_kv_tile));
}
constexpr int PANELS = 1;  // named barriers
constexpr int BATCH_READERS = 1 + N_SOFTMAX + 3 * WARPS;

// All tiles have rows of 128 bytes, swizzled (ptx/wgmma.cuh).
struct alignas(1024) SharedStorage {
  u8 k[KV_TILE_BYTES], v[KV_TILE_BYTES];  // panels of 64 columns: [N_PANEL][KV_TILE][128 bytes]
  u8 q[N_Q_STAGE][Q_TILE_BYTES];          // [N_PANEL][Q_TILE][128 bytes]
  u8 dout[N_DOUT_STAGE][Q_TILE_BYTES];
  u8 p[N_SCORE_STAGE][SCORE_BYTES];  // [KV_TILE][128 bytes]: row = key, 64 q rows
  u8 ds[N_SCORE_STAGE][SCORE_BYTES];
  float lse_log2[N_Q_STAGE][Q_TILE], delta[N_Q_STAGE][Q_TILE];
  Batch batches[N_BATCH];
  int steps_left[N_BATCH];  // of the kv tile, from that batch on
  Barriers barriers;
};
static_assert(sizeof(SharedStorage) == DC_SMEM_BYTES, "config.py counts another size");

DC_FN void init_barriers(SharedStorage& smem) {
  Barriers& b = smem.barriers;
#pragma unroll
  for (int s = 0; s < N_Q_STAGE; ++s) {
    init_barrier(b.q_full[s], 1);
    init_barrier(b.q_empty[s], WARPS);
  }
#pragma unroll
  for (int s = 0; s < N_DOUT_STAGE; ++s) {
    init_barrier(b.dout_full[s], 1);
    init_barrier(b.dout_empty[s], 2 * WARPS);
  }
#pragma unroll
  for (int s = 0; s < N_SCORE_STAGE; ++s) {
    init_barrier(b.p_full[s], WARPS);
    init_barrier(b.p_empty[s], WARPS);
    init_barrier(b.ds_full[s], WARPS);
    init_barrier(b.ds_empty[s], WARPS);
  }
  init_batch_barriers(b, BATCH_READERS);
  init_barrier(b.kv_full, 1);
  init_barrier(b.v_empty, WARPS);
  init_barrier(b.k_empty, WARPS);
  init_barrier(b.turn[0], 1);
  init_barrier(b.dq_added[0], WARPS);
  init_barrier(b.turns_came, N_SOFTMAX);
  mbarrier_init_fence();
}
