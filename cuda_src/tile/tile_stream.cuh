// Tiles of one [row][DC_HEAD_DIM] array in global memory into shared memory, one after another.
#pragma once
#include "ptx/memory.cuh"
#include "tile/smem_tile.cuh"

// Each of N_THREAD threads copies the same 16-byte chunks of the same rows of every tile, so that
// one pointer and constant steps serve all its copies. Lanes a row are a power of two: 16 lanes of
// one chunk for 128 columns, 4 lanes of three chunks for 96, 2 lanes of five for 80.
template <int N_THREAD, class Tile>
struct TileStream {
  static constexpr u32 n_chunk = round_up(DC_HEAD_DIM, 16) / 8;
  static constexpr u32 row_lanes = n_chunk & (0u - n_chunk);
  static constexpr int lane_chunks = n_chunk / row_lanes;
  static constexpr int pass_rows = N_THREAD / row_lanes;
  static_assert(N_THREAD % row_lanes == 0, "whole rows a pass");

  const Element* from;  // this thread's first chunk of the next tile
  i64 row_stride;       // in elements

  DC_FN TileStream(const Element* first_row, i64 row_stride)
      : from(first_row + i64(threadIdx.x / row_lanes) * row_stride + threadIdx.x % row_lanes * 8),
        row_stride(row_stride) {}

  // The next Tile::n_row rows into `tile`, columns up to the next multiple of 16. Rows from n_valid
  // on and columns from DC_HEAD_DIM on become zeros and nothing of them is read. With DC_ALIGNED
  // the copies are asynchronous (commit and wait are the caller's); without it rows need an
  // element's alignment only.
  DC_FN void load(Tile& tile, int n_valid) {
    const int lane_row = int(threadIdx.x / row_lanes);
    const int lane_column = int(threadIdx.x % row_lanes * 8);
    const u32 to = tile.address(lane_row, lane_column);
    const Element* from_row = from;
#pragma unroll
    for (int pass = 0; pass < ceil_div(Tile::n_row, pass_rows); ++pass) {
      const int row = lane_row + pass * pass_rows;
      if (Tile::n_row % pass_rows != 0 && row >= Tile::n_row) break;
#pragma unroll
      for (int i = 0; i < lane_chunks; ++i) {
        const int column = i * int(row_lanes) * 8;
        copy_chunk(to + Tile::offset(pass * pass_rows, column), from_row + column,
                   row < n_valid && lane_column + column < DC_HEAD_DIM);
      }
      from_row += pass_rows * row_stride;
    }
    from += Tile::n_row * row_stride;
  }

 private:
  DC_FN static void copy_chunk(u32 to, const Element* chunk, bool valid) {
#if DC_ALIGNED
    cp_async_16(to, chunk, valid);
#else
    u32 word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      word[i] = valid ? u32(chunk[2 * i]) | u32(chunk[2 * i + 1]) << 16 : 0u;
    st_shared_v4(to, word);
#endif
  }
};
