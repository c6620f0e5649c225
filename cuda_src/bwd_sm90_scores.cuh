// The Hopper backwards with q rows as rows of S: masks, P and dS, and dq from registers to its sum.
//
// Included behind a layout: SharedStorage with `steps_left`.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/mask.cuh"

// For the planner: here the softmax warps ask.
DC_FN void note_left(SharedStorage& smem, int n, int left) { smem.steps_left[n] = left; }

// Scores of keys that this lane's rows do not see: selected away before exp2, for they may be
// anything. `row` is its first row, the second is row + 8; `key` the key of its first column.
template <int N>
DC_FN void hide_unseen(float (&s)[N], const Mask& mask, int row, int key) {
  const int end = mask.key_end(row) - key, end_8 = mask.key_end(row + 8) - key;
#pragma unroll
  for (int j = 0; j < N / 4; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (8 * j + e % 2 >= (e < 2 ? end : end_8)) s[4 * j + e] = -infinity();
}

// The same for a step, if its batch says so, and all of it by one warpgroup; who asks is read anew,
// for registers are short.
template <int N>
DC_FN void hide_unseen_of(float (&s)[N], const BackwardParams& params, const Batch& batch,
                          const Step& step) {
  if (!warp_uniform(batch.masked != 0)) return;
  const int thread = thread_index() % WARPGROUP_SIZE;
  hide_unseen(s, Mask{params.q_len, params.kv_len, params.mask_offset},
              step.q_tile * DC_Q_TILE + 16 * (thread / WARP_SIZE) + thread % WARP_SIZE / 4,
              batch.row0 + 2 * (thread % 4));
}

// P of 16 keys, number k of the tile, in place of S; packed as an operand, too. Values of this
// lane's first row and of row + 8.
template <int N>
DC_FN void take_exponentials(u32 (&p)[4], float (&s)[N], int k, float scale_log2, float lse_log2,
                             float lse_log2_8) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float* x = s + 8 * k + 4 * j;
    x[0] = exp2_approx(fmaf(x[0], scale_log2, -lse_log2));
    x[1] = exp2_approx(fmaf(x[1], scale_log2, -lse_log2));
    x[2] = exp2_approx(fmaf(x[2], scale_log2, -lse_log2_8));
    x[3] = exp2_approx(fmaf(x[3], scale_log2, -lse_log2_8));
    p[2 * j] = pack(x[0], x[1]);
    p[2 * j + 1] = pack(x[2], x[3]);
  }
}

// P of all keys in place of S, and to a tile with keys as rows, for products: `at` is this lane's
// transposed_fragment there.
template <int N>
DC_FN void store_exponentials(float (&s)[N], u32 at, float scale_log2, float lse_log2,
                              float lse_log2_8) {
#pragma unroll
  for (int k = 0; k < N / 8; ++k) {
    u32 p[4];
    take_exponentials(p, s, k, scale_log2, lse_log2, lse_log2_8);
    stmatrix_x4_trans(at + 16 * k * PANEL_ROW_BYTES, p[0], p[1], p[2], p[3]);
  }
  fence_async_smem();
}

// dS of 16 keys, number k, from P and dP.
template <int N>
DC_FN void multiply_scores(u32 (&ds)[N / 2], const float (&p)[N], const float (&dp)[N], int k,
                           float delta, float delta_8) {
#pragma unroll
  for (int j = 2 * k; j < 2 * k + 2; ++j) {
    ds[2 * j] = pack(p[4 * j] * (dp[4 * j] - delta), p[4 * j + 1] * (dp[4 * j + 1] - delta));
    ds[2 * j + 1] = pack(p[4 * j + 2] * (dp[4 * j + 2] - delta_8),
                         p[4 * j + 3] * (dp[4 * j + 3] - delta_8));
  }
}

// What is to be done with a part of dq: it is stored if it is the first of its q tile. With
// DC_UNORDERED none is; a comparison all the same, as ptxas runs out of registers without it.
enum class Send { NOTHING, STORE, ADD };
DC_FN Send how_to_send(const Step& step) {
  return step.ticket == (DC_UNORDERED ? ~0u : 0u) ? Send::STORE : Send::ADD;
}

// Sends 8 N columns of a part of dq, from 8 j on, to where bwd_postprocess.cu reads them. The turn
// has come: what others added happened before the turn warp saw their release, and so before this.
template <int N, int M>
DC_FN void send_dq(const float (&dq)[M], int j, float4* to, Send send) {
  if (send == Send::ADD) {
#pragma unroll
    for (int i = 4 * j; i < 4 * (j + N); i += 4)
      red_add_v4(to + i / 4 * WARPGROUP_SIZE, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
  } else if (send == Send::STORE) {
#pragma unroll
    for (int i = 4 * j; i < 4 * (j + N); i += 4)
      st_cg(to + i / 4 * WARPGROUP_SIZE, make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]));
  }
}
