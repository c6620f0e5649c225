// shortest_first: every kv tile visits its q tiles from first to last; kv tiles add in descending
// order.
//
// With the causal mask kv tile i starts on its own diagonal, so no two kv tiles of a head are on
// the same q tile at the same step: nothing queues. The price is that the long kv tiles start
// last. What FlashAttention-3 and -4 call SPT, shortest processing time first.
//
//   $ python -m dashcupy schedule shortest_first --kv 4 --mask causal
//   shortest_first: causal mask, 4 q tiles, 4 kv tiles; cells are q tile.ticket
//   work  kv     0    1    2    3
//      0   3   3.0
//      1   2   2.0  3.1
//      2   1   1.0  2.1  3.2
//      3   0   0.0  1.1  2.2  3.3
#pragma once
#include "schedules/contract.cuh"

namespace schedule {

DC_FN int num_steps(const Shape& shape, int kv_tile) {
  return shape.n_q - first_q_tile(shape, kv_tile);
}

DC_FN int q_tile(const Shape& shape, int kv_tile, int step) {
  return first_q_tile(shape, kv_tile) + step;
}

DC_FN int num_contributors(const Shape& shape, int q_tile) { return num_kv_tiles(shape, q_tile); }

DC_FN int ticket(const Shape& shape, int kv_tile, int q_tile) {
  return num_contributors(shape, q_tile) - 1 - kv_tile;
}

DC_FN int num_work(const Shape& shape) { return shape.n_kv; }

DC_FN int work_size(const Shape&, int) { return 1; }

DC_FN int kv_tile(const Shape& shape, int work, int) { return shape.n_kv - 1 - work; }

DC_FN int team_size(const Shape&) { return 1; }

DC_FN int chunk_size(const Shape& shape) { return max_int(1, num_work(shape)); }

}  // namespace schedule
