// Arithmetic of the Hopper forward's consumers: what the compiler may not move, masks as bits.
#pragma once
#include "element.cuh"
#include "fwd_sm90_layout.cuh"

constexpr int N_S = KV_TILE / 2, N_O = COLUMNS / 2;  // accumulators of a thread
// Exponentials of a thread that run before P v of the tile before is waited for, and how many are
// issued ahead of their sums after it.
constexpr int EARLY_EXPONENTIALS = DC_EARLY_EXPONENTIALS;
constexpr int BATCH = 8;
static_assert(EARLY_EXPONENTIALS % BATCH == 0 && N_S % BATCH == 0, "whole batches");

constexpr float LOWEST = -3.4028234663852886e38f;
constexpr float MAX_RISE = 8.f;         // of a score over its reference, in log2, before it moves
constexpr float MAX_SUM = 1.2676506e30f;  // 2^100

// The compiler may not move these: see where they are used.
DC_FN float exp2_here(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DC_FN void add_here(float& sum, float x) {
  asm volatile("add.f32 %0, %0, %1;" : "+f"(sum) : "f"(x));
}
DC_FN u32 pack_here(float lo, float hi) {
  u32 r;
#if DC_BF16
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#else
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
#endif
  return r;
}

// sum + 0 pair, both halves: NaN from where one was infinite or NaN.
DC_FN u32 add_zeros(u32 sum, u32 pair) {
#if DC_BF16
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0u));
#else
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0u));
#endif
  return sum;
}

// ptxas moves a wait for products above the exponentials before it, and with that serialises what
// should overlap, unless something with a side effect needs them: a store that is never made.
DC_FN void needed_here(float x, u32 sink) {
  asm volatile(
      "{.reg .pred p; setp.gt.f32 p, %0, 0f7f7fffff; @p st.volatile.shared.u32 [%1], 1;}" ::"f"(x),
      "r"(sink)
      : "memory");
}

// Which of a row's scores of a kv tile, of which it sees the first n_key keys, are seen: one bit
// for each that this lane holds, in their order there (ptx/wgmma.cuh). Bits, as one instruction
// makes predicates of seven of them.
static_assert(KV_TILE / 4 <= 32, "a bit for each score");
DC_FN u32 seen_scores(int n_key, int lane) {
  const int n_seen = min_int(max_int(n_key - 2 * (lane & 3), 0), KV_TILE);
  const int n_score = n_seen / 8 * 2 + min_int(n_seen % 8, 2);
  return n_score < 32 ? (1u << n_score) - 1 : ~0u;
}

template <class T, int N>
DC_FN void clear(T (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) registers[i] = T(0);
}
