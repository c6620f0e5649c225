// The backward on every GPU from sm_80 on: dq, dk, dv of one pass, dq summed in ticket order.
//
//   S = q k^T * scale     P = exp2(S - lse)     dP = dout v^T     dS = P (dP - delta)
//   dv = P^T dout         dk = dS^T q * scale   dq = dS k * scale
//
// A CTA takes pieces of work from a counter: one or two kv tiles of a kv head. k and v of the tile
// stay in shared memory, dk and dv in registers, while it visits the q tiles of all q heads of the
// group in the order of the schedule; dq goes to its turn in dq_accum (tile/turnstile.cuh).
//
// Roles: none; all 8 warps do the same. One thread looks for the turn (TURN_WAITER), one ends it
// (TURN_RELEASER, in another warp: its release stands for some 600 cycles).
//
// Step t, and the barriers (all __syncthreads):
//   [ready]   q, dout, lse, delta of t have landed; everybody is done with p, ds of t - 1
//             -> end the turn of t - 1; look for the turn of t; start to load t + 1
//             S, P -> smem.p; dP, dS -> smem.ds
//   [written] p, ds complete, turn of t granted
//             read dq_accum into registers (hidden under dv); dv += P^T dout; dq = dS k; add; write
//   [dout]    with one dout stage only: dout free -> load t + 1
//             dk += dS^T q
//   [q]       with one q stage only: q free -> load t + 1
//
// Shared memory: SharedStorage. Registers, head_dim 128: dk 64 + dv 64 + S 32 + dP 32 (then dq 32 +
// dq_accum 32) + fragments 16..32 + addresses, of 255.
#include "params.cuh"
#include "bwd_sm80_layout.cuh"
#include "ptx/math.cuh"
#include "tile/mask.cuh"
#include "tile/turnstile.cuh"

static_assert(DC_PARAMS_BYTES == sizeof(BackwardParams), "params.py packs another struct");
// Pieces that S and dP load ahead; where scores take twice the registers there is room for one.
constexpr int SCORE_DEPTH = Q_TILE * KV_TILE > 64 * 128 ? 1 : 2;
constexpr int TURN_WAITER = 0, TURN_RELEASER = WARP_SIZE;

// What stays the same for one kv tile.
struct KvTile {
  int batch, kv_head, tile;
  int row0;       // first key
  int row_end;    // keys from here on are not seen by any row, or do not exist
};

DC_FN const Element* head_of(const Element* p, const Strides& strides, int batch, int head) {
  return p + batch * strides.batch + head * strides.head;
}

DC_FN i64 q_tile_index(const BackwardParams& params, int batch, int q_head, int n_q, int q_tile) {
  return (i64(batch) * params.n_q_head + q_head) * n_q + q_tile;
}

DC_FN void load_dout(SharedStorage& smem, const BackwardParams& params, const Mask& mask,
                     const KvTile& kv, int q_head, int q_tile, int t) {
  load_tile<N_THREAD>(smem.dout[t % DC_DO_STAGES],
                      head_of(params.dout, params.dout_strides, kv.batch, q_head),
                      params.dout_strides.row, q_tile * Q_TILE, mask.first_row(), params.q_len);
}

DC_FN void load_q(SharedStorage& smem, const BackwardParams& params, const Mask& mask,
                  const KvTile& kv, int q_head, int q_tile, int t) {
  load_tile<N_THREAD>(smem.q[t % DC_Q_STAGES],
                      head_of(params.q, params.q_strides, kv.batch, q_head), params.q_strides.row,
                      q_tile * Q_TILE, mask.first_row(), params.q_len);
}

DC_FN void load_row_values(SharedStorage& smem, const BackwardParams& params, i64 tile_index, int t) {
  constexpr int n_copy = Q_TILE / 4;
  const int i = threadIdx.x % n_copy;
  const i64 at = tile_index * Q_TILE + 4 * i;
  if (threadIdx.x < n_copy)
    cp_async_16(smem_address(&smem.lse_log2[t % 2][4 * i]), params.lse_log2 + at, true);
  else if (threadIdx.x < 2 * n_copy)
    cp_async_16(smem_address(&smem.delta[t % 2][4 * i]), params.delta + at, true);
}

// Scores of hidden keys to -inf: selected away before exp2, for a hidden key may score anything and
// exp2 of it overflow.
DC_FN void hide_keys(ScoreGrid::Acc& s, const Mask& mask, const KvTile& kv, int q_row0, int warp,
                     int lane) {
#pragma unroll
  for (int m = 0; m < ScoreGrid::m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = q_row0 + ScoreGrid::row0(warp) + 16 * m + 8 * half + lane / 4;
      const int column_end = mask.key_end(row) - kv.row0 - ScoreGrid::column0(warp) - 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < ScoreGrid::n_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * n + e >= column_end) s.d[m][n][2 * half + e] = -infinity();
    }
}

// Values of the rows that a lane holds of a score tile.
struct RowValues {
  float value[ScoreGrid::m_tiles][2];

  DC_FN RowValues(const float* smem_rows, int warp, int lane) {
#pragma unroll
    for (int m = 0; m < ScoreGrid::m_tiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        value[m][half] = smem_rows[ScoreGrid::row0(warp) + 16 * m + 8 * half + lane / 4];
  }
};

// Calls body(m, n) for the 16 x 8 pieces of a score tile that belong to step `step` of `n_step`.
template <class Body>
DC_FN void score_pieces(int step, int n_step, const Body& body) {
  constexpr int n_piece = ScoreGrid::m_tiles * ScoreGrid::n_tiles;
#pragma unroll
  for (int i = 0; i < n_piece; ++i)
    if (i * n_step / n_piece == step) body(i / ScoreGrid::n_tiles, i % ScoreGrid::n_tiles);
}

// Writes scale * acc to rows [row0, row_end) of gmem; rows of the tile start at row0.
template <class Grid>
DC_FN void store_result(const typename Grid::Acc& acc, Element* gmem, i64 row_stride, int row0,
                        int row_end, float scale, int warp, int lane) {
#pragma unroll
  for (int m = 0; m < Grid::m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + Grid::row0(warp) + 16 * m + 8 * half + lane / 4;
      if (row >= row_end) continue;
#pragma unroll
      for (int n = 0; n < Grid::n_tiles; ++n) {
        const int column = Grid::column0(warp) + 8 * n + 2 * (lane % 4);
        if (column < DC_HEAD_DIM)
          store_pair(gmem + row * row_stride + column,
                     pack(acc.d[m][n][2 * half] * scale, acc.d[m][n][2 * half + 1] * scale));
      }
    }
}

DC_FN void visit_kv_tile(SharedStorage& smem, const BackwardParams& params, const schedule::Shape& shape,
                         const KvTile& kv, int warp, int lane) {
  const Mask mask{params.q_len, params.kv_len, params.mask_offset};
  const int n_q = shape.n_q, q_per_kv = params.n_q_head / params.n_kv_head;
  const int n_step = schedule::num_steps(shape, kv.tile), total = n_step * q_per_kv;
  KvGrid::Acc dk, dv;
  dk.clear();
  dv.clear();
  u32* open_turn = nullptr;  // semaphore of the turn that the next barrier lets us end

  if (total > 0) {
    fill_steps(smem.steps, shape, kv.tile, n_step, total, 0, STEP_RING);
    load_tile<N_THREAD>(smem.k, head_of(params.k, params.k_strides, kv.batch, kv.kv_head),
                        params.k_strides.row, kv.row0, 0, kv.row_end);
    load_tile<N_THREAD>(smem.v, head_of(params.v, params.v_strides, kv.batch, kv.kv_head),
                        params.v_strides.row, kv.row0, 0, kv.row_end);
    __syncthreads();
    const Step first = smem.steps[0];
    const int q_head = kv.kv_head * q_per_kv + first.q_head;
    load_q(smem, params, mask, kv, q_head, first.q_tile, 0);
    load_dout(smem, params, mask, kv, q_head, first.q_tile, 0);
    load_row_values(smem, params, q_tile_index(params, kv.batch, q_head, n_q, first.q_tile), 0);
    cp_async_commit();
  }

#pragma unroll 1
  for (int t = 0; t < total; ++t) {
    cp_async_wait<0>();
    __syncthreads();  // [ready]
    if (open_turn != nullptr && threadIdx.x == TURN_RELEASER) turnstile_release(open_turn);
    if (t % (STEP_RING / 2) == 0 && t > 0)
      fill_steps(smem.steps, shape, kv.tile, n_step, total, t + STEP_RING / 2, STEP_RING / 2);

    const Step step = smem.steps[t % STEP_RING];
    const int q_head = kv.kv_head * q_per_kv + step.q_head;
    const i64 tile_index = q_tile_index(params, kv.batch, q_head, n_q, step.q_tile);
    u32* semaphore = params.dq_semaphore + tile_index * DC_SEMAPHORE_STRIDE;
    bool granted = step.ticket == 0;

    const bool more = t + 1 < total;
    const Step next = smem.steps[(t + 1) % STEP_RING];
    const int next_head = kv.kv_head * q_per_kv + next.q_head;
    // Between the steps of S, so that address arithmetic runs beside the product.
    const auto start_next = [&](int k) {
      if (k == 0 && threadIdx.x == TURN_WAITER && !granted)
        granted = turnstile_ready(semaphore, step.ticket);
      if (k == 0 && more && DC_Q_STAGES == 2)
        load_q(smem, params, mask, kv, next_head, next.q_tile, t + 1);
      if (k == 1 && more) {
        if (DC_DO_STAGES == 2) load_dout(smem, params, mask, kv, next_head, next.q_tile, t + 1);
        load_row_values(smem, params,
                        q_tile_index(params, kv.batch, next_head, n_q, next.q_tile), t + 1);
      }
      if (k == 1) cp_async_commit();
    };

    const auto& q = smem.q[t % DC_Q_STAGES];
    const auto& dout = smem.dout[t % DC_DO_STAGES];
    {
      ScoreGrid::Acc s, dp;
      s.clear();
      gemm<Stored::MN_ROWS, Stored::MN_ROWS, HEAD_PAD, SCORE_DEPTH>(
          s, q, ScoreGrid::row0(warp), smem.k, ScoreGrid::column0(warp), lane, start_next);
      if (mask.cuts(step.q_tile * Q_TILE, kv.row0, KV_TILE))
        hide_keys(s, mask, kv, step.q_tile * Q_TILE, warp, lane);

      const u32 lane_at = (ScoreGrid::row0(warp) + lane / 4) * smem.p.row_bytes +
                          (ScoreGrid::column0(warp) + 2 * (lane % 4)) * int(sizeof(Element));
      const u32 p_at = smem.p.address(0, 0) + lane_at, ds_at = smem.ds.address(0, 0) + lane_at;
      const RowValues lse_log2(smem.lse_log2[t % 2], warp, lane);
      const auto softmax = [&](int m, int n) {  // S -> P, in place and as elements to smem.p
        float(&d)[4] = s.d[m][n];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          d[e] = exp2_approx(fmaf(d[e], params.scale_log2, -lse_log2.value[m][e / 2]));
        st_shared(p_at + 16 * m * smem.p.row_bytes + 16 * n, pack(d[0], d[1]));
        st_shared(p_at + (16 * m + 8) * smem.p.row_bytes + 16 * n, pack(d[2], d[3]));
      };
      // exp2 goes to another pipe than the product: a piece of it between the steps of dP.
      dp.clear();
      gemm<Stored::MN_ROWS, Stored::MN_ROWS, HEAD_PAD, SCORE_DEPTH>(
          dp, dout, ScoreGrid::row0(warp), smem.v, ScoreGrid::column0(warp), lane,
          [&](int k) { score_pieces(k, HEAD_PAD / 16, softmax); });

      const RowValues delta(smem.delta[t % 2], warp, lane);
      score_pieces(0, 1, [&](int m, int n) {  // dS = P (dP - delta) as elements to smem.ds
        float ds[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[e] = s.d[m][n][e] * (dp.d[m][n][e] - delta.value[m][e / 2]);
        st_shared(ds_at + 16 * m * smem.ds.row_bytes + 16 * n, pack(ds[0], ds[1]));
        st_shared(ds_at + (16 * m + 8) * smem.ds.row_bytes + 16 * n, pack(ds[2], ds[3]));
      });
    }
    if (threadIdx.x == TURN_WAITER && !granted)
      turnstile_wait(semaphore, Turn{kv.batch * params.n_q_head + q_head, kv.tile, step.q_tile,
                                     step.ticket}, params.report);
    __syncthreads();  // [written]

    float4* accum = reinterpret_cast<float4*>(params.dq_accum) +
                    tile_index * (Q_TILE * HEAD_PAD / 4) + threadIdx.x;
    DqGrid::Acc before;
    if (step.ticket > 0) {
#pragma unroll
      for (int m = 0; m < DqGrid::m_tiles; ++m)
#pragma unroll
        for (int n = 0; n < DqGrid::n_tiles; ++n) {
          const float4 four = ld_cg(accum + (m * DqGrid::n_tiles + n) * N_THREAD);
          before.d[m][n][0] = four.x, before.d[m][n][1] = four.y;
          before.d[m][n][2] = four.z, before.d[m][n][3] = four.w;
        }
    } else {
      before.clear();
    }
    gemm<Stored::K_ROWS, Stored::K_ROWS, Q_TILE, 1>(dv, smem.p, KvGrid::row0(warp), dout,
                                                 KvGrid::column0(warp), lane);
    DqGrid::Acc dq;
    dq.clear();
    gemm<Stored::MN_ROWS, Stored::K_ROWS, KV_TILE, 1>(dq, smem.ds, DqGrid::row0(warp), smem.k,
                                                   DqGrid::column0(warp), lane);
#pragma unroll
    for (int m = 0; m < DqGrid::m_tiles; ++m)
#pragma unroll
      for (int n = 0; n < DqGrid::n_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) dq.d[m][n][e] += before.d[m][n][e];
    if (step.is_last) {
      open_turn = nullptr;
      Element* to = params.dq + kv.batch * params.dq_strides.batch + q_head * params.dq_strides.head;
      store_result<DqGrid>(dq, to, params.dq_strides.row, step.q_tile * Q_TILE, params.q_len,
                           params.scale, warp, lane);
    } else {
      open_turn = semaphore;
#pragma unroll
      for (int m = 0; m < DqGrid::m_tiles; ++m)
#pragma unroll
        for (int n = 0; n < DqGrid::n_tiles; ++n)
          st_cg(accum + (m * DqGrid::n_tiles + n) * N_THREAD,
                make_float4(dq.d[m][n][0], dq.d[m][n][1], dq.d[m][n][2], dq.d[m][n][3]));
    }

    if (DC_DO_STAGES == 1) {
      __syncthreads();  // [dout]
      if (more) load_dout(smem, params, mask, kv, next_head, next.q_tile, t + 1);
      cp_async_commit();
    }
    gemm<Stored::K_ROWS, Stored::K_ROWS, Q_TILE, 1>(dk, smem.ds, KvGrid::row0(warp), q,
                                                 KvGrid::column0(warp), lane);
    if (DC_Q_STAGES == 1) {
      __syncthreads();  // [q]
      if (more) load_q(smem, params, mask, kv, next_head, next.q_tile, t + 1);
      cp_async_commit();
    }
  }
  __syncthreads();
  if (open_turn != nullptr && threadIdx.x == TURN_RELEASER) turnstile_release(open_turn);

  Element* dk_head = params.dk + kv.batch * params.dk_strides.batch +
                     kv.kv_head * params.dk_strides.head;
  Element* dv_head = params.dv + kv.batch * params.dv_strides.batch +
                     kv.kv_head * params.dv_strides.head;
  store_result<KvGrid>(dk, dk_head, params.dk_strides.row, kv.row0, params.kv_len, params.scale,
                       warp, lane);
  store_result<KvGrid>(dv, dv_head, params.dv_strides.row, kv.row0, params.kv_len, 1.f, warp, lane);
}

extern "C" __global__ void __launch_bounds__(N_THREAD, 1)
    bwd_sm80(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(16) u8 smem_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_bytes);
  // A warp-uniform value, known as such to the compiler.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP_SIZE, 0);
  const int lane = threadIdx.x % WARP_SIZE;
  const schedule::Shape shape = schedule::make_shape(params.q_len, params.kv_len, params.mask_offset);
  const Mask mask{params.q_len, params.kv_len, params.mask_offset};
  const int n_head = params.batch * params.n_kv_head;
  const int total_work = n_head * schedule::num_work(shape);

  for (;;) {
    if (threadIdx.x == 0) smem.work = int(atomicAdd(params.work_counter, 1u));
    __syncthreads();
    if (smem.work >= total_work) return;
    const schedule::HeadWork place = 
        schedule::decode(shape, n_head, params.head_group, smem.work);
    const int n_part = schedule::work_size(shape, place.work);
    for (int part = 0; part < n_part; ++part) {
      KvTile kv;
      kv.batch = place.head / params.n_kv_head;
      kv.kv_head = place.head % params.n_kv_head;
      kv.tile = schedule::kv_tile(shape, place.work, part);
      kv.row0 = kv.tile * KV_TILE;
      kv.row_end = params.q_len > 0 ? mask.key_end(params.q_len - 1) : 0;
      visit_kv_tile(smem, params, shape, kv, warp, lane);
    }
    __syncthreads();  // nobody reads smem.work any more
  }
}
