// bwd_sm90, the dq writers: parts of dq from shared memory into dq_accum, each at its turn.
#pragma once
#include "bwd_sm90_layout.cuh"
#include "tile/turnstile.cuh"

// Writer `slot` takes every second step, the one whose dq_part lies in that slot. Its turn comes
// while the part is still computed, mostly; then it adds, waits until the sum is complete, hands
// the slot back, and ends the turn. The two writers do not wait for each other.
//
// Nothing hangs. A part is added once it is computed and its turn has come, whatever the other
// writer does; a step may be computed when the part of two steps before has been added. That is the
// machine of dashcupy/simulate.py with slots = 2, freed of one rule (parts in order), and freeing a
// rule only lets more happen. A CTA of a team takes its next work when the turn of all its parts
// has come, as the contract of the schedules asks (turns_came); what then is left of them waits for
// nobody.
//
// With DC_UNORDERED every part is added when it is computed, to zeros that bwd_preprocess has put
// there: to measure what the order costs.
DC_FN void write_dq(SharedStorage& smem, const BackwardParams& params, int slot) {
  const Barriers& barriers = smem.barriers;
  const u32 dq_full = smem_address(&barriers.dq_full[slot]);
  const u32 dq_empty = smem_address(&barriers.dq_empty[slot]);
  const u32 dq = smem_address(smem.dq[slot]);
  int step0 = 0;  // steps before this batch
  for (int n = 0;; ++n) {
    const Batch& batch = smem.batches[n % N_BATCH];
    wait_for_batch(barriers, n);
    if (batch.stop) return;
    int i = (slot ^ step0) & 1;
    if (batch.ends_work && i >= batch.count) mbarrier_arrive(smem_address(&barriers.turns_came));
    for (; i < batch.count; i += N_WRITER) {
      const Step step = batch.steps[i];
      u32* semaphore = params.dq_semaphore + i64(step.tile_index) * DC_SEMAPHORE_STRIDE;
      const bool is_first = !DC_UNORDERED && step.ticket == 0;
      if (!DC_UNORDERED && !is_first)
        turnstile_wait_bulk(
            semaphore, step.ticket,
            [&]() { return Visit{step.tile_index, batch.row0 / KV_TILE, step.q_tile}; },
            params.report);
      if (batch.ends_work && i + N_WRITER >= batch.count)
        mbarrier_arrive(smem_address(&barriers.turns_came));
      random_delay(i);
      wait_written(dq_full, full_parity((step0 + i) / N_STAGE));
      float* sum = params.dq_accum + i64(step.tile_index) * (Q_TILE * HEAD_DIM);
      if (is_first)
        bulk_store(sum, dq, DQ_BYTES);
      else
        bulk_add_f32(sum, dq, DQ_BYTES);
      bulk_commit();
      bulk_wait<0>();
      mbarrier_arrive(dq_empty);
      turnstile_release(semaphore);
    }
    step0 += batch.count;
    free_batch(barriers, n);
  }
}
