// The turn in the sum of dq: kv tiles add their part of a q tile's dq one after another, in the
// order of their tickets, so that the float32 sum has the same bits in every run.
//
// A q tile of a q head has one semaphore (bwd_sm90_d256: two, its columns are two sums): the number
// of contributors that are done (zeroed before the kernel by bwd_preprocess). The contract, for the
// contributor with ticket t:
//
//   one thread:   turnstile_wait(t)     looks until the count is t, and acquires
//   all threads:  CTA barrier           passes what the one thread has acquired on to all; without
//                                       it another thread may read dq_accum before the add it
//                                       follows
//   all threads:  read dq_accum (t > 0), add, write it back: ordinary loads and stores, for the
//                 turn is exclusive
//   all threads:  CTA barrier           all writes happen before the release; without it the next
//                                       contributor may read half a tile
//   one thread:   turnstile_release     release increment; cumulative over the barrier. The
//                                       instruction holds the only fence that is needed: a fence
//                                       of one's own before it would be a second MEMBAR.
//
// Ticket 0 neither waits nor reads (dq_accum may hold anything). In bwd_sm80 the last ticket does
// not release; in the Hopper backwards it does (with DC_UNORDERED, too): bwd_postprocess waits
// until the count is that of all contributors, and then reads the sum as one that holds the turn.
// In a debug build a wait gives up and says who was stuck; a wait that is given up makes all later
// ones give up too, so that the kernel ends.
//
// With bulk copies (sm_90) dq_accum is written through the async proxy, and one thread does it all:
//
//   turnstile_wait_bulk(t)   turnstile_wait, then a proxy fence: the generic load that saw the
//                            release comes before the asynchronous add. Without it the add may run
//                            ahead of the load, and of the part before it. It stands here, with
//                            the reader, because the path from the last contributor's add to ours
//                            is then: completion, release, acquire, proxy fence, add.
//   bulk store (t = 0) or bulk add, commit
//   bulk_wait<0>             full completion. Its `.read` form only says that shared memory is free
//                            again: the next contributor could add to a sum that is not there yet.
//                            Completion that a thread waited for is visible to its generic proxy,
//                            so no proxy fence is needed between it and the release, nor by
//                            bwd_postprocess, which reads through the generic proxy.
//   turnstile_release        as above; a fence before it would be a second MEMBAR
//
// What the bulk copy reads from shared memory was written by other threads through the generic
// proxy: after their barrier the one thread needs fence.proxy.async for shared memory as well.
//
// With additions from the registers of several warps (bwd_sm90_d64, _d192, _d256) nothing leaves
// the generic proxy, so no proxy fence is needed, and the two CTA barriers are mbarriers:
//
//   one thread:    turnstile_wait or _ready(t), then an arrival at `turn`
//   four warps:    wait for `turn`: what the one thread acquired happened before this
//                  store (t = 0) or red.add, relaxed: the turn is exclusive, so each element has
//                  one addition after another in the order of the releases
//                  an arrival at `dq_added` for each warp, after all its lanes have added
//   the thread:    waits for `dq_added`, turnstile_release: cumulative over the arrivals
#pragma once
#include "ptx/memory.cuh"

// Who waits: for the report of a debug build.
struct Visit {
  int tile_index, kv_tile, q_tile;
};

// One look, for a thread that has something else to do: true when it is this ticket's turn.
DC_FN bool turnstile_ready(const u32* semaphore, u32 ticket) {
  return has_reached(semaphore, ticket);
}

// visit() says who waits; it is asked when that is reported, for registers are short.
template <class GetVisit>
DC_FN void turnstile_wait(const u32* semaphore, u32 ticket, const GetVisit& visit, u32* report) {
#if DC_DEBUG
  for (u32 spin = 0; !turnstile_ready(semaphore, ticket); ++spin) {
    if (ld_acquire(report) != 0) return;
    if (spin < (1u << 22)) continue;
    if (atomicCAS(report, 0u, 1u) == 0) {
      const Visit who = visit();
      report[1] = u32(who.tile_index);
      report[2] = u32(who.kv_tile);
      report[3] = u32(who.q_tile);
      report[4] = ticket;
      report[5] = ld_acquire(semaphore);
    }
    return;
  }
#else
  while (!turnstile_ready(semaphore, ticket)) {
  }
#endif
}

template <class GetVisit>
DC_FN void turnstile_wait_bulk(const u32* semaphore, u32 ticket, const GetVisit& visit,
                               u32* report) {
  turnstile_wait(semaphore, ticket, visit, report);
  fence_async_gmem();
}

DC_FN void turnstile_release(u32* semaphore) { red_release_increment(semaphore); }
