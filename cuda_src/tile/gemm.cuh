// A warp's part of a tile product from shared memory, by ldmatrix and mma.sync.
#pragma once
#include "ptx/matrix.cuh"
#include "tile/smem_tile.cuh"

// Accumulators of one warp: M_TILES x N_TILES pieces of 16 x 8; see mma_m16n8k16 for the lanes.
template <int M_TILES, int N_TILES>
struct Accumulator {
  float d[M_TILES][N_TILES][4];

  DC_FN void clear() {
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) d[m][n][e] = 0.f;
  }
};

enum class Stored { MN_ROWS, K_ROWS };  // one row of the tile = one m or n, or one k

// 16 (m) x 16 (k) piece as an A operand.
template <Stored STORED, class Tile>
DC_FN void load_a(u32 (&a)[4], const Tile& tile, int m, int k, int lane) {
  if (STORED == Stored::MN_ROWS)
    ldmatrix_x4(a, tile.address(m + (lane & 15), k + (lane >> 4) * 8));
  else
    ldmatrix_x4_trans(a, tile.address(k + (lane & 7) + (lane >> 4) * 8, m + (lane & 8)));
}

// 16 (k) x 16 (n) piece as two B operands: b[0], b[1] for columns n .. n + 7, b[2], b[3] for the
// next eight.
template <Stored STORED, class Tile>
DC_FN void load_b(u32 (&b)[4], const Tile& tile, int n, int k, int lane) {
  if (STORED == Stored::MN_ROWS)
    ldmatrix_x4(b, tile.address(n + (lane & 7) + (lane >> 4) * 8, k + (lane & 8)));
  else
    ldmatrix_x4_trans(b, tile.address(k + (lane & 15), n + (lane >> 4) * 8));
}

// acc += A[m0 .., 0 .. K) B[0 .. K, n0 ..)
template <Stored A_STORED, Stored B_STORED, int K, int M_TILES, int N_TILES, class TileA,
          class TileB>
DC_FN void gemm(Accumulator<M_TILES, N_TILES>& acc, const TileA& a_tile, int m0, const TileB& b_tile,
                int n0, int lane) {
  static_assert(K % 16 == 0 && N_TILES % 2 == 0, "whole pieces");
#pragma unroll
  for (int k = 0; k < K; k += 16) {
    u32 a[M_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) load_a<A_STORED>(a[m], a_tile, m0 + 16 * m, k, lane);
#pragma unroll
    for (int n = 0; n < N_TILES; n += 2) {
      u32 b[4];
      load_b<B_STORED>(b, b_tile, n0 + 8 * n, k, lane);
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) {
        mma_m16n8k16(acc.d[m][n], a[m], b[0], b[1]);
        mma_m16n8k16(acc.d[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}
