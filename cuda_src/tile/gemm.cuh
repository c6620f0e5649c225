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

// The lane's part of an address and the constant part are kept apart below, so that all fragments
// of a tile are one register plus immediate offsets.

// 16 (m) x 16 (k) piece as an A operand.
template <Stored STORED, class Tile>
DC_FN void load_a(u32 (&a)[4], const Tile& tile, int m, int k, int lane) {
  if (STORED == Stored::MN_ROWS)
    ldmatrix_x4(a, tile.address(lane & 15, (lane >> 4) * 8) + Tile::offset(m, k));
  else
    ldmatrix_x4_trans(a, tile.address((lane & 7) + (lane >> 4) * 8, lane & 8) + Tile::offset(k, m));
}

// 16 (k) x 16 (n) piece as two B operands: b[0], b[1] for columns n .. n + 7, b[2], b[3] for the
// next eight.
template <Stored STORED, class Tile>
DC_FN void load_b(u32 (&b)[4], const Tile& tile, int n, int k, int lane) {
  if (STORED == Stored::MN_ROWS)
    ldmatrix_x4(b, tile.address((lane & 7) + (lane >> 4) * 8, lane & 8) + Tile::offset(n, k));
  else
    ldmatrix_x4_trans(b, tile.address(lane & 15, (lane >> 4) * 8) + Tile::offset(k, n));
}

// acc += a B[k .. k + 15, n0 ..), the A operands in registers.
template <Stored B_STORED, int M_TILES, int N_TILES, class TileB>
DC_FN void gemm_step(Accumulator<M_TILES, N_TILES>& acc, const u32 (&a)[M_TILES][4],
                     const TileB& b_tile, int n0, int k, int lane) {
  static_assert(N_TILES % 2 == 0, "whole pieces");
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

// Work for the other pipes that a gemm hands out between its steps; `step` is a constant after
// unrolling.
struct NothingBetween {
  DC_FN void operator()(int) const {}
};

// acc += A[m0 .., 0 .. K) B[0 .. K, n0 ..); after k step i (of 16) it calls between(i).
// The operands of a piece are loaded DEPTH pieces before they are multiplied: with two warps a
// scheduler nobody else hides the latency of ldmatrix.
template <Stored A_STORED, Stored B_STORED, int K, int DEPTH, int M_TILES, int N_TILES,
          class TileA, class TileB, class Between = NothingBetween>
DC_FN void gemm(Accumulator<M_TILES, N_TILES>& acc, const TileA& a_tile, int m0,
                const TileB& b_tile, int n0, int lane, const Between& between = Between()) {
  static_assert(K % 16 == 0 && N_TILES % 2 == 0, "whole pieces");
  constexpr int n_pair = N_TILES / 2, n_piece = K / 16 * n_pair;
  constexpr int a_ring = ceil_div(DEPTH, n_pair) + 1, b_ring = DEPTH + 1;
  u32 a[a_ring][M_TILES][4], b[b_ring][4];
#pragma unroll
  for (int piece = -DEPTH; piece < n_piece; ++piece) {
    const int ahead = piece + DEPTH, ahead_k = ahead / n_pair, ahead_n = ahead % n_pair;
    if (ahead < n_piece) {
      if (ahead_n == 0)
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
          load_a<A_STORED>(a[ahead_k % a_ring][m], a_tile, m0 + 16 * m, 16 * ahead_k, lane);
      load_b<B_STORED>(b[ahead % b_ring], b_tile, n0 + 16 * ahead_n, 16 * ahead_k, lane);
    }
    if (piece < 0) continue;
    const int k = piece / n_pair, n = piece % n_pair;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      mma_m16n8k16(acc.d[m][2 * n], a[k % a_ring][m], b[piece % b_ring][0], b[piece % b_ring][1]);
      mma_m16n8k16(acc.d[m][2 * n + 1], a[k % a_ring][m], b[piece % b_ring][2],
                   b[piece % b_ring][3]);
    }
    if (n == n_pair - 1) between(k);
  }
}
