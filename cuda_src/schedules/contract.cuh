// What a schedule must define, and the work order that all schedules share.
//
// A schedule says which kv tiles a CTA does, in which order each visits its q tiles, and when it
// may add its part to the dq of each (its ticket). All of it depends on Shape alone: never on
// batch, heads, SM count or time, so the order of every sum, and its bits, do not either.
// dashcupy/schedules/<name>.py is the same in Python, function by function; the tests hold both
// equal. In the drawing at the head of each schedule a row is a work, a column a step, and a cell
// `q tile.ticket`; q tiles that a column names twice queue.
#pragma once
#include "schedules/shape.cuh"

namespace schedule {

// ---- A schedule defines these. A team waits only for itself and for earlier works of its head. A
// kernel takes its next work only when the turn of its last part of dq has come: a CTA that held
// two works of a team could make the team hang.
DC_FN int num_steps(const Shape& shape, int kv_tile);           // q tiles it visits, of one q head
DC_FN int q_tile(const Shape& shape, int kv_tile, int step);    // the q tile at a step
DC_FN int ticket(const Shape& shape, int kv_tile, int q_tile);  // its turn in that dq; 0 = first
DC_FN int num_contributors(const Shape& shape, int q_tile);     // kv tiles that add into that dq
DC_FN int num_work(const Shape& shape);                         // works of one head
DC_FN int work_size(const Shape& shape, int work);              // kv tiles done one after another
DC_FN int kv_tile(const Shape& shape, int work, int part);      // one of them, part < work_size
DC_FN int team_size(const Shape& shape);   // works in a row that must be resident together
DC_FN int chunk_size(const Shape& shape);  // works of each head before later ones of any head

// ---- Work order: chunk 0 of every head, then chunk 1 of every head, ...; in a chunk `head_group`
// heads take turns, work by work, then the next ones: more in a late chunk. A team has its head
// alone.

constexpr int MAX_TEAM = 64;  // most works that may wait for one another

// Size of the chunks when `count` works are cut into the fewest, nearly equal teams.
DC_FN int balanced_chunk(int count) {
  if (count <= MAX_TEAM) return max_int(1, count);  // the usual case needs no division
  return ceil_div(count, ceil_div(count, MAX_TEAM));
}

// Heads that take turns in the chunk that begins with work `first`: LATE_HEADS times head_group
// where it begins in the second half of the works, but no more than a third of all heads where
// head_group is less. With as many keys as q rows late works are short: they follow one another
// closely and would queue, and the few rows in flight leave L2 room for more heads. With all heads
// at a time they would catch up with the chunk before.
constexpr int LATE_HEADS = 3;

DC_FN int heads_in_turn(const Shape& shape, int n_head, int head_group, int first) {
  if (team_size(shape) > 1) return 1;
  if (first == 0 || 2 * first < num_work(shape)) return head_group;
  return max_int(head_group, min_int(LATE_HEADS * head_group, n_head / 3));
}

struct HeadWork {
  int head;  // batch * n_kv_head + kv_head
  int work;
};

// Head and work behind a number that a CTA took from the counter, < n_head * num_work(shape).
// head_group is 1 .. n_head, and below 2^29 where a schedule has chunks.
DC_FN HeadWork decode(const Shape& shape, int n_head, int head_group, int global_work) {
  int count = chunk_size(shape), first = 0;  // works of the chunk
  int number = global_work;                  // within the chunk, then among heads that take turns
  if (count < num_work(shape)) {             // else one chunk: the usual case needs no division
    first = number / (count * n_head) * count;
    number -= first * n_head;
    count = min_int(count, num_work(shape) - first);
  }
  const int in_turn = heads_in_turn(shape, n_head, head_group, first);
  const int first_head = number / (count * in_turn) * in_turn;
  const int n_group = min_int(in_turn, n_head - first_head);
  number -= first_head * count;
  return {first_head + number % n_group, first + number / n_group};
}

}  // namespace schedule
