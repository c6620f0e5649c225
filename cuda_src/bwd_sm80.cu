// The backward on every GPU from sm_80 on: dq, dk, dv of one pass, dq summed in ticket order.
//
//   S = q k^T * scale     P = exp2(S - lse)     dP = dout v^T     dS = P (dP - delta)
//   dv = P^T dout         dk = dS^T q * scale   dq = dS k * scale
//
// A CTA takes pieces of work from a counter: one or two kv tiles of a kv head. k and v of the tile
// stay in shared memory, dk and dv in registers, while it visits the q tiles of all q heads of the
// group, at each step of the schedule one of each; dq goes to its turn in dq_accum
// (tile/turnstile.cuh).
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
// dP in passes of at most 32 columns a warp: S and all of dP do not fit in registers otherwise.
constexpr int PASS_TILES = min_int(ScoreGrid::n_tiles, 4), N_PASS = ScoreGrid::n_tiles / PASS_TILES;
constexpr int TURN_WAITER = 0, TURN_RELEASER = WARP_SIZE;

DC_FN const Element* head_of(const Element* p, const Strides& strides, int batch, int head) {
  return p + batch * strides.batch + head * strides.head;
}

DC_FN void load_q(SharedStorage& smem, const BackwardParams& params, const Mask& mask, int t) {
  const Step step = smem.steps[t % STEP_RING];
  load_tile<N_THREAD>(smem.q[t % DC_Q_STAGES], params.q + step.q_at, params.q_strides.row,
                      mask.first_row() - step.row0, params.q_len - step.row0);
}

DC_FN void load_dout(SharedStorage& smem, const BackwardParams& params, const Mask& mask, int t) {
  const Step step = smem.steps[t % STEP_RING];
  load_tile<N_THREAD>(smem.dout[t % DC_DO_STAGES], params.dout + step.dout_at,
                      params.dout_strides.row, mask.first_row() - step.row0,
                      params.q_len - step.row0);
}

DC_FN void load_row_values(SharedStorage& smem, const BackwardParams& params, int t) {
  constexpr int n_copy = Q_TILE / 4;
  const int i = threadIdx.x % n_copy;
  const i64 at = i64(smem.steps[t % STEP_RING].tile) * Q_TILE + 4 * i;
  if (threadIdx.x < n_copy)
    cp_async_16(smem_address(&smem.lse_log2[t % 2][4 * i]), params.lse_log2 + at, true);
  else if (threadIdx.x < 2 * n_copy)
    cp_async_16(smem_address(&smem.delta[t % 2][4 * i]), params.delta + at, true);
}

// Scores of hidden keys to -inf: selected away before exp2, for a hidden key may score anything and
// exp2 of it overflow.
DC_FN void hide_keys(ScoreGrid::Acc& s, const Mask& mask, int q_row0, int key0, int warp,
                     int lane) {
#pragma unroll
  for (int m = 0; m < ScoreGrid::m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = q_row0 + ScoreGrid::row0(warp) + 16 * m + 8 * half + lane / 4;
      const int column_end = mask.key_end(row) - key0 - ScoreGrid::column0(warp) - 2 * (lane % 4);
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

// Calls body(m, n) for the 16 x 8 pieces of one pass that belong to step `step` of `n_step`.
template <class Body>
DC_FN void score_pieces(int step, int n_step, const Body& body) {
  constexpr int n_piece = ScoreGrid::m_tiles * PASS_TILES;
#pragma unroll
  for (int i = 0; i < n_piece; ++i)
    if (i * n_step / n_piece == step) body(i / PASS_TILES, i % PASS_TILES);
}

// Writes scale * acc to rows [row0, row_end) of gmem; rows of the tile start at row0. Rows before
// first_row saw nothing: 0, whatever the other rows of their tile left in acc (0 * NaN).
template <class Grid>
DC_FN void store_result(const typename Grid::Acc& acc, Element* gmem, i64 row_stride, int row0,
                        int row_end, int first_row, float scale, int warp, int lane) {
#pragma unroll
  for (int m = 0; m < Grid::m_tiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + Grid::row0(warp) + 16 * m + 8 * half + lane / 4;
      if (row >= row_end) continue;
#pragma unroll
      for (int n = 0; n < Grid::n_tiles; ++n) {
        const int column = Grid::column0(warp) + 8 * n + 2 * (lane % 4);
        const u32 pair = pack(acc.d[m][n][2 * half] * scale, acc.d[m][n][2 * half + 1] * scale);
        if (column < DC_HEAD_DIM)
          store_pair(gmem + row * row_stride + column, row < first_row ? 0u : pair);
      }
    }
}

DC_FN void visit_kv_tile(SharedStorage& smem, const BackwardParams& params, int warp, int lane) {
  const Mask mask{params.q_len, params.kv_len, params.mask_offset};
  const KvTile& kv = smem.kv;
  const int total = kv.total, key0 = kv.row0;
  const auto semaphore_of = [&](int t) {
    return params.dq_semaphore + i64(smem.steps[t % STEP_RING].tile) * DC_SEMAPHORE_STRIDE;
  };
  KvGrid::Acc dk, dv;
  dk.clear();
  dv.clear();
  bool turn_is_open = false;  // the next barrier lets us end the turn of the step before

  if (total > 0) {
    fill_steps(smem, params, 0, STEP_RING);
    load_tile<N_THREAD>(smem.k, head_of(params.k, params.k_strides, kv.batch, kv.kv_head) +
                                    kv.row0 * params.k_strides.row,
                        params.k_strides.row, 0, kv.row_end - kv.row0);
    load_tile<N_THREAD>(smem.v, head_of(params.v, params.v_strides, kv.batch, kv.kv_head) +
                                    kv.row0 * params.v_strides.row,
                        params.v_strides.row, 0, kv.row_end - kv.row0);
    __syncthreads();
    load_q(smem, params, mask, 0);
    load_dout(smem, params, mask, 0);
    load_row_values(smem, params, 0);
    cp_async_commit();
  }

#pragma unroll 1
  for (int t = 0; t < total; ++t) {
    cp_async_wait<0>();
    __syncthreads();  // [ready]
    if (turn_is_open && threadIdx.x == TURN_RELEASER) turnstile_release(semaphore_of(t - 1));
    if (t % (STEP_RING / 2) == 1 && t > 1)  // over all entries before t - 1, which is still read
      fill_steps(smem, params, t - 1 + STEP_RING / 2, STEP_RING / 2);

    bool granted = smem.steps[t % STEP_RING].ticket == 0;
    // Between the steps of S, so that address arithmetic runs beside the product.
    const auto start_next = [&](int k) {
      const bool more = t + 1 < total;
      if (k == 0 && threadIdx.x == TURN_WAITER && !granted)
        granted = turnstile_ready(semaphore_of(t), smem.steps[t % STEP_RING].ticket);
      if (k == 0 && more && DC_Q_STAGES == 2) load_q(smem, params, mask, t + 1);
      if (k == 1 && more) {
        if (DC_DO_STAGES == 2) load_dout(smem, params, mask, t + 1);
        load_row_values(smem, params, t + 1);
      }
      if (k == 1) cp_async_commit();
    };

    const auto& q = smem.q[t % DC_Q_STAGES];
    const auto& dout = smem.dout[t % DC_DO_STAGES];
    {
      ScoreGrid::Acc s;
      Accumulator<ScoreGrid::m_tiles, PASS_TILES> dp[N_PASS];
      s.clear();
      gemm<Stored::MN_ROWS, Stored::MN_ROWS, HEAD_PAD, 2>(
          s, q, ScoreGrid::row0(warp), smem.k, ScoreGrid::column0(warp), lane, start_next);
      const int q_row0 = smem.steps[t % STEP_RING].row0;
      if (mask.cuts(q_row0, key0, KV_TILE)) hide_keys(s, mask, q_row0, key0, warp, lane);

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
      const RowValues delta(smem.delta[t % 2], warp, lane);
      const auto score_gradient = [&](int pass, int m, int n) {  // dS = P (dP - delta) to smem.ds
        const float(&p)[4] = s.d[m][pass * PASS_TILES + n];
        float ds[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) ds[e] = p[e] * (dp[pass].d[m][n][e] - delta.value[m][e / 2]);
        const u32 to = ds_at + 16 * m * smem.ds.row_bytes + 16 * (pass * PASS_TILES + n);
        st_shared(to, pack(ds[0], ds[1]));
        st_shared(to + 8 * smem.ds.row_bytes, pack(ds[2], ds[3]));
      };
      // Arithmetic goes to other pipes than a product: pieces of it between the steps of dP, exp2
      // of this pass and dS of the one before.
      constexpr int n_k = HEAD_PAD / 16;
#pragma unroll
      for (int pass = 0; pass < N_PASS; ++pass) {
        dp[pass].clear();
        gemm<Stored::MN_ROWS, Stored::MN_ROWS, HEAD_PAD, 2>(
            dp[pass], dout, ScoreGrid::row0(warp), smem.v,
            ScoreGrid::column0(warp) + 8 * PASS_TILES * pass, lane, [&](int k) {
              score_pieces(k, n_k, [&](int m, int n) { softmax(m, pass * PASS_TILES + n); });
              if (pass > 0)
                score_pieces(k, n_k, [&](int m, int n) { score_gradient(pass - 1, m, n); });
            });
      }
      score_pieces(0, 1, [&](int m, int n) { score_gradient(N_PASS - 1, m, n); });
    }
    if (threadIdx.x == TURN_WAITER && !granted) {
      const Step step = smem.steps[t % STEP_RING];
      turnstile_wait(
          semaphore_of(t), step.ticket,
          [&]() { return Visit{step.tile, kv.tile, step.row0 / Q_TILE}; }, params.report);
    }
    __syncthreads();  // [written]

    const Step step = smem.steps[t % STEP_RING];
    float4* accum = reinterpret_cast<float4*>(params.dq_accum) +
                    i64(step.tile) * (Q_TILE * HEAD_PAD / 4) + threadIdx.x;
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
    turn_is_open = !step.is_last;
    if (step.is_last) {
      const int q_head = step.tile / ceil_div(params.q_len, Q_TILE) % params.n_q_head;
      Element* to =
          params.dq + kv.batch * params.dq_strides.batch + q_head * params.dq_strides.head;
      store_result<DqGrid>(dq, to, params.dq_strides.row, step.row0, params.q_len,
                           mask.first_row(), params.scale, warp, lane);
    } else {
#pragma unroll
      for (int m = 0; m < DqGrid::m_tiles; ++m)
#pragma unroll
        for (int n = 0; n < DqGrid::n_tiles; ++n)
          st_cg(accum + (m * DqGrid::n_tiles + n) * N_THREAD,
                make_float4(dq.d[m][n][0], dq.d[m][n][1], dq.d[m][n][2], dq.d[m][n][3]));
    }

    if (DC_DO_STAGES == 1) {
      __syncthreads();  // [dout]
      if (t + 1 < total) load_dout(smem, params, mask, t + 1);
      cp_async_commit();
    }
    gemm<Stored::K_ROWS, Stored::K_ROWS, Q_TILE, 1>(dk, smem.ds, KvGrid::row0(warp), q,
                                                    KvGrid::column0(warp), lane);
    if (DC_Q_STAGES == 1) {
      __syncthreads();  // [q]
      if (t + 1 < total) load_q(smem, params, mask, t + 1);
      cp_async_commit();
    }
  }
  __syncthreads();
  if (turn_is_open && threadIdx.x == TURN_RELEASER) turnstile_release(semaphore_of(total - 1));

  Element* dk_head = params.dk + kv.batch * params.dk_strides.batch +
                     kv.kv_head * params.dk_strides.head;
  Element* dv_head = params.dv + kv.batch * params.dv_strides.batch +
                     kv.kv_head * params.dv_strides.head;
  store_result<KvGrid>(dk, dk_head, params.dk_strides.row, kv.row0, params.kv_len, 0, params.scale,
                       warp, lane);
  store_result<KvGrid>(dv, dv_head, params.dv_strides.row, kv.row0, params.kv_len, 0, 1.f, warp,
                       lane);
}

extern "C" __global__ void __launch_bounds__(N_THREAD, 1)
    bwd_sm80(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(16) u8 smem_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_bytes);
  // A warp-uniform value, known as such to the compiler.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / WARP_SIZE, 0);
  const int lane = threadIdx.x % WARP_SIZE;
  const schedule::Shape shape =
      schedule::make_shape(params.q_len, params.kv_len, params.mask_offset);
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
      if (threadIdx.x == 0) {
        KvTile& kv = smem.kv;
        kv.batch = place.head / params.n_kv_head;
        kv.kv_head = place.head % params.n_kv_head;
        kv.tile = schedule::kv_tile(shape, place.work, part);
        kv.row0 = kv.tile * KV_TILE;
        kv.row_end = params.q_len > 0 ? mask.key_end(params.q_len - 1) : 0;
        kv.q_per_kv = params.n_q_head / params.n_kv_head;
        kv.total = kv.q_per_kv * schedule::num_steps(shape, kv.tile);
      }
      __syncthreads();
      visit_kv_tile(smem, params, warp, lane);
      __syncthreads();  // nobody reads smem.kv or smem.work any more
    }
  }
}
