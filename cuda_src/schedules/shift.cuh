// shift: every kv tile starts at its own q tile and goes round; full mask only.
//
// The kv tiles of a head start spread evenly over the q tiles, so that (with no fewer q tiles than
// kv tiles) no two are on the same q tile at the same step and nothing queues. They wait for one
// another in a ring, so a whole team must be resident. A head with more kv tiles than MAX_TEAM is
// cut into chunks, one team after another.
//
//   $ python -m dashcupy schedule shift --kv 4
//   shift: full mask, 4 q tiles, 4 kv tiles; cells are q tile.ticket
//   work  kv     0    1    2    3
//      0   0   0.0  1.1  2.2  3.3
//      1   1   1.0  2.1  3.2  0.3
//      2   2   2.0  3.1  0.2  1.3
//      3   3   3.0  0.1  1.2  2.3
//
//   $ python -m dashcupy schedule shift --kv 3 --q 7
//   shift: full mask, 7 q tiles, 3 kv tiles; cells are q tile.ticket
//   work  kv     0    1    2    3    4    5    6
//      0   0   0.0  1.0  2.1  3.1  4.2  5.2  6.2
//      1   1   2.0  3.0  4.1  5.1  6.1  0.2  1.2
//      2   2   4.0  5.0  6.0  0.1  1.1  2.2  3.2
#pragma once
#include "schedules/contract.cuh"

static_assert(!DC_CAUSAL, "shift is defined for the full mask only");

namespace schedule {

struct Team {
  int first;  // first kv tile
  int size;   // kv tiles
};

DC_FN int num_work(const Shape& shape) { return shape.n_kv; }

DC_FN int work_size(const Shape&, int) { return 1; }

DC_FN int kv_tile(const Shape&, int work, int) { return work; }

DC_FN int chunk_size(const Shape& shape) { return balanced_chunk(num_work(shape)); }

DC_FN int team_size(const Shape& shape) { return chunk_size(shape); }

DC_FN Team team_of(const Shape& shape, int kv_tile) {
  const int size = chunk_size(shape);
  const int first = kv_tile < size ? 0 : kv_tile / size * size;  // seldom a division
  return {first, min_int(size, shape.n_kv - first)};
}

DC_FN int num_steps(const Shape& shape, int) { return shape.n_q; }

DC_FN int q_tile(const Shape& shape, int kv_tile, int step) {
  const Team team = team_of(shape, kv_tile);
  const int start = (kv_tile - team.first) * shape.n_q / team.size;
  const int row = start + step;
  return row >= shape.n_q ? row - shape.n_q : row;
}

DC_FN int num_contributors(const Shape& shape, int) { return shape.n_kv; }

DC_FN int ticket(const Shape& shape, int kv_tile, int q_tile) {
  const Team team = team_of(shape, kv_tile);
  // The last member that starts at or before the q tile comes first, then the one before it, ...
  const int leader = ((q_tile + 1) * team.size - 1) / shape.n_q;
  const int turn = leader - (kv_tile - team.first);
  return team.first + (turn < 0 ? turn + team.size : turn);
}

}  // namespace schedule
