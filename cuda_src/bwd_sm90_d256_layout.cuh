// bwd_sm90_d256: tiles, roles, what lies in shared memory, and the barriers between the roles.
#pragma once
#include "bwd_sm90_steps.cuh"
#include "params_bwd_sm90.cuh"
#include "ptx/cluster.cuh"
#include "ptx/wgmma.cuh"

constexpr int Q_TILE = DC_Q_TILE, KV_TILE = DC_KV_TILE, HEAD_DIM = DC_HEAD_DIM_PAD;
constexpr int N_PANEL = HEAD_DIM / 64;  // of 64 columns
constexpr int DQ_PANELS = N_PANEL / 2;  // of dq that a CTA has: CTA 0 the first two
static_assert(DC_CLUSTER == 2, "pairs of CTAs");
static_assert(Q_TILE == 64 && CTA_KEYS == 64 && HEAD_DIM == 256, "the tiles of the main loop");
static_assert(DC_HEAD_DIM % 8 == 0 && DC_HEAD_DIM <= HEAD_DIM, "columns past the end are zeros");

// Warpgroup 0 helps, one role a warp.
constexpr int SOFTMAX_WARPGROUP = 1, DV_WARPGROUP = 2, N_SOFTMAX = 1;
constexpr int WARPS = 4;  // of a warpgroup
constexpr int PRODUCER_WARP = 0, FIRST_TURN_WARP = 1, EXCHANGE_WARP = 2, PLANNER_WARP = 3;
constexpr int Q_CTA = 0, DOUT_CTA = 1;  // who loads q and dout, for both
constexpr u16 BOTH = 3;
constexpr int N_Q_STAGE = 2, N_P_STAGE = 2;
constexpr int N_DOUT_SLOT = 3;  // of half a tile: 128 columns
constexpr int N_THREAD = WARPGROUP_SIZE * 4;
constexpr int HELPER_REGISTERS = 32, SOFTMAX_REGISTERS = 160, GRADIENT_REGISTERS = 160;
// 65536 registers for 512 threads are 128 each at launch; setmaxnreg shares those out.
static_assert(HELPER_REGISTERS + SOFTMAX_REGISTERS + 2 * GRADIENT_REGISTERS <= 128 * 4,
              "registers");

constexpr int Q_TILE_BYTES = Q_TILE * HEAD_DIM * 2, KEYS_BYTES = CTA_KEYS * HEAD_DIM * 2;
constexpr int PANEL_BYTES = 64 * PANEL_ROW_BYTES;  // of any tile: all have 64 rows
// Halves of dout go through its slots in turn; each role has one of these.
DC_FN int next_slot(int number) { return number + 1 == N_DOUT_SLOT ? 0 : number + 1; }
struct Slot {
  int number = 0;
  u32 parity = 0;  // of its full barrier
  DC_FN void advance() {
    number = next_slot(number);
    if (number == 0) parity ^= 1;
  }
};

constexpr int HALF_BYTES = Q_TILE_BYTES / 2, HALF_PANELS = N_PANEL / 2;
constexpr int OTHER_KEYS_BYTES = DQ_PANELS * PANEL_BYTES;
constexpr int SCORE_BYTES = CTA_KEYS * PANEL_ROW_BYTES;

// Keys that the diagonal hides, or that do not exist, among those of this CTA.
DC_FN bool needs_mask(const Mask& mask, int row0, int key0) {
  return mask.cuts(row0, key0 + cta_rank() * CTA_KEYS, CTA_KEYS);
}

// Barrier          arrivals        signalled by                       waited on by  guards
// q_full[s]        1 + bytes       producers: armed by the own one,   softmax,      q, rows
//                                  bytes from CTA 0                   producer 1
// q_empty[s]       8 warps         dk of both CTAs, product of the    producer,     q, rows of
//                                  step done                          CTA 0         both
// dout_full[s]     1 + bytes       producers: armed by the own one,   softmax, dv,  dout
//                                  bytes from CTA 1                   producer 0
// dout_empty[s]    16 warps        softmax and dv of both CTAs, dP    producer,     dout of both
//                                  or product of the step done        CTA 1
// kv_full          1 + bytes       producer                           softmax       k, k_other, v
// v_empty          4 warps         softmax, last dP of the tile done  producer      v
// k_empty          4 warps         softmax, last dq of the tile done  producer      k, k_other
// p_full[s]        4 warps         softmax, P stored                  dv            p
// p_empty[s]       4 warps         dv, product of the step done       softmax       p
// ds_full          4 warps         softmax, dS stored                 dk, exchange, ds
//                                                                     softmax
// ds_empty         4 warps         dk, product of the step done       softmax       ds
// ds_taken         8 warps         softmax of both CTAs, dq with our  softmax, dk   ds, ds_other
//                                  dS done                                          of the other
// other_full       1 + bytes       exchange warps: armed by the own   softmax       ds_other
//                                  one, bytes from the other CTA's
// turn[0]          1               turn warp, ticket has come         softmax       dq_accum
// dq_added[0]      4 warps         softmax, part of dq sent           turn warp     dq_accum, turn
// batch_full[s]    1               planner                            all others    batches
// batch_begun[s]   1               producer                           planner       the next work
// batch_empty[s]   BATCH_READERS   producer, turn and exchange warp,  planner       batches
//                                  softmax, dv and dk warps
// turns_came       1               turn warp, turn of the last part   planner       the next work
//                                  of a work has come
// work_wanted      1               planner of CTA 1, ready for the    planner,      work of CTA 1
//                                  next work                          CTA 0
// work_came        1               planner of CTA 0, work written     planner,      work
//                                                                     CTA 1
// PANELS + i       128 threads     dv, dk                             the same      p or ds, as
//                                                                                   dv or dk
//
// dk warps need not wait for q: dS is made of it. P and dS are written by ordinary stores and read
// by wgmma and, dS, by the copy engine: the writers' proxy fence stands before their arrival. A
// barrier that one CTA arms may count bytes that the other CTA's copies bring before it is armed:
// its phase does not end without the arrival.
struct Barriers {
  u64 q_full[N_Q_STAGE], q_empty[N_Q_STAGE];
  u64 dout_full[N_DOUT_SLOT], dout_empty[N_DOUT_SLOT];
  u64 kv_full, v_empty, k_empty;
  u64 p_full[N_P_STAGE], p_empty[N_P_STAGE];
  u64 ds_full, ds_empty, ds_taken, other_full;
  u64 turn[N_SOFTMAX], dq_added[N_SOFTMAX];
  u64 batch_full[N_BATCH], batch_begun[N_BATCH], batch_empty[N_BATCH];
  u64 turns_came, work_wanted, work_came;
};
constexpr int PANELS = 1;  // named barriers
constexpr int BATCH_READERS = 2 + N_SOFTMAX + 3 * WARPS;

// All tiles have rows of 128 bytes, swizzled (ptx/wgmma.cuh), in panels of 64 columns.
struct alignas(1024) SharedStorage {
  u8 k[KEYS_BYTES], v[KEYS_BYTES];   // [N_PANEL][CTA_KEYS][128 bytes]
  u8 k_other[OTHER_KEYS_BYTES];      // the other CTA's keys, columns of this CTA's part of dq
  u8 q[N_Q_STAGE][Q_TILE_BYTES];     // [N_PANEL][Q_TILE][128 bytes]
  u8 dout[N_DOUT_SLOT][HALF_BYTES];  // half h of step t in slot (2 t + h) % N_DOUT_SLOT
  u8 p[N_P_STAGE][SCORE_BYTES];  // [CTA_KEYS][128 bytes]: row = key, 64 q rows
  u8 ds[SCORE_BYTES], ds_other[SCORE_BYTES];
  float lse_log2[N_Q_STAGE][Q_TILE], delta[N_Q_STAGE][Q_TILE];
  Batch batches[N_BATCH];
  int steps_left[N_BATCH];  // of the kv tile, from that batch on
  int work;
  Barriers barriers;
};
static_assert(sizeof(SharedStorage) == DC_SMEM_BYTES, "config.py counts another size");

DC_FN void init_barriers(SharedStorage& smem) {
  Barriers& b = smem.barriers;
#pragma unroll
  for (int s = 0; s < N_Q_STAGE; ++s) {
    init_barrier(b.q_full[s], 1);
    init_barrier(b.q_empty[s], 2 * WARPS);
  }
#pragma unroll
  for (int s = 0; s < N_DOUT_SLOT; ++s) {
    init_barrier(b.dout_full[s], 1);
    init_barrier(b.dout_empty[s], 4 * WARPS);
  }
#pragma unroll
  for (int s = 0; s < N_P_STAGE; ++s) {
    init_barrier(b.p_full[s], WARPS);
    init_barrier(b.p_empty[s], WARPS);
  }
  init_barrier(b.ds_full, WARPS);
  init_barrier(b.ds_empty, WARPS);
  init_barrier(b.other_full, 1);
  init_barrier(b.ds_taken, 2 * WARPS);
  init_batch_barriers(b, BATCH_READERS);
  init_barrier(b.kv_full, 1);
  init_barrier(b.v_empty, WARPS);
  init_barrier(b.k_empty, WARPS);
  init_barrier(b.turn[0], 1);
  init_barrier(b.dq_added[0], WARPS);
  init_barrier(b.turns_came, N_SOFTMAX);
  init_barrier(b.work_wanted, 1);
  init_barrier(b.work_came, 1);
  mbarrier_init_fence();
}
