// What the host passes to each kernel: one struct by value. dashcupy/params.py packs the same
// fields in the same order and says how many bytes it counted (DC_PARAMS_BYTES), so that a drift
// fails to build.
#pragma once
#include "element.cuh"

// Strides of a [batch, len, heads, head_dim] array, in elements; the last axis is contiguous.
struct Strides {
  i64 batch, row, head;
};

struct ForwardParams {
  const Element* q;  // [batch, q_len, n_q_head, DC_HEAD_DIM]
  const Element* k;  // [batch, kv_len, n_kv_head, DC_HEAD_DIM]
  const Element* v;  // as k
  Element* out;      // as q
  float* lse;        // [batch, n_q_head, q_len], natural log
  Strides q_strides, k_strides, v_strides, out_strides;
  i64 lse_batch, lse_head;  // strides of lse in elements; rows are contiguous
  int batch, n_q_head, n_kv_head, q_len, kv_len;
  int mask_offset;  // with DC_CAUSAL, row i sees key j iff j <= i + mask_offset
  float scale_log2;  // scale * log2(e)
  int reserved;
};

struct BackwardParams {
  const Element* q;
  const Element* k;
  const Element* v;
  const Element* out;
  const Element* dout;
  const float* lse;   // [batch, n_q_head, q_len], natural log
  const float* dlse;  // as lse, the gradient of the loss with respect to it; null: it has none
  Element* dq;        // as q
  Element* dk;        // as k
  Element* dv;        // as k
  float* lse_log2;    // workspace [batch, n_q_head, n_q * DC_Q_TILE]: lse * log2(e); +inf: P is 0
  float* delta;       // workspace, same shape: rowsum(out * dout) - dlse
  float* dq_accum;    // workspace [batch, n_q_head, n_q][DC_Q_TILE * DC_HEAD_DIM_PAD], any contents
  u32* dq_semaphore;  // workspace [batch, n_q_head, n_q][DC_SEMAPHORE_STRIDE]
  u32* work_counter;  // workspace [1]
  u32* report;        // [8], debug builds only: who gave up waiting
  Strides q_strides, k_strides, v_strides, out_strides, dout_strides;
  Strides dq_strides, dk_strides, dv_strides;
  i64 lse_batch, lse_head, dlse_batch, dlse_head;
  int batch, n_q_head, n_kv_head, q_len, kv_len;
  int mask_offset;
  float scale, scale_log2;
  int head_group;  // kv heads that take turns as works are handed out (schedules/contract.cuh)
  int reserved;
};

struct CopyParams {
  const Element* from;  // [batch, len, n_head, DC_HEAD_DIM]
  Element* to;          // as from
  Strides from_strides, to_strides;
  int batch, len, n_head;
  int reserved;
};

static_assert(DC_PARAMS_BYTES == sizeof(ForwardParams) ||
                  DC_PARAMS_BYTES == sizeof(BackwardParams) ||
                  DC_PARAMS_BYTES == sizeof(CopyParams),
              "params.py packs another struct");
