// bwd_sm90_wide, the dq writers: panels of dq from shared memory into dq_accum, at their turn.
#pragma once
#include "bwd_sm90_wide_layout.cuh"
#include "tile/turnstile.cuh"

// Writer I adds panel I of each consumer, which come at about the same time. These columns are a
// sum of their own, with a semaphore of their own (dq_semaphore[I]), so the writers do not wait for
// each other. Each takes the steps in order.
//
// Nothing hangs. A step is computed when the parts of the step before it have gone to the writers,
// a part is added when it is computed and its turn has come: the machine of dashcupy/simulate.py
// with slots = 0 does less at a time, in the same order, and does not hang.
//
// DC_UNORDERED: as in bwd_sm90_dq.cuh.
template <int I>
DC_FN void write_dq(SharedStorage& smem, const BackwardParams& params) {
  const Barriers& barriers = smem.barriers;
  int t = 0;  // steps so far
  for (int n = 0;; ++n) {
    const Batch& batch = smem.batches[n % N_BATCH];
    wait_for_batch(barriers, n);
    if (batch.stop) return;
    if (batch.ends_work && batch.count == 0) mbarrier_arrive(smem_address(&barriers.turns_came));
    for (int i = 0; i < batch.count; ++i, ++t) {
      const Step step = batch.steps[i];
      u32* semaphore = params.dq_semaphore + i64(step.tile_index) * DC_SEMAPHORE_STRIDE + I;
      const bool is_first = !DC_UNORDERED && step.ticket == 0;
      if (!DC_UNORDERED && !is_first)
        turnstile_wait_bulk(
            semaphore, Turn{step.tile_index, batch.row0 / KV_TILE, step.q_tile, step.ticket},
            params.report);
      if (batch.ends_work && i + 1 == batch.count)
        mbarrier_arrive(smem_address(&barriers.turns_came));
      random_delay(i);
      float* sum = params.dq_accum + i64(step.tile_index) * (Q_TILE * HEAD_DIM) + I * (Q_TILE * 64);
#pragma unroll
      for (int w = 0; w < N_CONSUMER; ++w) {
        const u32 dq = smem_address(smem.dq[w]);
        mbarrier_wait(smem_address(&barriers.dq_full[I][w]), full_parity(t));
        fence_async_smem();  // stored by the consumer: else the copy may read old bytes
        if (is_first)
          bulk_store(sum + w * (PANELS * Q_TILE * 64), dq, DQ_PANEL_BYTES);
        else
          bulk_add_f32(sum + w * (PANELS * Q_TILE * 64), dq, DQ_PANEL_BYTES);
        bulk_commit();
      }
      bulk_wait<1>();
      mbarrier_arrive(smem_address(&barriers.dq_empty[0]));
      bulk_wait<0>();
      mbarrier_arrive(smem_address(&barriers.dq_empty[1]));
      turnstile_release(semaphore);
    }
    free_batch(barriers, n);
  }
}
