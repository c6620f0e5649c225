// symmetric_shift: a CTA does a long kv tile, then the short one that evens it out; causal only.
//
// Work k is the pair of kv tiles k (long) and n - 1 - k (short), n being the kv tiles that any row
// sees; an odd one in the middle stays alone. A team of works
//   1. goes round the q tiles that all its long tiles see, as `shift` does,
//   2. then does what is left of the long tiles, each from its diagonal on,
//   3. then the short tiles, from the last q tile back to the diagonal.
// In all three no two members are on the same q tile at the same step (whole tiles). kv tiles that
// no row sees come last, as works of their own with no step: their gradients are zero.
//
//   $ python -m dashcupy schedule symmetric_shift --kv 7 --mask causal
//   symmetric_shift: causal mask, 7 q tiles, 7 kv tiles; cells are q tile.ticket
//   work   kv     0    1    2    3    4    5    6    7
//      0  0,6   3.0  4.1  5.2  6.3  0.0  1.1  2.2 |6.6
//      1  1,5   4.0  5.1  6.2  3.3  1.0  2.1 |6.5  5.5
//      2  2,4   5.0  6.1  3.2  4.3  2.0 |6.4  5.4  4.4
//      3    3   6.0  3.1  4.2  5.3
#pragma once
#include "schedules/contract.cuh"

static_assert(DC_CAUSAL, "symmetric_shift is defined for the causal mask only");

namespace schedule {

struct Team {
  int first;       // pairs of the head in earlier teams
  int size;        // pairs in this team
  int member;      // which of them
  int rect_begin;  // first q tile that all long tiles of the team see
  int rect_size;   // q tiles from there on
};

DC_FN int num_pairs(const Shape& shape) { return (num_active_kv_tiles(shape) + 1) / 2; }

DC_FN int num_work(const Shape& shape) {
  return num_pairs(shape) + shape.n_kv - num_active_kv_tiles(shape);
}

DC_FN int work_size(const Shape& shape, int work) {
  return 2 * work + 1 < num_active_kv_tiles(shape) ? 2 : 1;
}

DC_FN int kv_tile(const Shape& shape, int work, int part) {
  const int n_active = num_active_kv_tiles(shape);
  const int n_pair = num_pairs(shape);
  if (work >= n_pair) return n_active + work - n_pair;
  return part ? n_active - 1 - work : work;
}

DC_FN int chunk_size(const Shape& shape) { return balanced_chunk(num_pairs(shape)); }

DC_FN int team_size(const Shape& shape) { return chunk_size(shape); }

DC_FN bool is_long(const Shape& shape, int kv_tile) { return kv_tile < num_pairs(shape); }

DC_FN Team team_of(const Shape& shape, int kv_tile) {
  const int n_active = num_active_kv_tiles(shape);
  const int pair = is_long(shape, kv_tile) ? kv_tile : n_active - 1 - kv_tile;
  const int chunk = chunk_size(shape);
  const int first = pair < chunk ? 0 : pair / chunk * chunk;  // seldom a division
  const int size = min_int(chunk, num_pairs(shape) - first);
  const int rect_begin = first_q_tile(shape, first + size - 1);
  return {first, size, pair - first, rect_begin, shape.n_q - rect_begin};
}

DC_FN int num_steps(const Shape& shape, int kv_tile) {
  return shape.n_q - first_q_tile(shape, kv_tile);
}

DC_FN int q_tile(const Shape& shape, int kv_tile, int step) {
  if (!is_long(shape, kv_tile)) return shape.n_q - 1 - step;
  const Team team = team_of(shape, kv_tile);
  if (step >= team.rect_size) return first_q_tile(shape, kv_tile) + step - team.rect_size;
  const int row = team.member * team.rect_size / team.size + step;
  return team.rect_begin + (row >= team.rect_size ? row - team.rect_size : row);
}

DC_FN int num_contributors(const Shape& shape, int q_tile) { return num_kv_tiles(shape, q_tile); }

DC_FN int ticket(const Shape& shape, int kv_tile, int q_tile) {
  const Team team = team_of(shape, kv_tile);
  const int n_active = num_active_kv_tiles(shape);
  const int n_kv = num_contributors(shape, q_tile);
  const int n_long = min_int(team.size, n_kv - team.first);
  const int before = min_int(team.first, n_kv)                     // long tiles of earlier teams
                     + max_int(0, n_kv - (n_active - team.first));  // and their short ones
  if (!is_long(shape, kv_tile)) {
    // The last pair of an odd number has no short tile.
    const int n_short = team.size - (2 * (team.first + team.size) > n_active ? 1 : 0);
    return before + n_long + n_short - 1 - team.member;
  }
  if (q_tile < team.rect_begin) return before + n_long - 1 - team.member;
  const int leader = ((q_tile - team.rect_begin + 1) * team.size - 1) / team.rect_size;
  const int turn = leader - team.member;
  return before + (turn < 0 ? turn + team.size : turn);
}

}  // namespace schedule
