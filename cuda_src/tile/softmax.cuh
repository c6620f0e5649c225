// Online softmax over the kv tiles of a warp's rows.
//   P = 2^(S scale_log2 - reference),  O = sum of P V,  sum = sum of P,  out = O / sum
// holds for any reference of a row as long as O and sum are rescaled when it moves. It moves only
// when the row's largest score stands more than 8 (in log2) above it: P stays <= 256 (float16 ends
// at 65504), sum >= 1, and after the first tiles hardly a row pays for a rescale. The decision is a
// row's own, and a warp skips only multiplications by exactly 1, so that bits depend on the row's
// scores alone.
#pragma once
#include "ptx/math.cuh"
#include "tile/gemm.cuh"
#include "tile/mask.cuh"

constexpr float MAX_LOG2_P = 8.f;

// Rows l / 4 and l / 4 + 8 of each 16-row piece belong to lane l and the three others of its quad;
// [m][half] below means row 16 m + 8 half + l / 4.
template <int M_TILES>
struct OnlineSoftmax {
  float reference[M_TILES][2];  // in log2 units; -inf until the row sees a key
  float sum[M_TILES][2];        // this lane's columns only, until finish()

  DC_FN OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -infinity();
        sum[m][half] = 0.f;
      }
  }

  // Moves the references to this tile's row maxima where needed, and rescales sum and o with them.
  template <int S_TILES, int O_TILES>
  DC_FN void raise(const Accumulator<M_TILES, S_TILES>& s, Accumulator<M_TILES, O_TILES>& o,
                   float scale_log2) {
    float factor[M_TILES][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = fmaxf(s.d[m][0][2 * half], s.d[m][0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < S_TILES; ++n)
          top = fmaxf(top, fmaxf(s.d[m][n][2 * half], s.d[m][n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * scale_log2;
        float& now = reference[m][half];
        const bool moves = top - now > MAX_LOG2_P;  // -inf from -inf: NaN, false
        factor[m][half] = moves ? exp2_approx(now - top) : 1.f;
        now = moves ? top : now;
        moved |= moves;
      }
    if (!__any_sync(0xffffffffu, moved)) return;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      sum[m][0] *= factor[m][0];
      sum[m][1] *= factor[m][1];
#pragma unroll
      for (int n = 0; n < O_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o.d[m][n][e] *= factor[m][e / 2];
    }
  }

  // P of keys 16 step .. 16 step + 15 as the A operand of P V: the accumulators of two neighbouring
  // 8-column pieces of S lie in the lanes as a 16-column A piece does.
  template <int S_TILES>
  DC_FN void probabilities(u32 (&p)[M_TILES][4], const Accumulator<M_TILES, S_TILES>& s, int step,
                           float scale_log2) {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int piece = 0; piece < 2; ++piece)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* score = &s.d[m][2 * step + piece][2 * half];
          // A row without a key so far has -inf scores only: any finite reference gives P = 0.
          const float minus = reference[m][half] == -infinity() ? 0.f : -reference[m][half];
          const float p0 = exp2_approx(fmaf(score[0], scale_log2, minus));
          const float p1 = exp2_approx(fmaf(score[1], scale_log2, minus));
          sum[m][half] += p0 + p1;
          p[m][2 * piece + half] = pack(p0, p1);
        }
  }

  // The rows' whole sums.
  DC_FN void finish() {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[m][half] += __shfl_xor_sync(0xffffffffu, sum[m][half], 1);
        sum[m][half] += __shfl_xor_sync(0xffffffffu, sum[m][half], 2);
      }
  }

  // Natural log of the row's sum of e^(scale score); -inf for a row that saw no key.
  DC_FN float lse(int m, int half) const {
    return (reference[m][half] + log2_approx(sum[m][half])) * LN_2;
  }
};

// Scores that a row does not see become -inf before anything looks at them. `row` and `key` are
// those of this lane's first score.
template <int M_TILES, int S_TILES>
DC_FN void mask_scores(Accumulator<M_TILES, S_TILES>& s, const Mask& mask, int row, int key) {
#pragma unroll
  for (int m = 0; m < M_TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n_seen = mask.key_end(row + 16 * m + 8 * half) - key;
#pragma unroll
      for (int n = 0; n < S_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * n + e >= n_seen) s.d[m][n][2 * half + e] = -infinity();
    }
}
