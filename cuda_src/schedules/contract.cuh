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
DC_FN int chunk_size(const Shape& shape);  // works in a row handed out together, >= team_size

// ---- Work order: chunk 0 of every head of a group, then chunk 1 of every head of it, ...

constexpr int MAX_TEAM = 64;  // most works that may wait for one another

// Size of the chunks when `count` works are cut into the fewest, nearly equal teams.
DC_FN int balanced_chunk(int count) {
  if (count <= MAX_TEAM) return max_int(1, count);  // the usual case needs no division
  return ceil_div(count, ceil_div(count, MAX_TEAM));
}

struct HeadWork {
  int head;  // batch * n_kv_head + kv_head
  int work;
};

// Head and work behind a number that a CTA took from the counter, < n_head * num_work(shape).
// Heads go in groups of head_group (1 .. n_head); a group goes chunk by chunk.
DC_FN HeadWork decode(const Shape& shape, int n_head, int head_group, int global_work) {
  const int n_work = num_work(shape), chunk_works = chunk_size(shape);
  const int group = global_work / (head_group * n_work);
  const int first_head = group * head_group;
  const int n_group = min_int(head_group, n_head - first_head);  // heads in this group
  const int group_work = global_work - first_head * n_work;
  const int last_chunk = n_work % chunk_works;
  const int in_full = (n_work - last_chunk) * n_group;
  const bool full = group_work < in_full;
  const int chunk = full ? chunk_works : last_chunk;
  const int number = full ? group_work : group_work - in_full;  // among chunks of this size
  const int chunk_number = number / chunk;
  const int chunk_index = full ? chunk_number / n_group : 0;
  const int first = full ? chunk_index * chunk : n_work - last_chunk;
  return {first_head + chunk_number - chunk_index * n_group, first + number - chunk_number * chunk};
}

}  // namespace schedule
