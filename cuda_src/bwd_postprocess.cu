// After the Hopper backwards: dq = scale * dq_accum, rounded to elements. One CTA per q tile of a
// q head; one that no kv tile contributes to has its zeros from bwd_preprocess.
//
// It may start while the last works of the backward are under way, on SMs that have none left: each
// CTA waits until its sum is complete. Nothing can hang: when it starts, all CTAs of the backward
// have (let_next_kernel_start), and those wait for nobody here. It ends after the backward.
//
// Rows that see no key are 0, whatever keys that other rows of their tile see left in dq_accum
// (0 * NaN).
//
// dq_accum of a q tile lies as the accumulators of a warpgroup do: float4 number j * 128 + t is
// columns 8 j + 2 (t % 4) + {0, 1} of row 16 (t / 32) + t % 32 / 4 and, in its second half, of that
// row + 8. So a tile goes through shared memory to become whole rows.
#include "params.cuh"
#include "ptx/dependent_launch.cuh"
#include "schedules/shape.cuh"
#include "tile/mask.cuh"
#include "tile/smem_tile.cuh"
#include "tile/turnstile.cuh"

constexpr int N_THREAD = 256;
constexpr int Q_TILE = DC_Q_TILE, HEAD_DIM_PAD = DC_HEAD_DIM_PAD;
static_assert(Q_TILE == 64 && HEAD_DIM_PAD % 32 == 0, "the accumulators of a warpgroup");
static_assert(DC_PARAMS_BYTES == sizeof(BackwardParams), "params.py packs another struct");

extern "C" __global__ void __launch_bounds__(N_THREAD)
    bwd_postprocess(const __grid_constant__ BackwardParams params) {
  __shared__ __align__(16) SmemTile<Q_TILE, HEAD_DIM_PAD> tile;
  const schedule::Shape shape =
      schedule::make_shape(params.q_len, params.kv_len, params.mask_offset);
  const int q_tile = blockIdx.x % shape.n_q, sequence = blockIdx.x / shape.n_q;
  const int n_part = schedule::num_kv_tiles(shape, q_tile);
  if (n_part == 0) {
    wait_for_kernels_before();
    return;
  }
  if (DC_DEBUG) wait_for_kernels_before();  // bounded waits are for turns, not for a whole backward
  if (threadIdx.x < DC_CLUSTER)
    turnstile_wait(
        params.dq_semaphore + i64(blockIdx.x) * DC_SEMAPHORE_STRIDE + threadIdx.x, u32(n_part),
        [&]() { return Visit{int(blockIdx.x), -1, q_tile}; }, params.report);
  __syncthreads();

  const int t = threadIdx.x % 128, row = 16 * (t / 32) + t % 32 / 4;
  const int first_row =
      Mask{params.q_len, params.kv_len, params.mask_offset}.first_row() - q_tile * Q_TILE;
  const float4* sum = reinterpret_cast<const float4*>(params.dq_accum) +
                      i64(blockIdx.x) * (Q_TILE * HEAD_DIM_PAD / 4) + t;
  for (int half = threadIdx.x / 128; half < HEAD_DIM_PAD / 32; half += N_THREAD / 128)
#pragma unroll
    for (int j = 4 * half; j < 4 * half + 4; ++j) {
      const float4 four = ld_cg(sum + j * 128);
      const u32 pair = pack(four.x * params.scale, four.y * params.scale);
      const u32 pair_8 = pack(four.z * params.scale, four.w * params.scale);
      const int column = 8 * j + 2 * (t % 4);
      st_shared(tile.address(row, column), row < first_row ? 0u : pair);
      st_shared(tile.address(row + 8, column), row + 8 < first_row ? 0u : pair_8);
    }
  __syncthreads();
  Element* dq = params.dq + sequence / params.n_q_head * params.dq_strides.batch +
                sequence % params.n_q_head * params.dq_strides.head;
  const int n_row = min_int(Q_TILE, params.q_len - q_tile * Q_TILE);
  for (int i = threadIdx.x; i < n_row * (DC_HEAD_DIM / 8); i += N_THREAD) {
    const int from_row = i / (DC_HEAD_DIM / 8), chunk = i % (DC_HEAD_DIM / 8) * 8;
    store_chunk(dq + i64(q_tile * Q_TILE + from_row) * params.dq_strides.row + chunk, tile,
                from_row, chunk);
  }
  wait_for_kernels_before();  // what follows in the stream needs dk and dv, too
}
