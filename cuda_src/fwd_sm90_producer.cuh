// The three single threads of the Hopper forward's first warpgroup: the planner says which q tile
// comes next, the producer loads q, k and v, the storer writes out.
#pragma once
#include "fwd_sm90_layout.cuh"

// kv tile from which on the next q tile is claimed: late enough to balance, early enough that the
// answer of the counter has come when it is needed.
constexpr int CLAIM_AT = 3;

DC_FN void prefetch_q(const ForwardSm90Params& params, const Work& work) {
#pragma unroll
  for (int w = 0; w < N_CONSUMER; ++w)
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      tma_prefetch(params.q_map, panel * PANEL_COLUMNS, work.q_row0 + w * WARPGROUP_ROWS,
                   work.head, work.batch);
}

// Claims a q tile for each time that the producer asks, beginning with one unasked. What the
// producer does not wait for: the counter, divisions, and device memory: q comes to L2 a round of
// all CTAs ahead. Whose q tile it will be is not known then, and L2 serves all.
DC_FN void plan(const ForwardSm90Params& params, SharedStorage& smem) {
  const u32 n_cta = gridDim.x;
  const u32 n_work = ceil_div(params.q_len, Q_TILE) * params.batch * params.n_q_head;
  u32* const counter = n_cta < n_work ? params.work_counter : nullptr;
  u32 tile = blockIdx.x;
  for (u32 count = 0; tile < n_work; ++count) {
    const Work work = work_of(params, tile);
    write_work(smem.coming, work);
    st_shared(smem_address(&smem.coming_tile), tile);
    mbarrier_arrive(address(smem.coming_full));
    if (tile + n_cta < n_work) prefetch_q(params, work_of(params, tile + n_cta));
    mbarrier_wait(address(smem.coming_empty), count & 1);
    tile = counter ? atomicAdd(counter, 1u) + n_cta : tile + n_cta;
  }
  st_shared(smem_address(&smem.coming_tile), u32(END));
  mbarrier_arrive(address(smem.coming_full));
  if (!counter) return;
  // After the last claim: the last CTA leaves the counter as it was found.
  __threadfence();
  if (atomicAdd(counter + 1, 1u) == n_cta - 1) counter[0] = counter[1] = 0;
}

// Which q tile comes next.
//
// With FIXED_REFERENCE a q tile may fail (see fwd_sm90.cu) and is then done again with
// TRACK_MAXIMUM. Whether it failed is known when the consumers have finished it, which they do
// while they work on the next one: so the verdict on tile i is read before tile i + N_OPEN is
// posted, and when nothing is left to post but a verdict is open, HOLD makes them finish without a
// next one.
struct Scheduler {
  SharedStorage& smem;
  u32 n_posted, n_judged;  // slots; HOLDs have a verdict too, always good
  int fresh;               // next q tile that was never posted, or END
  u32 fresh_phase;         // of the planner's next answer
  bool asked;              // it is still to be taken
  int again[N_OPEN];       // failed q tiles, then -1: no more verdicts can be open
  bool held;               // the last slot was a HOLD

  DC_FN Scheduler(SharedStorage& smem)
      : smem(smem), n_posted(0), n_judged(0), fresh(END), fresh_phase(0), asked(true),
        held(false) {
#pragma unroll
    for (int i = 0; i < N_OPEN; ++i) again[i] = -1;
  }

  // To be called once for each fresh q tile, before the next is asked for.
  DC_FN void claim() {
    mbarrier_arrive(address(smem.coming_empty));
    asked = true;
  }

  DC_FN void take_answer() {
    mbarrier_wait(address(smem.coming_full), fresh_phase);
    fresh_phase ^= 1;
    fresh = int(ld_shared(smem_address(&smem.coming_tile)));
    asked = false;
  }

  DC_FN void judge() {
    const u32 i = n_judged % N_OPEN;
    mbarrier_wait(address(smem.verdict[i]), n_judged / N_OPEN & 1);
    const u32 failed = smem_address(&smem.failed[i]);
    if (ld_shared(failed)) {
      st_shared(failed, 0);
      int tile = ld_shared(smem_address(&smem.posted[i]));
#pragma unroll
      for (int k = 0; k < N_OPEN; ++k)  // into the first free place
        if (again[k] < 0) again[k] = tile, tile = -1;
    }
    ++n_judged;
  }

  // The next q tile, HOLD or END; is_fresh tells whether it was never posted before.
  DC_FN int next(bool& is_fresh) {
    is_fresh = false;
    if (asked) take_answer();
    if (FIXED_REFERENCE) {
      while (n_judged + N_OPEN - 1 < n_posted) judge();
      if (again[0] < 0 && fresh == END && held)
        while (n_judged < n_posted) judge();
    }
    int tile;
    if (again[0] >= 0) {
      tile = again[0];
#pragma unroll
      for (int k = 0; k < N_OPEN; ++k) again[k] = k + 1 < N_OPEN ? again[k + 1] : -1;
    } else if (fresh != END) {
      tile = fresh;
      is_fresh = true;
    } else {
      tile = FIXED_REFERENCE && n_judged < n_posted && !held ? HOLD : END;
    }
    held = tile == HOLD;
    return tile;
  }

  // Waits until the slot's q buffer is free, and writes the slot.
  DC_FN void post(int tile, const Work& work) {
    mbarrier_wait(address(smem.q_empty[n_posted % Q_STAGES]), n_posted / Q_STAGES + 1 & 1);
    write_work(smem.slots[n_posted % N_SLOT], work);
    if (FIXED_REFERENCE) st_shared(smem_address(&smem.posted[n_posted % N_OPEN]), tile);
    ++n_posted;
  }
};

// The loads of k and v: one ring of stages, in which a tile of v has the number of its tile of k.
// Consumers need k of a tile before v of the tile before, so v lags by one tile, also across q
// tiles.
struct KvStream {
  const ForwardSm90Params& params;
  SharedStorage& smem;
  int stage;
  u32 phase;  // of the wait for an empty stage
  int v_row, v_head, v_batch;  // v that is to be loaded, into the stage before; row < 0: none

  DC_FN KvStream(const ForwardSm90Params& params, SharedStorage& smem)
      : params(params), smem(smem), stage(0), phase(1), v_row(-1) {}

  DC_FN void load_v() {
    if (v_row < 0) return;
    const int v_stage = stage == 0 ? STAGES - 1 : stage - 1;
    mbarrier_wait(address(smem.v_empty[v_stage]), stage == 0 ? phase ^ 1 : phase);
    load(params.v_map, smem.v[v_stage], address(smem.v_full[v_stage]), v_row, v_head, v_batch);
    v_row = -1;
  }

  DC_FN void load_k(int row, int head, int batch) {
    mbarrier_wait(address(smem.k_empty[stage]), phase);
    load(params.k_map, smem.k[stage], address(smem.k_full[stage]), row, head, batch);
    load_v();
    v_row = row, v_head = head, v_batch = batch;
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }

 private:
  DC_FN void load(const TensorMap& map, const u8* to, u32 full, int row, int head, int batch) {
    mbarrier_arrive_expect(full, KV_BYTES);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      tma_load(smem_address(to) + panel * KV_PANEL_BYTES, map, full, panel * PANEL_COLUMNS, row,
               head, batch);
  }
};

DC_FN void produce(const ForwardSm90Params& params, SharedStorage& smem) {
  Scheduler scheduler(smem);
  KvStream kv(params, smem);
  const int q_per_kv = params.n_q_head / params.n_kv_head;
  for (;;) {
    bool is_fresh;
    const int tile = scheduler.next(is_fresh);
    const u32 stage = scheduler.n_posted % Q_STAGES, full = address(smem.q_full[stage]);
    if (tile < 0) {
      kv.load_v();
      scheduler.post(tile, {tile, 0, 0, 0});
      mbarrier_arrive(full);
      if (tile == HOLD) continue;
      return;
    }
    Work work = is_fresh ? read_work(smem.coming) : work_of(params, tile);
    const int n_tile = work.n_tile, kv_head = work.head / q_per_kv;
    if (!FIXED_REFERENCE || !is_fresh) work.n_tile |= TRACK_MAXIMUM;
    scheduler.post(tile, work);
    mbarrier_arrive_expect(full, N_CONSUMER * Q_BYTES);
#pragma unroll
    for (int w = 0; w < N_CONSUMER; ++w)
#pragma unroll
      for (int panel = 0; panel < PANELS; ++panel)
        tma_load(smem_address(smem.q[stage][w]) + panel * Q_PANEL_BYTES, params.q_map, full,
                 panel * PANEL_COLUMNS, work.q_row0 + w * WARPGROUP_ROWS, work.head, work.batch);
    for (int j = n_tile - 1; j >= 0; --j) {
      kv.load_k(j * KV_TILE, kv_head, work.batch);
      if (is_fresh && j == min_int(n_tile - 1, CLAIM_AT)) scheduler.claim();
    }
    // With one q buffer, the next q waits for this out, and this out for the last v.
    if (Q_STAGES == 1) kv.load_v();
  }
}

// out of a finished q tile lies where its q was.
DC_FN void store(const ForwardSm90Params& params, SharedStorage& smem) {
  for (u32 count = 0;; ++count) {
    mbarrier_wait(address(smem.out_full[count % N_OPEN]), count / N_OPEN & 1);
    const Work work = read_work(smem.slots[count % N_SLOT]);
    const u32 stage = count % Q_STAGES;
    if (work.q_row0 == END) break;
    if (work.q_row0 != HOLD) {
      if (FIXED_REFERENCE && work.n_tile < 0)
        bulk_wait<0>();  // done again: the rows of the first try must have landed before
#pragma unroll
      for (int w = 0; w < N_CONSUMER; ++w)
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
          tma_store(params.out_map, smem_address(smem.q[stage][w]) + panel * Q_PANEL_BYTES,
                    panel * PANEL_COLUMNS, work.q_row0 + w * WARPGROUP_ROWS, work.head,
                    work.batch);
      bulk_commit();
      bulk_wait_read<0>();
    }
    mbarrier_arrive(address(smem.q_empty[stage]));
  }
  bulk_wait<0>();
}
