// descending: every kv tile visits its q tiles from last to first; kv tiles add in ascending order.
//
// For the causal mask: works start with the long kv tiles of all heads, which keeps the CTAs
// equally busy. All kv tiles start on the last q tile; those of a head that start together queue
// for it once.
//
//   $ python -m dashcupy schedule descending --kv 4 --mask causal
//   descending: causal mask, 4 q tiles, 4 kv tiles; cells are q tile.ticket
//   work  kv     0    1    2    3
//      0   0   3.0  2.0  1.0  0.0
//      1   1   3.1  2.1  1.1
//      2   2   3.2  2.2
//      3   3   3.3
#pragma once
#include "schedules/contract.cuh"

namespace schedule {

DC_FN int num_steps(const Shape& shape, int kv_tile) {
  return shape.n_q - first_q_tile(shape, kv_tile);
}

DC_FN int q_tile(const Shape& shape, int, int step) { return shape.n_q - 1 - step; }

DC_FN int num_contributors(const Shape& shape, int q_tile) { return num_kv_tiles(shape, q_tile); }

DC_FN int ticket(const Shape&, int kv_tile, int) { return kv_tile; }

DC_FN int num_work(const Shape& shape) { return shape.n_kv; }

DC_FN int work_size(const Shape&, int) { return 1; }

DC_FN int kv_tile(const Shape&, int work, int) { return work; }

DC_FN int team_size(const Shape&) { return 1; }

DC_FN int chunk_size(const Shape& shape) { return max_int(1, num_work(shape)); }

}  // namespace schedule
