// Before the backward proper: what each row needs (lse in base 2, and delta), and semaphores and
// work counter at zero. One CTA per q tile of a q head.
//
//   rows that exist and see a key:   lse_log2 = lse * log2(e), delta = sum(out * dout) - dlse
//   all other rows of the tile:      lse_log2 = +inf (P = exp2(s - inf) is exactly 0), delta = 0
//
// dlse, the gradient with respect to lse, needs nothing else anywhere: d lse / d s = P, so that
// dS = P (dP - sum(out * dout)) + P dlse = P (dP - delta). Where lse is -inf, dlse may be anything.
//
// With DC_ROW_VALUES (bwd_sm90) both go to params.lse_log2 instead, in the form of
// tile/row_values.cuh.
//
// With DC_UNORDERED dq_accum is set to zero.
//
// A q tile that no kv tile contributes to has nobody to write its dq: zeros are written here.
//
// Threads: 256, LANES lanes a row; the sum of a row is a fixed tree over 8 elements a lane and then
// over the lanes, so delta depends on the row alone. Shared memory: none.
#include "params.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/math.cuh"
#include "schedules/shape.cuh"
#include "tile/mask.cuh"
#include "tile/row_values.cuh"
#include "tile/smem_tile.cuh"

constexpr int N_THREAD = 256;
constexpr int LANES = DC_HEAD_DIM_PAD <= 32    ? 4
                      : DC_HEAD_DIM_PAD <= 64  ? 8
                      : DC_HEAD_DIM_PAD <= 128 ? 16
                                               : 32;
constexpr int ROWS_PER_PASS = N_THREAD / LANES;
static_assert(DC_PARAMS_BYTES == sizeof(BackwardParams), "params.py packs another struct");
static_assert(DC_HEAD_DIM % 8 == 0 && DC_HEAD_DIM <= LANES * 8, "8 elements a lane");
static_assert(DC_Q_TILE % ROWS_PER_PASS == 0, "whole passes");

extern "C" __global__ void __launch_bounds__(N_THREAD)
    bwd_preprocess(const __grid_constant__ BackwardParams params) {
  let_next_kernel_start();
  const int n_q = ceil_div(params.q_len, DC_Q_TILE);
  const int q_tile = blockIdx.x % n_q;
  const int sequence = blockIdx.x / n_q;  // batch * n_q_head + q_head
  const int batch = sequence / params.n_q_head, q_head = sequence % params.n_q_head;
  const Mask mask{params.q_len, params.kv_len, params.mask_offset};
  const i64 tile_index = blockIdx.x;

  if (threadIdx.x < DC_SEMAPHORE_STRIDE)
    params.dq_semaphore[tile_index * DC_SEMAPHORE_STRIDE + threadIdx.x] = 0;
  if (threadIdx.x == 0 && blockIdx.x == 0) *params.work_counter = 0;

#if DC_UNORDERED  // otherwise the first part is stored
  float4* sum = reinterpret_cast<float4*>(params.dq_accum) +
                tile_index * (DC_Q_TILE * DC_HEAD_DIM_PAD / 4);
  for (int i = threadIdx.x; i < DC_Q_TILE * DC_HEAD_DIM_PAD / 4; i += N_THREAD)
    sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
#endif

  const Element* out = params.out + batch * params.out_strides.batch +
                       q_head * params.out_strides.head;
  const Element* dout = params.dout + batch * params.dout_strides.batch +
                        q_head * params.dout_strides.head;
  const float* lse = params.lse + batch * params.lse_batch + q_head * params.lse_head;
  const bool has_dlse = params.dlse != nullptr;
  const float* dlse = params.dlse + batch * params.dlse_batch + q_head * params.dlse_head;
  const int lane = threadIdx.x % LANES, column = lane * 8;
#pragma unroll
  for (int pass = 0; pass < DC_Q_TILE / ROWS_PER_PASS; ++pass) {
    const int tile_row = pass * ROWS_PER_PASS + threadIdx.x / LANES;
    const int row = q_tile * DC_Q_TILE + tile_row;
    const bool sees_a_key = row >= mask.first_row() && row < params.q_len;
    float sum = 0.f;
    if (sees_a_key && column < DC_HEAD_DIM) {
      u32 o[4], d[4];
      load_8(o, out + row * params.out_strides.row + column);
      load_8(d, dout + row * params.dout_strides.row + column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum = fmaf(unpack_lo(o[i]), unpack_lo(d[i]), sum);
        sum = fmaf(unpack_hi(o[i]), unpack_hi(d[i]), sum);
      }
    }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) {
      const float row_lse = sees_a_key ? lse[row] : -infinity();
      const float row_dlse = has_dlse && sees_a_key ? dlse[row] : 0.f;
      if (has_dlse && row_lse != -infinity()) sum -= row_dlse;
      const i64 at = tile_index * DC_Q_TILE + tile_row;
#if DC_ROW_VALUES
      reinterpret_cast<uint4*>(params.lse_log2)[at] =
          row_lse == -infinity() ? hidden_row_values()
                                 : pack_row_values(-(row_lse / params.scale), -sum);
#else
      params.lse_log2[at] = row_lse == -infinity() ? infinity() : row_lse * LOG2_E;
      params.delta[at] = sum;
#endif
    }
  }

  const schedule::Shape shape =
      schedule::make_shape(params.q_len, params.kv_len, params.mask_offset);
  if (schedule::num_kv_tiles(shape, q_tile) > 0) return;
  Element* dq = params.dq + batch * params.dq_strides.batch + q_head * params.dq_strides.head;
  const int n_row = min_int(DC_Q_TILE, params.q_len - q_tile * DC_Q_TILE);
  for (int i = threadIdx.x; i < n_row * DC_HEAD_DIM; i += N_THREAD)
    dq[i64(q_tile * DC_Q_TILE + i / DC_HEAD_DIM) * params.dq_strides.row + i % DC_HEAD_DIM] = 0;
}
