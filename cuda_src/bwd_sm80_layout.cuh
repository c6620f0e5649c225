// bwd_sm80: how tiles are cut over warps, what lies in shared memory, and the list of steps.
#pragma once
#include "params.cuh"
#include "schedules/contract.cuh"
#include DC_SCHEDULE
#include "tile/gemm.cuh"

constexpr int Q_TILE = DC_Q_TILE, KV_TILE = DC_KV_TILE, HEAD_PAD = DC_HEAD_DIM_PAD;
constexpr int N_WARP = 8, N_THREAD = N_WARP * WARP_SIZE;
static_assert(DC_WARPS == N_WARP, "the warp grids below are for 8 warps");
static_assert(HEAD_PAD % 32 == 0 && DC_HEAD_DIM <= HEAD_PAD && DC_HEAD_DIM % 8 == 0, "head_dim");

// A product of M x N, cut over WARPS_M x (8 / WARPS_M) warps.
template <int M, int N, int WARPS_M>
struct WarpGrid {
  static constexpr int warps_n = N_WARP / WARPS_M;
  static constexpr int rows = M / WARPS_M, columns = N / warps_n;
  static constexpr int m_tiles = rows / 16, n_tiles = columns / 8;
  static_assert(rows % 16 == 0 && columns % 16 == 0, "whole mma pieces for every warp");
  typedef Accumulator<m_tiles, n_tiles> Acc;

  DC_FN static int row0(int warp) { return warp % WARPS_M * rows; }
  DC_FN static int column0(int warp) { return warp / WARPS_M * columns; }
};

// Warp pieces as square as they get: a square piece reads the least shared memory a product.
typedef WarpGrid<Q_TILE, KV_TILE, (Q_TILE < KV_TILE ? 2 : 4)> ScoreGrid;       // S, dP
typedef WarpGrid<KV_TILE, HEAD_PAD, 4> KvGrid;                                 // dK, dV
typedef WarpGrid<Q_TILE, HEAD_PAD, (Q_TILE == 64 && HEAD_PAD == 128 ? 2 : 4)> DqGrid;

// One visit of this CTA: all that a step needs, ready to use. Who goes where, whose turn it is and
// where it lies in memory is worked out ahead, one thread a step: in the main loop such a chain of
// dependent integer instructions would stand before the products.
struct Step {
  i64 q_at, dout_at;  // first row of the q tile in q and in dout, in elements
  int tile;           // its place among all q tiles of all q heads
  int row0;           // first row
  u32 ticket;
  u32 is_last;        // no contributor after this one
};
constexpr int STEP_RING = 128;  // half of it is refilled at a time

// What stays the same for one kv tile. Kept in shared memory and read where it is used: over the
// main loop there is no register left for it.
struct KvTile {
  int batch, kv_head, tile;
  int row0;     // first key
  int row_end;  // keys from here on are not seen by any row, or do not exist
  int q_per_kv;  // q heads of the group
  int total;     // steps of all of them
};

struct SharedStorage {
  SmemTile<KV_TILE, HEAD_PAD> k, v;
  SmemTile<Q_TILE, HEAD_PAD> q[DC_Q_STAGES];
  SmemTile<Q_TILE, HEAD_PAD> dout[DC_DO_STAGES];
  SmemTile<Q_TILE, KV_TILE> p, ds;
  float lse_log2[2][Q_TILE], delta[2][Q_TILE];
  Step steps[STEP_RING];
  KvTile kv;
  int work;
};
static_assert(sizeof(SharedStorage) == DC_SMEM_BYTES, "config.py counts another size");

// Writes entries [first, first + count) of the list of steps into the ring.
DC_FN void fill_steps(SharedStorage& smem, const BackwardParams& params, int first, int count) {
  const KvTile& kv = smem.kv;
  const int index = first + threadIdx.x;
  if (int(threadIdx.x) >= count || index >= kv.total) return;
  int q_len = params.q_len;
  compute_late(q_len);
  const schedule::Shape shape = schedule::make_shape(q_len, params.kv_len, params.mask_offset);
  const int number = index / kv.q_per_kv;  // in the order of the schedule
  const int q_head = kv.kv_head * kv.q_per_kv + index - number * kv.q_per_kv;
  const int q_tile = schedule::q_tile(shape, kv.tile, number);
  Step step;
  step.row0 = q_tile * Q_TILE;
  step.q_at = kv.batch * params.q_strides.batch + q_head * params.q_strides.head +
              step.row0 * params.q_strides.row;
  step.dout_at = kv.batch * params.dout_strides.batch + q_head * params.dout_strides.head +
                 step.row0 * params.dout_strides.row;
  step.tile = (kv.batch * params.n_q_head + q_head) * shape.n_q + q_tile;
  step.ticket = u32(schedule::ticket(shape, kv.tile, q_tile));
  step.is_last = int(step.ticket) == schedule::num_contributors(shape, q_tile) - 1;
  smem.steps[index % STEP_RING] = step;
}
