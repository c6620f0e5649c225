// longest_first: kv tiles in three blocks, the one with the longest first; inside a block as in
// shortest_first. Causal only.
//
// In shortest_first nothing queues, for each kv tile starts on its own diagonal, but the long kv
// tiles are left at the end, and CTAs idle then. Here short ones are left. The price: the next
// block of a head has to follow its kv tiles at a distance. So the CTAs do the same block of other
// heads in between (chunk_size), and a head all alone waits.
//
//   $ python -m dashcupy schedule longest_first --kv 6 --mask causal
//   longest_first: causal mask, 6 q tiles, 6 kv tiles; cells are q tile.ticket
//   work  kv     0    1    2    3    4    5
//      0   1   1.0  2.0  3.0  4.0  5.0
//      1   0   0.0  1.1  2.1  3.1  4.1  5.1
//      2   3   3.2  4.2  5.2
//      3   2   2.2  3.3  4.3  5.3
//      4   5   5.4
//      5   4   4.4  5.5
#pragma once
#include "schedules/contract.cuh"

static_assert(DC_CAUSAL, "longest_first is defined for the causal mask only");

namespace schedule {

// More blocks leave shorter works to the end, fewer load q, dout and dq less often.
constexpr int N_BLOCK = 3;

DC_FN int block_size(const Shape& shape) {
  return max_int(1, ceil_div(num_active_kv_tiles(shape), N_BLOCK));
}

DC_FN int num_steps(const Shape& shape, int kv_tile) {
  return shape.n_q - first_q_tile(shape, kv_tile);
}

DC_FN int q_tile(const Shape& shape, int kv_tile, int step) {
  return first_q_tile(shape, kv_tile) + step;
}

DC_FN int num_contributors(const Shape& shape, int q_tile) { return num_kv_tiles(shape, q_tile); }

// Number i of `count`, counted from the other end of its block.
DC_FN int turn_block(const Shape& shape, int i, int count) {
  const int size = block_size(shape), first = i / size * size;
  return first + min_int(first + size, count) - 1 - i;
}

DC_FN int ticket(const Shape& shape, int kv_tile, int q_tile) {
  return turn_block(shape, kv_tile, num_contributors(shape, q_tile));
}

DC_FN int num_work(const Shape& shape) { return shape.n_kv; }

DC_FN int work_size(const Shape&, int) { return 1; }

DC_FN int kv_tile(const Shape& shape, int work, int) {
  return turn_block(shape, work, num_work(shape));
}

DC_FN int team_size(const Shape&) { return 1; }

DC_FN int chunk_size(const Shape& shape) { return block_size(shape); }

}  // namespace schedule
