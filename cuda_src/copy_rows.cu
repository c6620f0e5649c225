// Copies the rows of a [batch, len, heads, DC_HEAD_DIM] array whose address or strides the copy
// engine cannot take to one that it can, or back. One warp a row, one element at a time: speed is
// not the aim, the same bits as for aligned arrays are.
#include "params.cuh"

constexpr int N_WARP = DC_WARPS;

extern "C" __global__ void __launch_bounds__(N_WARP * WARP_SIZE)
    copy_rows(const __grid_constant__ CopyParams params) {
  const i64 index = i64(blockIdx.x) * N_WARP + threadIdx.x / WARP_SIZE;
  const i64 n_row = i64(params.batch) * params.len * params.n_head;
  if (index >= n_row) return;
  const i64 head = index % params.n_head, row = index / params.n_head % params.len;
  const i64 batch = index / params.n_head / params.len;
  const Strides &from = params.from_strides, &to = params.to_strides;
  const Element* source = params.from + batch * from.batch + row * from.row + head * from.head;
  Element* target = params.to + batch * to.batch + row * to.row + head * to.head;
#pragma unroll
  for (int i = threadIdx.x % WARP_SIZE; i < DC_HEAD_DIM; i += WARP_SIZE) target[i] = source[i];
}
