// bwd_sm90_wide: tiles, roles, what lies in shared memory, and the barriers between the roles.
#pragma once
#include "bwd_sm90_steps.cuh"
#include "params_bwd_sm90.cuh"
#include "ptx/tma.cuh"
#include "tile/row_values.cuh"

constexpr int Q_TILE = DC_Q_TILE, KV_TILE = DC_KV_TILE, HEAD_DIM = DC_HEAD_DIM_PAD;
constexpr int N_PANEL = HEAD_DIM / 64;  // of 64 columns
static_assert(Q_TILE == 64 && KV_TILE == 64, "the tiles of the main loop");
static_assert(HEAD_DIM == 256, "columns of two warpgroups");
static_assert(DC_HEAD_DIM % 8 == 0 && DC_HEAD_DIM <= HEAD_DIM, "columns past the end are zeros");

// Warpgroup 0 helps, one role a warp; the other two compute.
constexpr int N_CONSUMER = 2, CONSUMER_WARPS = 4 * N_CONSUMER;
constexpr int PRODUCER_WARP = 0, FIRST_WRITER_WARP = 1, PLANNER_WARP = 3;
constexpr int N_WRITER = DC_DQ_SUMS;  // writer i adds panel i of each consumer
constexpr int N_Q_STAGE = 2, N_DOUT_STAGE = 1, N_SCORE_STAGE = 2;
constexpr int N_THREAD = WARPGROUP_SIZE * (1 + N_CONSUMER);
constexpr int HELPER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
// 65536 registers for 384 threads are 168 each at launch; setmaxnreg shares those out.
static_assert(HELPER_REGISTERS + N_CONSUMER * CONSUMER_REGISTERS <= 168 * (1 + N_CONSUMER),
              "registers");

// Consumer 0 has the columns of the first panels, consumer 1 of the others. Both panels of dq of a
// consumer go through one slot, in turn.
constexpr int PANELS = N_PANEL / N_CONSUMER;
static_assert(PANELS == 2 && N_WRITER == PANELS, "a writer for each panel");

constexpr int Q_TILE_BYTES = Q_TILE * HEAD_DIM * 2, KV_TILE_BYTES = KV_TILE * HEAD_DIM * 2;
constexpr int SCORE_BYTES = KV_TILE * Q_TILE * 2;
constexpr int DQ_PANEL_BYTES = Q_TILE * 64 * 4;
constexpr int ROW_TILE_BYTES = Q_TILE * ROW_VALUE_BYTES;

// Keys that the diagonal hides; those that do not exist are hidden by the row values.
DC_FN bool needs_mask(const Mask& mask, int row0, int key0) {
  return mask.diagonal_cuts(row0, key0, KV_TILE);
}

// Barrier           arrivals       signalled by                        waited on by   guards
// q_full[s]         1 + bytes      producer                            consumers      q, rows
// q_empty[s]        consumer warps consumers, step done                producer       q, rows
// dout_full[s]      1 + bytes      producer                            consumers      dout
// dout_empty[s]     consumer warps consumers, dv of the step done      producer       dout
// kv_full           1 + bytes      producer                            consumers      k, v
// v_empty, k_empty  consumer warps consumers, last step done           producer       v, k
// p_full            consumer warps consumers, P stored                 consumers      p
// ds_full           consumer warps consumers, dS stored                consumers      ds
// dq_full[i][w]     4 warps        consumer w, panel i of dq stored    dq_writer i    dq
// dq_empty[w]       1              the dq_writer, panel of dq added    consumer w     dq
// batch_full[s]     1              planner                             all others     batches
// batch_begun[s]    1              producer                            planner        the next work
// batch_empty[s]    BATCH_READERS  producer, writers, consumer warps   planner        batches
// turns_came        N_WRITER       writers, turn of the last part of   planner        the next work
//                                  a work has come
// all_done          consumer warps consumers, last product of a kv     consumers      ds, as
//                                  tile done                                          staging of
//                                                                                     dk and dv
//
// p and ds need no barrier for their being free. P and dS of a step go where those of two steps
// before were. What reads those is done in a warpgroup when its S of the step before (p) or of the
// step itself (ds) is: products end in order. And S is done in both before P of that step is full,
// which each waits for before it goes on to the next P, or to dS.
struct Barriers {
  u64 q_full[N_Q_STAGE], q_empty[N_Q_STAGE];
  u64 dout_full[N_DOUT_STAGE], dout_empty[N_DOUT_STAGE];
  u64 kv_full, v_empty, k_empty;
  u64 p_full, ds_full;
  u64 dq_full[N_WRITER][N_CONSUMER], dq_empty[N_CONSUMER];
  u64 batch_full[N_BATCH], batch_begun[N_BATCH], batch_empty[N_BATCH];
  u64 turns_came, all_done;
};
constexpr bool ONE_STAGE = false;
DC_FN const u64& q_empty(const Barriers& b, int stage) { return b.q_empty[stage]; }
DC_FN const u64& dout_empty(const Barriers& b, int stage) { return b.dout_empty[stage]; }
constexpr int BATCH_READERS = 1 + N_WRITER + CONSUMER_WARPS;

struct alignas(1024) SharedStorage {
  u8 k[KV_TILE_BYTES], v[KV_TILE_BYTES];  // panels of 64 columns: [N_PANEL][KV_TILE][128 bytes]
  u8 q[N_Q_STAGE][Q_TILE_BYTES];          // [N_PANEL][Q_TILE][128 bytes]
  u8 dout[N_DOUT_STAGE][Q_TILE_BYTES];
  u8 p[N_SCORE_STAGE][SCORE_BYTES];  // [KV_TILE][128 bytes]: row = key, 64 q rows
  u8 ds[N_SCORE_STAGE][SCORE_BYTES];
  u8 dq[N_CONSUMER][DQ_PANEL_BYTES];  // in the order of dq_accum
  u8 rows[N_Q_STAGE][ROW_TILE_BYTES];
  Batch batches[N_BATCH];
  Barriers barriers;
};
static_assert(sizeof(SharedStorage) == DC_SMEM_BYTES, "config.py counts another size");

DC_FN void note_left(SharedStorage&, int, int) {}  // nobody asks

// dq_accum of one q tile, panel by panel, as its accumulators lie in registers: float4 number
// (panel * 8 + j) * 128 + t is columns 64 panel + 8 j + 2 (t % 4) + {0, 1} of rows
// 16 (t / 32) + t % 32 / 4 and, in its second half, that row + 8.

DC_FN void init_barriers(SharedStorage& smem) {
  Barriers& b = smem.barriers;
#pragma unroll
  for (int s = 0; s < N_Q_STAGE; ++s) {
    init_barrier(b.q_full[s], 1);
    init_barrier(b.q_empty[s], CONSUMER_WARPS);
  }
#pragma unroll
  for (int s = 0; s < N_DOUT_STAGE; ++s) {
    init_barrier(b.dout_full[s], 1);
    init_barrier(b.dout_empty[s], CONSUMER_WARPS);
  }
#pragma unroll
  for (int w = 0; w < N_CONSUMER; ++w) {
#pragma unroll
    for (int i = 0; i < N_WRITER; ++i) init_barrier(b.dq_full[i][w], CONSUMER_WARPS / N_CONSUMER);
    init_barrier(b.dq_empty[w], 1);
  }
  init_batch_barriers(b, BATCH_READERS);
  init_barrier(b.kv_full, 1);
  init_barrier(b.v_empty, CONSUMER_WARPS);
  init_barrier(b.k_empty, CONSUMER_WARPS);
  init_barrier(b.p_full, CONSUMER_WARPS);
  init_barrier(b.ds_full, CONSUMER_WARPS);
  init_barrier(b.turns_came, N_WRITER);
  init_barrier(b.all_done, CONSUMER_WARPS);
  mbarrier_init_fence();
}
