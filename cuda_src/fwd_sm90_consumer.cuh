// A consumer warpgroup of the Hopper forward: 64 rows of each q tile, from S to out and lse.
#pragma once
#include "fwd_sm90_arithmetic.cuh"
#include "fwd_sm90_layout.cuh"
#include "ptx/math.cuh"
#include "ptx/stmatrix.cuh"

// Some warpgroups see no key of a q tile's first kv tile: it lies beyond their diagonal.
constexpr bool MAY_BE_HIDDEN = DC_CAUSAL && Q_TILE > KV_TILE;
static_assert(!MAY_BE_HIDDEN || EARLY_EXPONENTIALS == 0, "P is made in one place");

struct Consumer {
  const ForwardSm90Params& params;
  SharedStorage& smem;
  const int index, warp, lane;  // among the consumers; in the warpgroup; in the warp
  const Mask mask;
  const float scale_log2;
  const u32 q_low, k_low, v_low;  // low halves of the descriptors of the first stage

  float s[N_S];      // S of this kv tile, then P
  u32 p[N_S / 2];    // P of this or the last kv tile, as A operands
  float o[N_O];
  // Of the two rows of this thread, row0 and row0 + 8. Reference: in log2 units.
  float reference[2], sum[2], factor[2];
  int row0;
  int j;             // kv tile
  int n_unmasked;    // kv tiles of which every row of the warpgroup sees every key: the first ones
  u32 seen[2];       // see seen_scores
  bool hidden;       // of the q tile's first kv tile, from all rows of the warpgroup: its P is 0
  bool moved, track_maximum;
  int stage;         // of k of this kv tile, and of its v
  u32 phase;
  u32 count;         // slots taken
  u32 q_stage;

  DC_FN Consumer(const ForwardSm90Params& params, SharedStorage& smem, int index)
      : params(params), smem(smem), index(index), warp(warp_in_warpgroup()),
        lane(threadIdx.x % WARP_SIZE), mask{params.q_len, params.kv_len, params.mask_offset},
        scale_log2(params.scale_log2), q_low(descriptor_low(smem_address(smem.q[0][index]))),
        k_low(descriptor_low(smem_address(smem.k[0]))),
        v_low(descriptor_low(smem_address(smem.v[0]), KV_PANEL_BYTES)), moved(false),
        track_maximum(false), stage(0), phase(0), count(0), q_stage(0) {
    factor[0] = factor[1] = 1.f;
  }

  DC_FN void release(u64& barrier) { mbarrier_arrive_warp(address(barrier), lane); }

  // Takes the next slot. A q tile (its q has landed): fresh state of the rows, true.
  DC_FN int take_slot() {
    q_stage = count % Q_STAGES;
    mbarrier_wait(address(smem.q_full[q_stage]), count / Q_STAGES & 1);
    Work work = read_work(smem.slots[count % N_SLOT]);
    // All lanes read the same; told so, the compiler keeps loop counters in uniform registers.
    work.q_row0 = __shfl_sync(0xffffffffu, work.q_row0, 0);
    work.n_tile = __shfl_sync(0xffffffffu, work.n_tile, 0);
    if (work.q_row0 < 0) return work.q_row0;
    const int warpgroup_row0 = work.q_row0 + index * WARPGROUP_ROWS;
    row0 = warpgroup_row0 + 16 * warp + lane / 4;
    track_maximum = !FIXED_REFERENCE || work.n_tile < 0;
    j = (work.n_tile & ~TRACK_MAXIMUM) - 1;
    n_unmasked = max_int(mask.key_end(warpgroup_row0), 0) / KV_TILE;
    hidden = MAY_BE_HIDDEN && mask.key_end(warpgroup_row0 + WARPGROUP_ROWS - 1) <= j * KV_TILE;
    // Finite, so that a row without a key so far has 2^(-inf - reference) = 0.
    reference[0] = reference[1] = LOWEST;
    sum[0] = sum[1] = 0.f;
    return work.q_row0;
  }

  // Answers a slot that is no q tile.
  DC_FN void skip_slot() {
    if (FIXED_REFERENCE) release(smem.verdict[count % N_OPEN]);
    release(smem.out_full[count % N_OPEN]);
    ++count;
  }

  // S = q k^T, not waited for.
  DC_FN void start_s() {
    const u32 q = q_low + q_stage * (N_CONSUMER * Q_BYTES >> 4);
    const u32 k = k_low + stage * (KV_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < COLUMNS / 16; ++step) {
      const int panel = step / 4, within = step % 4 * (K_STEP_BYTES >> 4);
      const u64 a = descriptor(q + panel * (Q_PANEL_BYTES >> 4) + within);
      const u64 b = descriptor(k + panel * (KV_PANEL_BYTES >> 4) + within);
      if (step == 0)
        wgmma_ss_first<K_MAJOR, K_MAJOR>(s, a, b);
      else
        wgmma_ss<K_MAJOR, K_MAJOR>(s, a, b);
    }
    wgmma_commit();
  }

  // O += P v, not waited for.
  DC_FN void start_o(int v_stage) {
    const u32 v = v_low + v_stage * (KV_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KV_TILE / 16; ++step)
      wgmma_rs<MN_MAJOR>(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                         descriptor(v + step * (K_STEP_ROWS_BYTES >> 4)));
    wgmma_commit();
  }

  DC_FN void find_seen() {
    if (j < n_unmasked) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      seen[half] = seen_scores(mask.key_end(row0 + 8 * half) - j * KV_TILE, lane);
  }

  // Mask, where some row of the warpgroup misses a key; then the references, where they may move.
  DC_FN void prepare_softmax() {
    if (j >= n_unmasked) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < N_S / 2; ++i)
          if (!(seen[half] & 1u << i)) s[i / 2 * 4 + 2 * half + i % 2] = -infinity();
    }
    if (track_maximum || j >= n_unmasked - 1) {
      bool moves = false;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
        for (int e = 4 + 2 * half; e < N_S; e += 4) top = fmaxf(top, fmaxf(s[e], s[e + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        // Products of their own: fused into a sum in one copy of this code and not in another, they
        // would let bits depend on which copy a kv tile meets.
        top = __fmul_rn(fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)), scale_log2);
        factor[half] = 1.f;
        if (top > reference[half] + MAX_RISE) {
          factor[half] = exp2_here(reference[half] - top);
          reference[half] = top;
          moves = true;
        }
        sum[half] = __fmul_rn(sum[half], factor[half]);
      }
      moved = __any_sync(0xffffffffu, moves);  // multiplying by 1 changes no row that did not move
    }
  }

  DC_FN float probability(int e) const {
    return exp2_here(fmaf(s[e], scale_log2, -reference[e >> 1 & 1]));
  }

  // P of the first elements, and its sums; to be packed when P v of the tile before is done.
  DC_FN void early_exponentials() {
#pragma unroll
    for (int e = 0; e < EARLY_EXPONENTIALS; e += 4) {
#pragma unroll
      for (int i = e; i < e + 4; ++i) s[i] = probability(i);
      sum[0] += s[e] + s[e + 1];
      sum[1] += s[e + 2] + s[e + 3];
    }
  }

  // The rest of P: a batch of exponentials is issued ahead of the sums and packs of the last batch.
  DC_FN void late_exponentials() {
#pragma unroll
    for (int e = 0; e < EARLY_EXPONENTIALS; e += 2) p[e / 2] = pack(s[e], s[e + 1]);
#pragma unroll
    for (int e0 = EARLY_EXPONENTIALS; e0 < N_S + BATCH; e0 += BATCH) {
      if (e0 < N_S)
#pragma unroll
        for (int e = e0; e < e0 + BATCH; ++e) s[e] = probability(e);
      if (e0 > EARLY_EXPONENTIALS)
#pragma unroll
        for (int e = e0 - BATCH; e < e0; e += 4) {
          add_here(sum[0], s[e]);
          add_here(sum[1], s[e + 2]);
          p[e / 2] = pack_here(s[e], s[e + 1]);
          add_here(sum[0], s[e + 1]);
          add_here(sum[1], s[e + 3]);
          p[e / 2 + 1] = pack_here(s[e + 2], s[e + 3]);
        }
    }
  }

  DC_FN u32 saved_sums() {
    return smem_address(smem.sums) + (thread_index() - WARPGROUP_SIZE) * int(sizeof(float2));
  }
  DC_FN u32 saved_references() {
    const int row = index * WARPGROUP_ROWS + 16 * warp + thread_index() % WARP_SIZE / 4;
    return smem_address(smem.references) + row * int(sizeof(float));
  }

  DC_FN void save_rows() {
    st_shared_v2(saved_sums(), sum[0], sum[1]);
    if (lane % 4 == 0) {
      st_shared(saved_references(), __float_as_uint(reference[0]));
      st_shared(saved_references() + 8 * int(sizeof(float)), __float_as_uint(reference[1]));
    }
  }

  // A barrier of the warp must lie between the two.
  DC_FN void restore_rows(float (&saved_sum)[2], float (&saved_reference)[2]) {
    const float2 sums = ld_shared_f32_v2(saved_sums());
    saved_sum[0] = sums.x, saved_sum[1] = sums.y;
    saved_reference[0] = __uint_as_float(ld_shared(saved_references()));
    saved_reference[1] = __uint_as_float(ld_shared(saved_references() + 8 * int(sizeof(float))));
  }

  // The rows of the q tile of the slot before `count`, whose last P is complete: lse, and what O is
  // to be multiplied with, 0 for a row without a key.
  DC_FN void finish_rows(const float (&lane_sum)[2], const float (&row_reference)[2],
                         float (&inverse)[2]) {
    const u32 slot = count - 1;
    const Work work = read_work(smem.slots[slot % N_SLOT]);
    float total[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half] = lane_sum[half];
      total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
      total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
      inverse[half] = total[half] == 0.f ? 0.f : reciprocal_approx(total[half]);
    }
    if (FIXED_REFERENCE && work.n_tile >= 0 && !(total[0] < MAX_SUM && total[1] < MAX_SUM))
      st_shared(smem_address(&smem.failed[slot % N_OPEN]), 1);
    const int row = work.q_row0 + index * WARPGROUP_ROWS + 16 * warp + lane / 4;
    if (lane % 4 == 0) {
      float* lse = params.lse + work.batch * params.lse_batch + work.head * params.lse_head;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (row + 8 * half < params.q_len)
          lse[row + 8 * half] =
              total[half] == 0.f
                  ? -infinity()
                  : (row_reference[half] + log2_approx(total[half])) * LN_2;
    }
  }

  // O of that q tile, which is complete: out, verdict.
  template <bool EDGE>
  DC_FN void finish_out(const float (&inverse)[2]) {
    const u32 slot = count - 1;
    // The O of a row without a key is 0, or 0 times a NaN of v.
    if (__any_sync(0xffffffffu, inverse[0] == 0.f || inverse[1] == 0.f)) {
#pragma unroll
      for (int e = 0; e < N_O; ++e)
        if (inverse[e >> 1 & 1] == 0.f) o[e] = 0.f;
    }
    // out goes over q, which all four warps must be done with. At an edge the turn said so.
    if (!EDGE) named_barrier_sync(Q_DONE + index, WARPGROUP_SIZE);
    const int thread = thread_index();
    const u32 out = smem_address(smem.q[slot % Q_STAGES][index]) +
                    ((thread / WARP_SIZE % 4) * 16 + thread % 16) * PANEL_ROW_BYTES;
    const u32 swizzle = thread & 7, chunk = thread >> 4 & 1;
    u32 zeros[2] = {0u, 0u};
#pragma unroll
    for (int piece = 0; piece < COLUMNS / 16; ++piece) {
      u32 x[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // pack_here: not all products at once, registers are few
        const float* pair = &o[8 * piece + 2 * e];
        x[e] = pack_here(pair[0] * inverse[e & 1], pair[1] * inverse[e & 1]);
        if (FIXED_REFERENCE) zeros[e & 1] = add_zeros(zeros[e & 1], x[e]);
      }
      stmatrix_x4(out + piece / 4 * Q_PANEL_BYTES + ((2 * (piece % 4) + chunk ^ swizzle) << 4),
                  x[0], x[1], x[2], x[3]);
    }
    if (FIXED_REFERENCE) {
      const bool failed = zeros[0] != 0u || zeros[1] != 0u;
      if (failed && read_work(smem.slots[slot % N_SLOT]).n_tile >= 0)
        st_shared(smem_address(&smem.failed[slot % N_OPEN]), 1);
      release(smem.verdict[slot % N_OPEN]);
    }
    fence_async_smem();  // generic stores above -> the storer's bulk store, which would miss them
    release(smem.out_full[slot % N_OPEN]);
  }

  // The products of S of this kv tile, and of O with P and v of the kv tile before; with EDGE, that
  // one was the last of the q tile before, which is finished on the way.
  template <bool EDGE>
  DC_FN void step() {
    const int v_stage = stage;
    const u32 v_phase = phase;
    next_stage();
    mbarrier_wait(address(smem.k_full[stage]), phase);
    named_barrier_sync(TURN + index, 2 * WARPGROUP_SIZE);
    start_s();
    mbarrier_wait(address(smem.v_full[v_stage]), v_phase);
    start_o(v_stage);
    named_barrier_arrive(TURN + (index + 1 == N_CONSUMER ? 0 : index + 1), 2 * WARPGROUP_SIZE);
    find_seen();
    float inverse[2];
    if (EDGE) {
      float last_sum[2], last_reference[2];
      restore_rows(last_sum, last_reference);
      finish_rows(last_sum, last_reference, inverse);
    }
    wgmma_wait<1>();  // S
    release(smem.k_empty[stage]);
    const bool first_hidden = EDGE && hidden;
    if (!first_hidden) prepare_softmax();
    early_exponentials();
    if (EARLY_EXPONENTIALS > 0) needed_here(sum[0] + sum[1], smem_address(&smem.sink));
    wgmma_wait<0>();  // O
    release(smem.v_empty[v_stage]);
    if (EDGE) {
      finish_out<true>(inverse);
      clear(o);
    }
    if (first_hidden)
      clear(p);
    else
      late_exponentials();
    if (!EDGE && moved) {
#pragma unroll
      for (int e = 0; e < N_O; ++e) o[e] *= factor[e >> 1 & 1];
    }
    moved = false;
  }

  DC_FN void next_stage() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }

  // The first kv tile of a run of q tiles: nothing to overlap with. The sums are added in the order
  // of `step`: bits may not depend on where a run starts.
  DC_FN void first_step() {
    mbarrier_wait(address(smem.k_full[stage]), phase);
    start_s();
    find_seen();
    wgmma_wait<0>();
    release(smem.k_empty[stage]);
    if (!hidden) prepare_softmax();
    moved = false;
    early_exponentials();
    if (hidden)
      clear(p);
    else
      late_exponentials();
    clear(o);
  }

  // The last P v of a run.
  DC_FN void last_step() {
    mbarrier_wait(address(smem.v_full[stage]), phase);
    start_o(stage);
    float inverse[2];
    finish_rows(sum, reference, inverse);
    wgmma_wait<0>();
    release(smem.v_empty[stage]);
    next_stage();
    finish_out<false>(inverse);
  }

  DC_FN void run() {
    // The last consumer opens the round of turns.
    if (index == N_CONSUMER - 1) named_barrier_arrive(TURN, 2 * WARPGROUP_SIZE);
#pragma unroll 1
    for (;;) {
      int word = take_slot();
      if (word < 0) {
        skip_slot();
        if (word == END) return;
        continue;
      }
      first_step();
      for (;;) {
#pragma unroll 1
        while (j > 0) {
          --j;
          step<false>();
        }
        ++count;
        if (Q_STAGES == 1) break;
        save_rows();
        word = take_slot();
        if (word < 0) break;
        step<true>();
      }
      last_step();
      if (Q_STAGES == 1) continue;
      skip_slot();
      if (word == END) return;
    }
  }
};
