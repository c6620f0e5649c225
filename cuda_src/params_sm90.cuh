// What the host passes to the Hopper forward: one struct by value, as in params.cuh.
#pragma once
#include "tensor_map.cuh"

struct ForwardSm90Params {
  // Maps of [batch, heads, len, head_dim], outermost axis first. A box is PANEL_COLUMNS columns of
  // 64 rows (q, out) or of DC_KV_TILE rows (k, v) of one head; what lies past an end reads as zero.
  TensorMap q_map, k_map, v_map, out_map;
  float* lse;         // [batch, n_q_head, q_len], natural log
  u32* work_counter;  // null: CTA c takes q tiles c, c + gridDim, ...; else two zeros, zeros again
                      // at the end: the next q tile less gridDim, and how many CTAs are done
  i64 lse_batch, lse_head;  // strides of lse in elements; rows are contiguous
  int batch, n_q_head, n_kv_head, q_len, kv_len;
  int mask_offset;   // with DC_CAUSAL, row i sees key j iff j <= i + mask_offset
  float scale_log2;  // scale * log2(e)
  int head_group;    // q heads whose q tiles are handed out together; changes no bits
};

static_assert(DC_PARAMS_BYTES == sizeof(ForwardSm90Params), "params.py packs another struct");
