// Which keys a row sees: the one place where masks are computed.
#pragma once
#include "common.cuh"

// Row i sees key j iff j < kv_len and, with DC_CAUSAL, j <= i + offset.
struct Mask {
  int q_len, kv_len, offset;

  // One more than the last key that `row` sees (0 or less: none).
  DC_FN int key_end(int row) const {
#if DC_CAUSAL
    return min_int(kv_len, row + offset + 1);
#else
    return kv_len;
#endif
  }

  // First row that sees any key; q_len or more: none does.
  DC_FN int first_row() const {
#if DC_CAUSAL
    return kv_len > 0 ? max_int(0, -offset) : q_len;
#else
    return kv_len > 0 ? 0 : q_len;
#endif
  }

  // Whether some row of [row0, row0 + n_row) misses some key of [key0, key0 + n_key).
  DC_FN bool cuts(int row0, int key0, int n_key) const { return key_end(row0) < key0 + n_key; }

  // The same for the causal rule alone: keys that do not exist do not count.
  DC_FN bool diagonal_cuts(int row0, int key0, int n_key) const {
    return DC_CAUSAL && row0 + offset + 1 < key0 + n_key;
  }

  // One more than the last key that any row sees.
  DC_FN int last_key_end() const { return q_len > 0 ? key_end(q_len - 1) : 0; }
};
