// A tile of 16-bit elements in shared memory: rows of COLUMNS elements, each padded by 16 bytes.
// COLUMNS / 8 is even, so a row is an odd number of 16-byte chunks: eight rows of one chunk column
// (one ldmatrix phase) fall into the 32 banks without a conflict, and no swizzle is needed.
#pragma once
#include "element.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/memory.cuh"

template <int ROWS, int COLUMNS>
struct SmemTile {
  static_assert(COLUMNS % 16 == 0, "an even number of 16-byte chunks a row");
  static constexpr int n_row = ROWS;
  static constexpr int n_column = COLUMNS;
  static constexpr int row_elements = COLUMNS + 8;
  static constexpr int row_bytes = row_elements * int(sizeof(Element));

  Element data[ROWS * row_elements];

  // Bytes from the tile's first element.
  DC_FN static constexpr u32 offset(int row, int column) {
    return u32(row * row_bytes + column * int(sizeof(Element)));
  }
  DC_FN u32 address(int row, int column) const { return smem_address(data) + offset(row, column); }
};

// Eight neighbouring elements of a row in global memory (the first at a multiple of 8).
DC_FN void load_8(u32 (&word)[4], const Element* gmem) {
#if DC_ALIGNED
  const uint4 four = *reinterpret_cast<const uint4*>(gmem);
  word[0] = four.x, word[1] = four.y, word[2] = four.z, word[3] = four.w;
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = u32(gmem[2 * i]) | u32(gmem[2 * i + 1]) << 16;
#endif
}

// The same the other way.
DC_FN void store_8(Element* gmem, const u32 (&word)[4]) {
#if DC_ALIGNED
  *reinterpret_cast<uint4*>(gmem) = make_uint4(word[0], word[1], word[2], word[3]);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i)
    gmem[2 * i] = Element(word[i]), gmem[2 * i + 1] = Element(word[i] >> 16);
#endif
}

// Copies rows gmem[0 .. ROWS)[DC_HEAD_DIM] (row_stride in elements) into `tile` by all N_THREAD
// threads. Rows outside [row_begin, row_end) and columns from DC_HEAD_DIM on become zeros, and
// nothing of them is read: what lies there may be NaN or no memory at all.
// With DC_ALIGNED the copy is asynchronous (commit and wait are the caller's); without it rows need
// no alignment beyond an element's, and each thread stores what it loaded.
template <int N_THREAD, class Tile>
DC_FN void load_tile(Tile& tile, const Element* gmem, i64 row_stride, int row_begin, int row_end) {
  constexpr int n_chunk = Tile::n_column / 8;
  constexpr int n_copy = Tile::n_row * n_chunk;
  // With whole rows a pass, a thread keeps its column and steps down by pass_rows.
  constexpr bool whole_rows = N_THREAD % n_chunk == 0;
  constexpr int pass_rows = N_THREAD / n_chunk;
  const int first_row = threadIdx.x / n_chunk, first_column = threadIdx.x % n_chunk * 8;
  const Element* first = gmem + first_row * row_stride + first_column;
#pragma unroll
  for (int i = 0; i < ceil_div(n_copy, N_THREAD); ++i) {
    const int copy = threadIdx.x + i * N_THREAD;
    if (n_copy % N_THREAD != 0 && copy >= n_copy) break;
    const int row = whole_rows ? first_row + i * pass_rows : copy / n_chunk;
    const int column = whole_rows ? first_column : copy % n_chunk * 8;
    const bool valid = row >= row_begin && row < row_end && column < DC_HEAD_DIM;
    const Element* from = whole_rows ? first + i * pass_rows * row_stride
                                     : gmem + row * row_stride + column;
    const u32 to = tile.address(row, column);
#if DC_ALIGNED
    cp_async_16(to, from, valid);
#else
    u32 word[4] = {0, 0, 0, 0};
    if (valid) load_8(word, from);
    st_shared_v4(to, word);
#endif
  }
}

// Two neighbouring elements to gmem (column even).
DC_FN void store_pair(Element* gmem, u32 pair) {
#if DC_ALIGNED
  *reinterpret_cast<u32*>(gmem) = pair;
#else
  gmem[0] = Element(pair & 0xffffu);
  gmem[1] = Element(pair >> 16);
#endif
}

// Eight neighbouring elements of a tile to gmem (column a multiple of 8).
template <class Tile>
DC_FN void store_chunk(Element* gmem, const Tile& tile, int row, int column) {
  const Element* from = &tile.data[row * Tile::row_elements + column];
#if DC_ALIGNED
  *reinterpret_cast<uint4*>(gmem) = *reinterpret_cast<const uint4*>(from);
#else
#pragma unroll
  for (int i = 0; i < 8; ++i) gmem[i] = from[i];
#endif
}
