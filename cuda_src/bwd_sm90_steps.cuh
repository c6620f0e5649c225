// The Hopper backwards: what the planner hands to the other roles, and how they count.
#pragma once
#include "params.cuh"
#include "schedules/contract.cuh"
#include DC_SCHEDULE
#include "ptx/cluster.cuh"
#include "ptx/dependent_launch.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/warpgroup.cuh"
#include "tile/mask.cuh"

static_assert(DC_PARAMS_BYTES == sizeof(BackwardParams), "params.py packs another struct");

// CTAs of a cluster share a kv tile: each has CTA_KEYS of its keys.
constexpr int CTA_KEYS = DC_KV_TILE / DC_CLUSTER;
#if DC_CLUSTER > 1
DC_FN int cta_rank() { return cluster_rank(); }
#else
DC_FN int cta_rank() { return 0; }
#endif

// One visit of this CTA: q tile `q_tile` of q head `q_head` of the group.
struct Step {
  int q_tile, q_head;
  int tile_index;  // among all q tiles of all q heads of the batch
  u32 ticket;      // its turn in that dq
};

// Up to BATCH_STEPS steps of one kv tile, made by the planner and read by all other roles. A kv
// tile without steps is one empty batch; a batch with `stop` ends the kernel.
constexpr int BATCH_STEPS = 8, N_BATCH = 4;
static_assert(BATCH_STEPS < WARP_SIZE, "one lane a step");
struct Batch {
  Step steps[BATCH_STEPS];
  int count;
  int has_steps;    // whether the kv tile has any
  int kv_tile0;     // kv tiles with steps of this CTA before this one
  int masked;       // whether keys must be hidden (needs_mask): in all steps of a batch, or none
  int is_first, is_last;  // of the kv tile
  int ends_work;          // last of the work
  int stop;
  int batch, kv_head, row0;  // row0: first key
};

DC_FN void init_barrier(const u64& barrier, int count) {
  mbarrier_init(smem_address(&barrier), count);
}

template <class Barriers>
DC_FN void init_batch_barriers(const Barriers& b, int n_reader) {
#pragma unroll
  for (int s = 0; s < N_BATCH; ++s) {
    init_barrier(b.batch_full[s], 1);
    init_barrier(b.batch_begun[s], 1);
    init_barrier(b.batch_empty[s], n_reader);
  }
}

// Parity of use number n of a barrier whose first wait must pass (empty) or block (full).
DC_FN u32 full_parity(int n) { return u32(n) & 1; }
DC_FN u32 empty_parity(int n) { return (u32(n) & 1) ^ 1; }

// Until what others wrote to shared memory by ordinary stores may be read through the async proxy,
// by wgmma or a bulk copy. The proxy fence only has to lie on the way from the write to the read.
// It is the reader's, for it waits for all that its thread has under way: where the writers are
// those who add to dq, for these additions, too.
DC_FN void wait_written(u32 barrier, u32 parity) {
  mbarrier_wait(barrier, parity);
  fence_async_smem();
}

// What a reader of batches does: waits until the planner has made batch n, and hands it back.
template <class Barriers>
DC_FN void wait_for_batch(const Barriers& b, int n) {
  mbarrier_wait(smem_address(&b.batch_full[n % N_BATCH]), full_parity(n / N_BATCH));
}
// By a lone thread.
template <class Barriers>
DC_FN void free_batch(const Barriers& b, int n) {
  mbarrier_arrive(smem_address(&b.batch_empty[n % N_BATCH]));
}
// By a warp, whose next batch n then is.
template <class Barriers>
DC_FN void next_batch(const Barriers& b, int& n, int lane) {
  mbarrier_arrive_warp(smem_address(&b.batch_empty[n % N_BATCH]), lane);
  ++n;  // behind the arrival: else ptxas serialises the products of bwd_sm90_d192
}

// With DC_DELAY, now and then a pause of random length: tests show that results do not depend on
// who is late.
DC_FN void random_delay(u32 salt) {
#if DC_DELAY
  const u32 hash = (u32(clock()) ^ salt * 0x9e3779b9u) * 0x85ebca6bu;
  if (hash >> 30 == 0) __nanosleep(hash >> 8 & 0x1fff);
#endif
}
