// What the host passes to the Hopper backward beside BackwardParams. As params.cuh.
#pragma once
#include "tensor_map.cuh"

// Maps of [batch, heads, len, head_dim], outermost axis first. A box is 64 columns (one panel) of a
// tile of one head. Rows that no key or row of the other side sees are outside the tensor and
// arrive as zeros: q and dout begin at Mask::first_row, k and v end at Mask::last_key_end. dk and
// dv have all keys: a box is what one warpgroup stores of them.
struct BackwardMaps {
  TensorMap q, dout, k, v, dk, dv;
};
