// The forward on every GPU from sm_80 on: out and lse. A CTA takes one q tile of one q head.
//
//   S = q k^T     P = 2^(S scale_log2 - reference)     O += P v     out = O / rowsum(P)
//
// Roles: none. Each warp owns WARP_ROWS rows of the q tile, from S to out: softmax needs no word
// from another warp, and P goes from the accumulators of S to the A operands of P v in registers.
// The exponentials of 16 keys run beside the products of the 16 keys before; the rest of the
// softmax hides under the products of another warp of the scheduler, best one of another CTA.
//
// kv tile t, and the barriers (all __syncthreads, which follows a cp.async wait of every thread):
//   [landed]     k of t has landed (and v, with two stages), everybody is done with tile t - 1
//                -> with one stage, start to load v of t
//                S = q k^T
//   [v landed]   with one stage only: v of t has landed, k of t is free
//                -> start to load k of t + 1 (and v, with two stages)
//                mask, where some row misses a key; softmax; O += P v
// Before the loop: [work] smem.work is written; [q landed] with q in registers only.
// After it no barrier: out passes through rows of smem.q that belong to the warp alone.
//
// Shared memory: SharedStorage. Registers of 255, head_dim 128, 32 rows a warp: O 128 + S 64 + A, B
// operands 24..48 + reference, sum 8 + addresses 10; P takes over the registers of S.
#include "params.cuh"
#include "ptx/math.cuh"
#include "tile/gemm.cuh"
#include "tile/mask.cuh"
#include "tile/softmax.cuh"
#include "tile/tile_stream.cuh"

constexpr int Q_TILE = DC_Q_TILE, KV_TILE = DC_KV_TILE;
constexpr int N_WARP = DC_WARPS, N_THREAD = N_WARP * WARP_SIZE;
constexpr int STAGES = DC_STAGES;                   // tiles of k, and of v, in shared memory
constexpr bool Q_IN_REGISTERS = DC_Q_REGISTERS;     // else q is read again for every kv tile
constexpr int COLUMNS = round_up(DC_HEAD_DIM, 16);  // of q, k, v in the products; the last may be 0
constexpr int WARP_ROWS = Q_TILE / N_WARP;
constexpr int M_TILES = WARP_ROWS / 16, S_TILES = KV_TILE / 8, O_TILES = COLUMNS / 8;
// Keys of the heads that are worked on at a time: 16 MiB of k and v.
constexpr int GROUP_ROWS = (16 << 20) / (2 * DC_HEAD_DIM * int(sizeof(Element)));

static_assert(DC_PARAMS_BYTES == sizeof(ForwardParams), "params.py packs another struct");
static_assert(DC_HEAD_DIM % 8 == 0 && DC_HEAD_DIM > 0, "head_dim: 16-byte chunks");
static_assert(DC_HEAD_DIM <= DC_HEAD_DIM_PAD && DC_HEAD_DIM_PAD % 32 == 0, "head_dim");
static_assert(DC_HEAD_DIM_PAD <= 128, "the registers hold 128 columns of out");
static_assert(M_TILES > 0 && M_TILES * 16 * N_WARP == Q_TILE, "whole pieces a warp");
static_assert(KV_TILE % 16 == 0, "whole k-steps of P V");
static_assert(STAGES == 1 || STAGES == 2, "stages");
static_assert(DC_CAUSAL == 0 || DC_CAUSAL == 1, "mask");

typedef SmemTile<Q_TILE, DC_HEAD_DIM_PAD> QTile;
typedef SmemTile<KV_TILE, DC_HEAD_DIM_PAD> KvTile;

// What the CTA does. It lies in shared memory and is read where it is needed: the main loop leaves
// no register for it.
struct Work {
  int q_row0, batch, q_head, kv_head;
  int row_end;  // keys from here on are seen by no row of the q tile
  int n_tile;   // kv tiles before row_end
  int n_whole;  // the first ones, of which every row of the q tile sees every key
};

struct alignas(16) SharedStorage {
  QTile q;  // out on its way to global memory, at the end
  KvTile k[STAGES], v[STAGES];
  Work work;
};
static_assert(sizeof(SharedStorage) == DC_SMEM_BYTES, "config.py counts another size");

DC_FN const Element* head_of(const Element* p, const Strides& strides, int batch, int head) {
  return p + batch * strides.batch + head * strides.head;
}

// Which q tile this CTA takes. Heads go in groups whose k and v fit into L2 together; in a group
// all heads' longest q tiles come first, so that the last CTAs to run are short. Nothing is added
// across CTAs, so their order touches no bits. The host makes n_q * batch * n_q_head < 2^31 CTAs.
DC_FN Work take_work(const ForwardParams& params) {
  const u32 n_q = ceil_div(params.q_len, Q_TILE), n_head = params.batch * params.n_q_head;
  const u32 q_per_kv = params.n_q_head / params.n_kv_head;
  const u32 fit = params.kv_len < GROUP_ROWS ? GROUP_ROWS / max_int(params.kv_len, 1) : 1;
  const u32 group = fit < n_head / q_per_kv ? fit * q_per_kv : n_head;  // q heads
  const u32 group_cta = blockIdx.x % (group * n_q), first = (blockIdx.x - group_cta) / n_q;
  const u32 n = n_head - first < group ? n_head - first : group;  // the last group may be smaller
  const u32 turn = group_cta / n, head = first + group_cta % n;

  Work work;
  work.q_row0 = int(DC_CAUSAL ? n_q - 1 - turn : turn) * Q_TILE;
  work.batch = head / params.n_q_head;
  work.q_head = head % params.n_q_head;
  work.kv_head = work.q_head / q_per_kv;
  const Mask mask{params.q_len, params.kv_len, params.mask_offset};
  work.row_end = max_int(0, mask.key_end(min_int(work.q_row0 + Q_TILE, params.q_len) - 1));
  work.n_tile = ceil_div(work.row_end, KV_TILE);
  work.n_whole = max_int(0, mask.key_end(work.q_row0)) / KV_TILE;
  return work;
}

// The rows of one warp. Methods ask for the lane anew, so that addresses live in one method only:
// kept over the whole loop they cost spills.
struct WarpRows {
  const QTile& q_tile;
  const Mask mask;
  const int row0;  // first row of the warp in the tile
  const float scale_log2;
  u32 q[Q_IN_REGISTERS ? COLUMNS / 16 : 1][M_TILES][4];
  Accumulator<M_TILES, O_TILES> o;
  OnlineSoftmax<M_TILES> softmax;

  typedef Accumulator<M_TILES, S_TILES> Scores;

  DC_FN WarpRows(const QTile& tile, const Mask& mask, int warp, float scale)
      : q_tile(tile), mask(mask), row0(warp * WARP_ROWS), scale_log2(scale) {
    o.clear();
  }

  // A operands of columns 16 k .. 16 k + 15.
  DC_FN void load_q(int k, int lane) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
      load_a<Stored::MN_ROWS>(q[Q_IN_REGISTERS ? k : 0][m], q_tile, row0 + 16 * m, 16 * k, lane);
  }

  // S = q k^T
  DC_FN void multiply(Scores& s, const KvTile& k_tile) {
    const int lane = lane_id();
    s.clear();
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; ++k) {
      if (!Q_IN_REGISTERS) load_q(k, lane);
      gemm_step<Stored::MN_ROWS>(s, q[Q_IN_REGISTERS ? k : 0], k_tile, 0, 16 * k, lane);
    }
  }

  // Whether some row sees a key from `key` on; a vote, so that a branch on it is the whole warp's.
  DC_FN bool see(int q_row0, int key) const {
    return __any_sync(0xffffffffu, mask.key_end(q_row0 + row0 + WARP_ROWS - 1) > key);
  }

  // O += P v
  DC_FN void absorb(Scores& s, const KvTile& v_tile) {
    softmax.raise(s, o, scale_log2);
    const int lane = lane_id();
#pragma unroll
    for (int step = 0; step < KV_TILE / 16; ++step) {
      u32 p[M_TILES][4];
      softmax.probabilities(p, s, step, scale_log2);
      gemm_step<Stored::K_ROWS>(o, p, v_tile, 0, 16 * step, lane);
    }
  }
};

// The loads of k and v; tile t lies in stage t % STAGES. No tile, no load.
struct KvStream {
  SharedStorage& smem;
  TileStream<N_THREAD, KvTile> k, v;

  DC_FN void load(int t, bool want_k, bool want_v) {
    if (t >= smem.work.n_tile) return;
    const int n_valid = smem.work.row_end - t * KV_TILE;
    if (want_k) k.load(smem.k[t % STAGES], n_valid);
    if (want_v) v.load(smem.v[t % STAGES], n_valid);
  }
};

DC_FN void visit(WarpRows& rows, KvStream& kv, int t) {
  SharedStorage& smem = kv.smem;
  cp_async_wait<0>();
  __syncthreads();  // [landed]
  if (STAGES == 1) {
    kv.load(t, false, true);
    cp_async_commit();
  }

  // A warp that sees no key of the tile leaves the tensor cores to the others. (Not with one stage:
  // S would be defined on one path only across the barrier, which costs spills.)
  if (DC_CAUSAL && STAGES == 2 && !rows.see(smem.work.q_row0, t * KV_TILE)) {
    kv.load(t + 1, true, true);
    cp_async_commit();
    return;
  }
  WarpRows::Scores s;
  rows.multiply(s, smem.k[t % STAGES]);
  if (STAGES == 1) {
    cp_async_wait<0>();
    __syncthreads();  // [v landed]
  }
  // After S, not before it: the tensor cores start right behind the barrier.
  kv.load(t + 1, true, STAGES == 2);
  cp_async_commit();
  if (t >= smem.work.n_whole) {
    const int lane = lane_id();
    mask_scores(s, rows.mask, smem.work.q_row0 + rows.row0 + lane / 4, t * KV_TILE + lane % 4 * 2);
  }
  rows.absorb(s, smem.v[t % STAGES]);
}

// Rows of this warp to out and lse. They go through the warp's rows of smem.q, which nobody else
// reads, so that global memory sees 16 bytes a lane.
DC_FN void store(WarpRows& rows, QTile& stage, int q_row0, Element* out, i64 row_stride,
                 float* lse) {
  const int first_row = q_row0 + rows.row0, lane = lane_id();
  rows.softmax.finish();
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = rows.softmax.sum[m][half];
      const float inverse = reciprocal_approx(sum);
#pragma unroll
      for (int n = 0; n < O_TILES; ++n) {
        const u32 pair =
            pack(rows.o.d[m][n][2 * half] * inverse, rows.o.d[m][n][2 * half + 1] * inverse);
        // No key seen: out is 0, whatever another row's key left in O (0 * NaN).
        st_shared(stage.address(rows.row0 + 16 * m + 8 * half + lane / 4, 8 * n + lane % 4 * 2),
                  sum == 0.f ? 0u : pair);
      }
      const int row = first_row + 16 * m + 8 * half + lane / 4;
      if (lane % 4 == 0 && row < rows.mask.q_len) lse[row] = rows.softmax.lse(m, half);
    }
  __syncwarp();
  constexpr int n_chunk = DC_HEAD_DIM / 8, n_copy = WARP_ROWS * n_chunk;
#pragma unroll
  for (int i = 0; i < ceil_div(n_copy, WARP_SIZE); ++i) {
    const int copy = lane + i * WARP_SIZE;
    const int row = copy / n_chunk, column = copy % n_chunk * 8;
    if (copy >= n_copy || first_row + row >= rows.mask.q_len) break;
    store_chunk(out + (first_row + row) * row_stride + column,
                stage, rows.row0 + row, column);
  }
}

// Without alignment the loads pass through registers, and speed is lost anyway.
extern "C" __global__ void __launch_bounds__(N_THREAD, DC_ALIGNED ? DC_MIN_CTAS : 1)
    fwd_sm80(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(16) u8 smem_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_bytes);
  const Mask mask{params.q_len, params.kv_len, params.mask_offset};
  if (threadIdx.x == 0) smem.work = take_work(params);
  __syncthreads();  // [work]

  WarpRows rows(smem.q, mask, threadIdx.x / WARP_SIZE, params.scale_log2);
  if (smem.work.n_tile > 0) {
    const Work work = smem.work;
    const Element* q = head_of(params.q, params.q_strides, work.batch, work.q_head);
    const Element* k = head_of(params.k, params.k_strides, work.batch, work.kv_head);
    const Element* v = head_of(params.v, params.v_strides, work.batch, work.kv_head);
    TileStream<N_THREAD, QTile>(q + work.q_row0 * params.q_strides.row, params.q_strides.row)
        .load(smem.q, params.q_len - work.q_row0);
    cp_async_commit();
    KvStream kv{smem, {k, params.k_strides.row}, {v, params.v_strides.row}};
    kv.load(0, true, STAGES == 2);
    cp_async_commit();
    if (Q_IN_REGISTERS) {
      cp_async_wait<1>();
      __syncthreads();  // [q landed]
#pragma unroll
      for (int step = 0; step < COLUMNS / 16; ++step) rows.load_q(step, lane_id());
    }
#pragma unroll 1
    for (int t = 0; t < smem.work.n_tile; ++t) visit(rows, kv, t);
  }
  const Work work = smem.work;
  Element* out = params.out + work.batch * params.out_strides.batch +
                 work.q_head * params.out_strides.head;
  float* lse = params.lse + work.batch * params.lse_batch + work.q_head * params.lse_head;
  store(rows, smem.q, work.q_row0, out, params.out_strides.row, lse);
}
