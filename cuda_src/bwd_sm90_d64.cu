// The backward on Hopper, head_dim up to 64: as bwd_sm90.cu, with another main loop.
//
//   S = q k^T * scale     P = exp2(S - lse)     dP = dout v^T     dS = P (dP - delta)
//   dv = P^T dout         dk = dS^T q * scale   dq = dS k * scale
//
// A step is 64 q rows by 128 keys. Two warpgroups take the steps in turn: one's arithmetic runs
// beside the other's products. A third holds dk and dv of the kv tile and follows a step behind.
// bwd_preprocess runs before (lse_log2 and delta, semaphores at zero), bwd_postprocess after (dq
// from dq_accum).
//
//   Roles        warps   regs   does
//   producer     0       24     k, v of a kv tile, q, dout, lse, delta of a step -> shared memory
//   turn         1, 2    24     waits for the ticket of every second step, and ends its turn
//   planner      3       24     works from the counter -> batches of steps for all other roles
//   softmax      4..11   160    S, P, dP, dS, dq of every second step (bwd_sm90_d64_softmax.cuh)
//   gradient     12..15  168    dk, dv -> global memory (bwd_sm90_d64_gradient.cuh)
//
// Barriers stand in bwd_sm90_d64_layout.cuh. Between CTAs there is dq_semaphore
// (tile/turnstile.cuh).
#include "bwd_sm90_d64_gradient.cuh"
#include "bwd_sm90_d64_layout.cuh"
#include "bwd_sm90_d64_softmax.cuh"
#include "bwd_sm90_planner.cuh"
#include "tile/turnstile.cuh"

// The producer: loads k and v of each kv tile, and q, dout, lse and delta of each step.
DC_FN void load_tiles(SharedStorage& smem, const BackwardParams& params, const BackwardMaps& maps) {
  const Barriers& barriers = smem.barriers;
  const int first_row = Mask{params.q_len, params.kv_len, params.mask_offset}.first_row();
  const int q_per_kv = params.n_q_head / params.n_kv_head;
  int t = 0;  // steps so far
  for (int n = 0;; ++n) {
    const Batch& batch = smem.batches[n % N_BATCH];
    mbarrier_wait(smem_address(&barriers.batch_full[n % N_BATCH]), full_parity(n / N_BATCH));
    if (batch.stop) return;
    mbarrier_arrive(smem_address(&barriers.batch_begun[n % N_BATCH]));
    if (batch.is_first && batch.count > 0) {  // without q heads no step and no map
      const int stage = batch.kv_tile0 % N_KV_STAGE;
      const u32 kv_full = smem_address(&barriers.kv_full[stage]);
      mbarrier_wait(smem_address(&barriers.kv_empty[stage]),
                    empty_parity(batch.kv_tile0 / N_KV_STAGE));
      mbarrier_arrive_expect(kv_full, 2 * KV_TILE_BYTES);
      tma_load(smem_address(smem.k[stage]), maps.k, kv_full, 0, batch.row0, batch.kv_head,
               batch.batch);
      tma_load(smem_address(smem.v[stage]), maps.v, kv_full, 0, batch.row0, batch.kv_head,
               batch.batch);
    }
    for (int i = 0; i < batch.count; ++i, ++t) {
      const int stage = t % N_STAGE;
      const Step step = batch.steps[i];
      const int row = step.q_tile * Q_TILE - first_row;
      const int q_head = batch.kv_head * q_per_kv + step.q_head;
      const u32 full = smem_address(&barriers.stage_full[stage]);
      random_delay(t);
      mbarrier_wait(smem_address(&barriers.stage_empty[stage]), empty_parity(t / N_STAGE));
      mbarrier_arrive_expect(full, 2 * Q_TILE_BYTES + 2 * ROW_BYTES);
      tma_load(smem_address(smem.q[stage]), maps.q, full, 0, row, q_head, batch.batch);
      tma_load(smem_address(smem.dout[stage]), maps.dout, full, 0, row, q_head, batch.batch);
      const i64 rows = i64(step.tile_index) * Q_TILE;
      bulk_load(smem_address(smem.lse_log2[stage]), params.lse_log2 + rows, ROW_BYTES, full);
      bulk_load(smem_address(smem.delta[stage]), params.delta + rows, ROW_BYTES, full);
    }
    mbarrier_arrive(smem_address(&barriers.batch_empty[n % N_BATCH]));
  }
}

// Turn warp w waits until the ticket of a step of softmax warpgroup w has come, lets it add its
// part, and ends the turn when all its warps have. While they are at it, the warp looks whether the
// ticket of their next step has come too, and says so before the release, whose fence takes about
// as long as a step.
//
// Nothing hangs. A part is added once it is computed and its turn has come; a step is computed once
// the part of two steps before has been added. That is the machine of dashcupy/simulate.py with
// slots = 2, freed of one rule (parts in order), and freeing a rule only lets more happen. A CTA of
// a team takes its next work when the turn of all its parts has come, as the contract of the
// schedules asks (turns_came); what then is left of them waits for nobody.
//
// With DC_UNORDERED every part is added when it is computed, to zeros that bwd_preprocess has put
// there: to measure what the order costs.
DC_FN void take_turns(SharedStorage& smem, const BackwardParams& params, int w) {
  const Barriers& barriers = smem.barriers;
  const u32 turn = smem_address(&barriers.turn[w]);
  const auto wait_for_batch = [&](int n) {
    mbarrier_wait(smem_address(&barriers.batch_full[n % N_BATCH]), full_parity(n / N_BATCH));
  };
  const auto semaphore_of = [&](const Step& step) {
    return params.dq_semaphore + i64(step.tile_index) * DC_SEMAPHORE_STRIDE;
  };
  int step0 = 0;         // steps before this batch
  bool granted = false;  // the softmax warps know that the turn of the next step has come
  for (int n = 0;; ++n) {
    wait_for_batch(n);
    const Batch& batch = smem.batches[n % N_BATCH];
    if (batch.stop) return;
    int i = (w ^ step0) & 1;
    if (batch.ends_work && i >= batch.count) mbarrier_arrive(smem_address(&barriers.turns_came));
    for (; i < batch.count; i += N_SOFTMAX) {
      const Step& step = batch.steps[i];
      if (!granted) {
        if (!DC_UNORDERED && step.ticket > 0)
          turnstile_wait(semaphore_of(step),
                         Turn{step.tile_index, batch.row0 / KV_TILE, step.q_tile, step.ticket},
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
        wait_for_batch(m);
      }
      const Batch& there = smem.batches[m % N_BATCH];
      granted = j < there.count && (DC_UNORDERED || turnstile_ready(semaphore_of(there.steps[j]),
                                                                    there.steps[j].ticket));
      mbarrier_wait(smem_address(&barriers.dq_added[w]), full_parity((step0 + i) / N_SOFTMAX));
      if (granted) mbarrier_arrive(turn);
      turnstile_release(semaphore_of(step));
    }
    step0 += batch.count;
    mbarrier_arrive(smem_address(&barriers.batch_empty[n % N_BATCH]));
  }
}

extern "C" __global__ void __launch_bounds__(N_THREAD, 1)
    bwd_sm90_d64(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ BackwardMaps maps) {
  const int warpgroup = warpgroup_index(), warp = warp_in_warpgroup();
  const int lane = threadIdx.x % WARP_SIZE;
  SharedStorage& smem = open_shared_storage();
  if (warpgroup == 0) {
    drop_registers<HELPER_REGISTERS>();
    if (warp == PLANNER_WARP)
      plan_steps(smem, params, lane);
    else if (warp == PRODUCER_WARP && lane == 0)
      load_tiles(smem, params, maps);
    else if (warp >= FIRST_TURN_WARP && lane == 0)
      take_turns(smem, params, warp - FIRST_TURN_WARP);
  } else if (warpgroup == GRADIENT_WARPGROUP) {
    raise_registers<GRADIENT_REGISTERS>();
    sum_gradients(smem, params, warp, lane);
  } else {
    raise_registers<SOFTMAX_REGISTERS>();
    compute_scores(smem, params, warpgroup - 1, warp, lane);
  }
}
