// bwd_sm90_d64: tiles, roles, what lies in shared memory, and the barriers between the roles.
#pragma once
#include "bwd_sm90_steps.cuh"
#include "params_bwd_sm90.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

constexpr int Q_TILE = DC_Q_TILE, KV_TILE = DC_KV_TILE, HEAD_DIM = DC_HEAD_DIM_PAD;
static_assert(Q_TILE == 64 && KV_TILE == 128 && HEAD_DIM == 64, "the tiles of the main loop");
static_assert(DC_HEAD_DIM % 8 == 0 && DC_HEAD_DIM <= HEAD_DIM, "columns past the end are zeros");

// Warpgroup 0 helps, one role a warp.
constexpr int N_SOFTMAX = 2, SOFTMAX_WARPS = 4 * N_SOFTMAX, GRADIENT_WARPS = 4;
constexpr int GRADIENT_WARPGROUP = 1 + N_SOFTMAX;
constexpr int PRODUCER_WARP = 0, FIRST_TURN_WARP = 1, PLANNER_WARP = 3;
constexpr int N_STAGE = 4;     // q and dout tiles
constexpr int N_KV_STAGE = 2;  // k and v tiles
constexpr int N_THREAD = WARPGROUP_SIZE * (2 + N_SOFTMAX);
constexpr int HELPER_REGISTERS = 24, SOFTMAX_REGISTERS = 160, GRADIENT_REGISTERS = 168;
// 65536 registers for 512 threads are 128 each at launch; setmaxnreg shares those out.
static_assert(HELPER_REGISTERS + N_SOFTMAX * SOFTMAX_REGISTERS + GRADIENT_REGISTERS <= 128 * 4,
              "registers");

constexpr int Q_TILE_BYTES = Q_TILE * PANEL_ROW_BYTES, KV_TILE_BYTES = KV_TILE * PANEL_ROW_BYTES;
constexpr int SCORE_PANEL_BYTES = Q_TILE * PANEL_ROW_BYTES;  // of P or dS: 64 keys
constexpr int SCORE_BYTES = KV_TILE / PANEL_COLUMNS * SCORE_PANEL_BYTES;
constexpr int ROW_BYTES = Q_TILE * 4;

// Keys that the diagonal hides, or that do not exist.
DC_FN bool needs_mask(const Mask& mask, int row0, int key0) {
  return mask.cuts(row0, key0, KV_TILE);
}

// Barrier          arrivals        signalled by                       waited on by  guards
// stage_full[s]    1 + bytes       producer                           softmax       q, dout, rows
// stage_empty[s]   gradient warps  gradient, dk of the step done      producer      q, dout, rows
// kv_full[s]       1 + bytes       producer                           softmax       k, v
// kv_empty[s]      softmax warps   softmax, last dq of the tile done  producer      k, v
// p_full[w]        4 warps         softmax w, P stored                gradient      p
// p_empty[w]       gradient warps  gradient, dv of the step done      softmax w     p
// ds_full[w]       4 warps         softmax w, dS stored               gradient      ds
// ds_empty[w]      gradient warps  gradient, dk of the step done      softmax w     ds
// turn[w]          1               turn warp w, ticket has come       softmax w     dq_accum
// dq_added[w]      4 warps         softmax w, part of dq sent         turn warp w   dq_accum, turn
// batch_full[s]    1               planner                            all others    batches
// batch_begun[s]   1               producer                           planner       the next work
// batch_empty[s]   BATCH_READERS   producer, turn warps, softmax and  planner       batches
//                                  gradient warps
// turns_came       N_SOFTMAX       turn warps, turn of the last part  planner       the next work
//                                  of a work has come
// PANELS (1)       128 threads     gradient                           gradient      dk, dv
//
// The gradient warps read q, dout and rows last: they wait for P and dS, which are made of all
// that the softmax warps read there. P and dS are written by ordinary stores and read by wgmma: the
// gradient warps fence (wait_written).
struct Barriers {
  u64 stage_full[N_STAGE], stage_empty[N_STAGE];
  u64 kv_full[N_KV_STAGE], kv_empty[N_KV_STAGE];
  u64 p_full[N_SOFTMAX], p_empty[N_SOFTMAX];
  u64 ds_full[N_SOFTMAX], ds_empty[N_SOFTMAX];
  u64 turn[N_SOFTMAX], dq_added[N_SOFTMAX];
  u64 batch_full[N_BATCH], batch_begun[N_BATCH], batch_empty[N_BATCH];
  u64 turns_came;
};
constexpr int PANELS = 1;  // named barrier
constexpr int BATCH_READERS = 1 + N_SOFTMAX + SOFTMAX_WARPS + GRADIENT_WARPS;

// All tiles have rows of 128 bytes, swizzled (ptx/wgmma.cuh).
struct alignas(1024) SharedStorage {
  u8 k[N_KV_STAGE][KV_TILE_BYTES], v[N_KV_STAGE][KV_TILE_BYTES];
  u8 q[N_STAGE][Q_TILE_BYTES], dout[N_STAGE][Q_TILE_BYTES];
  u8 p[N_SOFTMAX][SCORE_BYTES], ds[N_SOFTMAX][SCORE_BYTES];  // [2][Q_TILE][64 keys]
  u8 dk[KV_TILE_BYTES], dv[KV_TILE_BYTES];                   // on their way to global memory
  float lse_log2[N_STAGE][Q_TILE], delta[N_STAGE][Q_TILE];
  Batch batches[N_BATCH];
  int steps_left[N_BATCH];  // of the kv tile, from that batch on
  Barriers barriers;
};
static_assert(sizeof(SharedStorage) == DC_SMEM_BYTES, "config.py counts another size");

DC_FN void init_barriers(SharedStorage& smem) {
  Barriers& b = smem.barriers;
#pragma unroll
  for (int s = 0; s < N_STAGE; ++s) {
    init_barrier(b.stage_full[s], 1);
    init_barrier(b.stage_empty[s], GRADIENT_WARPS);
  }
#pragma unroll
  for (int s = 0; s < N_KV_STAGE; ++s) {
    init_barrier(b.kv_full[s], 1);
    init_barrier(b.kv_empty[s], SOFTMAX_WARPS);
  }
#pragma unroll
  for (int w = 0; w < N_SOFTMAX; ++w) {
    init_barrier(b.p_full[w], 4);
    init_barrier(b.p_empty[w], GRADIENT_WARPS);
    init_barrier(b.ds_full[w], 4);
    init_barrier(b.ds_empty[w], GRADIENT_WARPS);
    init_barrier(b.turn[w], 1);
    init_barrier(b.dq_added[w], 4);
  }
  init_batch_barriers(b, BATCH_READERS);
  init_barrier(b.turns_came, N_SOFTMAX);
  mbarrier_init_fence();
}
