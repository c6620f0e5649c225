// unordered: parts of dq are added as they come. NOT deterministic: it exists to measure what an
// order costs (DC_UNORDERED makes the kernels wait for nobody; tickets are left over).
//
// Every kv tile goes round its q tiles backwards, each from another start, so that few add into the
// same dq at a time.
#pragma once
#include "schedules/contract.cuh"

namespace schedule {

constexpr int STEPS_APART = 2;

DC_FN int num_steps(const Shape& shape, int kv_tile) {
  return shape.n_q - first_q_tile(shape, kv_tile);
}

DC_FN int q_tile(const Shape& shape, int kv_tile, int step) {
  return shape.n_q - 1 - (step + STEPS_APART * kv_tile) % num_steps(shape, kv_tile);
}

DC_FN int num_contributors(const Shape& shape, int q_tile) { return num_kv_tiles(shape, q_tile); }

DC_FN int ticket(const Shape&, int kv_tile, int) { return kv_tile; }

DC_FN int num_work(const Shape& shape) { return shape.n_kv; }

DC_FN int work_size(const Shape&, int) { return 1; }

DC_FN int kv_tile(const Shape&, int work, int) { return work; }

DC_FN int team_size(const Shape&) { return 1; }

DC_FN int chunk_size(const Shape& shape) { return max_int(1, num_work(shape)); }

}  // namespace schedule
