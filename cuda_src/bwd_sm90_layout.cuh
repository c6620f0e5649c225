// bwd_sm90: tiles, roles, what lies in shared memory, and the barriers between the roles.
#pragma once
#include "bwd_sm90_steps.cuh"
#include "params_bwd_sm90.cuh"
#include "ptx/tma.cuh"
#include "tile/row_values.cuh"

constexpr int Q_TILE = DC_Q_TILE, KV_TILE = DC_KV_TILE, HEAD_DIM = DC_HEAD_DIM_PAD;
static_assert(Q_TILE == 64 && KV_TILE == 128 && (HEAD_DIM == 96 || HEAD_DIM == 128),
              "the tiles of the main loop");
static_assert(DC_HEAD_DIM % 8 == 0 && DC_HEAD_DIM <= HEAD_DIM, "columns past the end are zeros");

// Warpgroup 0 helps, one role a warp; the other two compute.
constexpr int N_CONSUMER = 2, CONSUMER_WARPS = 4 * N_CONSUMER;
constexpr int PRODUCER_WARP = 0, FIRST_WRITER_WARP = 1, PLANNER_WARP = 3;
constexpr int N_STAGE = 2;      // q and dout tiles; one dq slot, with a writer, for each
constexpr int N_WRITER = N_STAGE, N_Q_STAGE = N_STAGE, N_DOUT_STAGE = N_STAGE;
constexpr int N_PANEL = 2;  // of 64 columns; of those from HEAD_DIM on nothing is read
// Columns of dq that a consumer makes.
DC_FN constexpr int dq_columns(int w) { return w == 0 ? 64 : HEAD_DIM - 64; }
constexpr int N_THREAD = WARPGROUP_SIZE * (1 + N_CONSUMER);
constexpr int HELPER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
// 65536 registers for 384 threads are 168 each at launch; setmaxnreg shares those out.
static_assert(HELPER_REGISTERS + N_CONSUMER * CONSUMER_REGISTERS <= 168 * (1 + N_CONSUMER),
              "registers");

constexpr int Q_TILE_BYTES = Q_TILE * N_PANEL * 128, KV_TILE_BYTES = KV_TILE * N_PANEL * 128;
constexpr int DS_BYTES = KV_TILE * Q_TILE * 2, DQ_BYTES = Q_TILE * HEAD_DIM * 4;
constexpr int DQ_PANEL_BYTES = Q_TILE * 64 * 4;  // of consumer 0
constexpr int ROW_TILE_BYTES = Q_TILE * ROW_VALUE_BYTES;

// Keys that the diagonal hides; those that do not exist are hidden by the row values.
DC_FN bool needs_mask(const Mask& mask, int row0, int key0) {
  return mask.diagonal_cuts(row0, key0, KV_TILE);
}

// Barrier           arrivals       signalled by                        waited on by   guards
// q_full[s]         1 + bytes      producer                            consumers      q, rows
// dout_full[s]      1 + bytes      producer                            consumers      dout
// stage_empty[s]    consumer warps consumers, step done                producer       q, rows, dout
// kv_full           1 + bytes      producer                            consumers      k, v
// k_empty           consumer warps consumers, last dq done             producer,      k; ds, for
//                                                                      consumers      dk and dv
// ds_full[s]        consumer warps consumers, dS stored, dq of the     consumers,     ds; after the
//                                  step before done                    producer       last step v
// dq_full[s]        consumer warps consumers, dq_part stored           dq_writer s    dq
// dq_empty[s]       1              dq_writer s, dq_part added          consumers      dq
// batch_full[s]     1              planner                             all others     batches
// batch_begun[s]    1              producer                            planner        the next work
// batch_empty[s]    BATCH_READERS  producer, writers, consumer warps   planner        batches
// turns_came        N_WRITER       writers, turn of the last part of   planner        the next work
//                                  a work has come
// PANELS + w (1)    128 threads    consumers w                         the same       ds, as dk, dv
struct Barriers {
  u64 q_full[N_STAGE], dout_full[N_STAGE], stage_empty[N_STAGE];
  u64 kv_full, k_empty;
  u64 ds_full[N_STAGE], dq_full[N_STAGE], dq_empty[N_STAGE];
  u64 batch_full[N_BATCH], batch_begun[N_BATCH], batch_empty[N_BATCH];
  u64 turns_came;
};
constexpr bool ONE_STAGE = true;
DC_FN const u64& q_empty(const Barriers& b, int stage) { return b.stage_empty[stage]; }
DC_FN const u64& dout_empty(const Barriers& b, int stage) { return b.stage_empty[stage]; }
// dS of the step before is made of the last dP of its kv tile.
DC_FN void wait_for_v(const Barriers& b, int, int t) {
  if (t > 0)
    mbarrier_wait(smem_address(&b.ds_full[(t - 1) % N_STAGE]), full_parity((t - 1) / N_STAGE));
}
constexpr int PANELS = 1;  // named barriers
constexpr int BATCH_READERS = 1 + N_WRITER + CONSUMER_WARPS;

struct alignas(1024) SharedStorage {
  u8 k[KV_TILE_BYTES], v[KV_TILE_BYTES];  // panels of 64 columns: [2][KV_TILE][128 bytes]
  u8 q[N_STAGE][Q_TILE_BYTES];            // [2][Q_TILE][128 bytes]
  u8 dout[N_STAGE][Q_TILE_BYTES];
  u8 ds[N_STAGE][DS_BYTES];  // [KV_TILE][128 bytes]: row = key, 64 q rows
  u8 dq[N_STAGE][DQ_BYTES];  // in the order of dq_accum (bwd_postprocess.cu)
  u8 rows[N_STAGE][ROW_TILE_BYTES];
  Batch batches[N_BATCH];
  Barriers barriers;
};
static_assert(sizeof(SharedStorage) == DC_SMEM_BYTES, "config.py counts another size");

DC_FN void note_left(SharedStorage&, int, int) {}  // nobody asks

DC_FN void init_barriers(SharedStorage& smem) {
  Barriers& b = smem.barriers;
#pragma unroll
  for (int s = 0; s < N_STAGE; ++s) {
    init_barrier(b.q_full[s], 1);
    init_barrier(b.dout_full[s], 1);
    init_barrier(b.stage_empty[s], CONSUMER_WARPS);
    init_barrier(b.ds_full[s], CONSUMER_WARPS);
    init_barrier(b.dq_full[s], CONSUMER_WARPS);
    init_barrier(b.dq_empty[s], 1);
  }
  init_batch_barriers(b, BATCH_READERS);
  init_barrier(b.kv_full, 1);
  init_barrier(b.k_empty, CONSUMER_WARPS);
  init_barrier(b.turns_came, N_WRITER);
  mbarrier_init_fence();
}
