// One head cut into tiles, and which tiles see one another: all that a schedule may depend on.
// dashcupy/schedules/shape.py is the same in Python.
#pragma once
#include "common.cuh"

static_assert(DC_Q_TILE > 0 && DC_KV_TILE > 0, "rows of a tile");
static_assert(DC_CAUSAL == 0 || DC_CAUSAL == 1, "full or causal mask");

namespace schedule {

// One head in tiles of DC_Q_TILE and DC_KV_TILE rows. With DC_CAUSAL, row i sees key j iff
// j <= i + offset.
struct Shape {
  int q_len, kv_len;  // rows
  int n_q, n_kv;      // tiles: ceil_div(q_len, DC_Q_TILE), ceil_div(kv_len, DC_KV_TILE)
  int offset;
};

DC_FN Shape make_shape(int q_len, int kv_len, int offset) {
  return {q_len, kv_len, ceil_div(q_len, DC_Q_TILE), ceil_div(kv_len, DC_KV_TILE), offset};
}

// First q tile with a row that sees a key of the kv tile, n_q if none; all later ones see it too.
DC_FN int first_q_tile(const Shape& shape, int kv_tile) {
  if (!DC_CAUSAL) return 0;
  const int first_row = max_int(0, kv_tile * DC_KV_TILE - shape.offset);
  return first_row < shape.q_len ? first_row / DC_Q_TILE : shape.n_q;
}

// kv tiles with a key that a row of the q tile sees: tiles 0 .. result - 1.
DC_FN int num_kv_tiles(const Shape& shape, int q_tile) {
  if (!DC_CAUSAL) return shape.n_kv;
  const int last_key = min_int((q_tile + 1) * DC_Q_TILE, shape.q_len) - 1 + shape.offset;
  return last_key < 0 ? 0 : min_int(shape.n_kv, last_key / DC_KV_TILE + 1);
}

// kv tiles that some row sees: tiles 0 .. result - 1.
DC_FN int num_active_kv_tiles(const Shape& shape) {
  return shape.n_q ? num_kv_tiles(shape, shape.n_q - 1) : 0;
}

}  // namespace schedule
