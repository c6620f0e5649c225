// The Hopper backwards with q rows as rows of S: masks, and dq from the registers of softmax warps.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/mask.cuh"

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

// Adds 64 columns of a part of dq, or stores them if it is the first. The turn has come: what
// others added happened before the turn warp saw their release, and so before this.
DC_FN void send_dq(const float (&dq)[32], float4* to, bool is_first) {
  if (is_first) {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      st_cg(to + j * WARPGROUP_SIZE,
            make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]));
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      red_add_v4(to + j * WARPGROUP_SIZE, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
  }
}
