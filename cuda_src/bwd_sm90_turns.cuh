// The Hopper backwards whose softmax warps add dq themselves: who tells them that it is their turn.
//
// Included behind a layout: N_SOFTMAX warpgroups, which take the steps in turn (a power of two),
// barriers turn, dq_added and turns_came.
#pragma once
#include "tile/turnstile.cuh"

static_assert((N_SOFTMAX & (N_SOFTMAX - 1)) == 0, "turns are told apart by bits");
// The turn warp holds a batch until its last part is added, the softmax warps may send that part
// when they know the step N_SOFTMAX on, and a batch may have a single step.
static_assert(N_BATCH > N_SOFTMAX, "else a ring of batches that all wait for one another");

// Turn warp w waits until the ticket of a step of softmax warpgroup w has come, lets it add its
// part, and ends the turn when all its warps have. While they are at it, the warp looks whether the
// ticket of their next step has come too, and says so before the release, whose fence takes about
// as long as a step.
//
// Nothing hangs. A part waits for its turn and, beside that, for parts before it in the order of
// its CTA alone (its own step and, in bwd_sm90_d64 and bwd_sm90_d256, the start of the next one; in
// bwd_sm90_d256 those of both CTAs of the pair); so the machine of dashcupy/simulate.py that adds
// the parts of a CTA, or of a pair, in order proves it. The next step may be one of the next work,
// but not in a team: a CTA of a team takes its next work when the turn of all its parts has come,
// as the contract of the schedules asks (turns_came; a pair: in both CTAs), and what then is left
// of them waits for nobody.
//
// With DC_UNORDERED no part waits for a turn, and all are added, to zeros that bwd_preprocess has
// put there: to measure what the order costs.
DC_FN void take_turns(SharedStorage& smem, const BackwardParams& params, int w) {
  const Barriers& barriers = smem.barriers;
  const u32 turn = smem_address(&barriers.turn[w]);
  const auto semaphore_of = [&](const Step& step) {
    return params.dq_semaphore + i64(step.tile_index) * DC_SEMAPHORE_STRIDE + cta_rank();
  };
  int step0 = -w;        // steps before this batch, less w
  bool granted = false;  // the softmax warps know that the turn of the next step has come
  for (int n = 0;; ++n) {
    wait_for_batch(barriers, n);
    const Batch& batch = smem.batches[n % N_BATCH];
    if (batch.stop) return;
    int i = -step0 & (N_SOFTMAX - 1);
    if (batch.ends_work && i >= batch.count) mbarrier_arrive(smem_address(&barriers.turns_came));
    for (; i < batch.count; i += N_SOFTMAX) {
      const Step& step = batch.steps[i];
      if (!granted) {
        if (!DC_UNORDERED && step.ticket > 0)
          turnstile_wait(
              semaphore_of(step), step.ticket,
              [&]() { return Visit{step.tile_index, batch.row0 / KV_TILE, step.q_tile}; },
              params.report);
        random_delay(i);
        mbarrier_arrive(turn);
      }
      if (batch.ends_work && i + N_SOFTMAX >= batch.count)
        mbarrier_arrive(smem_address(&barriers.turns_came));
      // The next step of this kv tile, if it is in this batch or begins the next one.
      int j = i + N_SOFTMAX, m = n;
      if (j >= batch.count && !batch.is_last) {
        j -= batch.count, ++m;
        wait_for_batch(barriers, m);
      }
      const Batch& there = smem.batches[m % N_BATCH];
      granted = j < there.count && (DC_UNORDERED || turnstile_ready(semaphore_of(there.steps[j]),
                                                                    there.steps[j].ticket));
      u32* semaphore = semaphore_of(step);  // here, as others wait for what is behind the barrier
      mbarrier_wait(smem_address(&barriers.dq_added[w]), full_parity((step0 + i) / N_SOFTMAX));
      if (granted) mbarrier_arrive(turn);
      turnstile_release(semaphore);
    }
    step0 += batch.count;
    free_batch(barriers, n);
  }
}
