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
//   turn         1       24     waits for the ticket of each step
//   release      2       24     ends the turn of each step
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
    if (batch.is_first && batch.has_steps) {
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

// Waits for the ticket of each step, and then lets its softmax warpgroup add its part. Looks for the
// next ticket while the one before is still being used, and leaves the release to another warp: its
// fence takes as long as a step.
//
// Nothing hangs. A part is added once it is computed, its turn has come, and that of all earlier
// steps; a step is computed once the part of two steps before has been added. That is the machine
// of dashcupy/simulate.py with slots = 2 and the writer "pipelined". A CTA of a team takes its next
// work when the turn of all its parts has come, as the contract of the schedules asks (turns_came);
// what then is left of them waits for nobody.
//
// With DC_UNORDERED every part is added when it is computed, to zeros that bwd_preprocess has put
// there: to measure what the order costs.
DC_FN void wait_for_turns(SharedStorage& smem, const BackwardParams& params) {
  const Barriers& barriers = smem.barriers;
  int t = 0;  // steps so far
  for (int n = 0;; ++n) {
    const Batch& batch = smem.batches[n % N_BATCH];
    mbarrier_wait(smem_address(&barriers.batch_full[n % N_BATCH]), full_parity(n / N_BATCH));
    if (batch.stop) return;
    for (int i = 0; i < batch.count; ++i, ++t) {
      const Step step = batch.steps[i];
      const int w = t % N_SOFTMAX;
      if (!DC_UNORDERED && step.ticket > 0)
        turnstile_wait(params.dq_semaphore + i64(step.tile_index) * DC_SEMAPHORE_STRIDE,
                       Turn{step.tile_index / ceil_div(params.q_len, Q_TILE),
                            batch.row0 / KV_TILE, step.q_tile, step.ticket},
                       params.report);
      random_delay(t);
      mbarrier_wait(smem_address(&barriers.turn_used[w]), empty_parity(t / N_SOFTMAX));
      mbarrier_arrive(smem_address(&barriers.turn[w]));
    }
    if (batch.ends_work) mbarrier_arrive(smem_address(&barriers.turns_came));
    mbarrier_arrive(smem_address(&barriers.batch_empty[n % N_BATCH]));
  }
}

// Ends the turn of each step when all warps have added their part.
DC_FN void end_turns(SharedStorage& smem, const BackwardParams& params) {
  const Barriers& barriers = smem.barriers;
  int t = 0;  // steps so far
  for (int n = 0;; ++n) {
    const Batch& batch = smem.batches[n % N_BATCH];
    mbarrier_wait(smem_address(&barriers.batch_full[n % N_BATCH]), full_parity(n / N_BATCH));
    if (batch.stop) return;
    for (int i = 0; i < batch.count; ++i, ++t) {
      const int w = t % N_SOFTMAX;
      mbarrier_wait(smem_address(&barriers.dq_added[w]), full_parity(t / N_SOFTMAX));
      mbarrier_arrive(smem_address(&barriers.turn_used[w]));
      random_delay(t);
      if (!DC_UNORDERED && (batch.not_final >> i & 1))
        turnstile_release(params.dq_semaphore +
                          i64(batch.steps[i].tile_index) * DC_SEMAPHORE_STRIDE);
    }
    mbarrier_arrive(smem_address(&barriers.batch_empty[n % N_BATCH]));
  }
}

extern "C" __global__ void __launch_bounds__(N_THREAD, 1)
    bwd_sm90_d64(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ BackwardMaps maps) {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_bytes);
  const int warpgroup = warpgroup_index(), warp = warp_in_warpgroup();
  const int lane = threadIdx.x % WARP_SIZE;
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();
  if (warpgroup == 0) {
    drop_registers<HELPER_REGISTERS>();
    if (warp == PLANNER_WARP)
      plan_steps(smem, params, lane);
    else if (warp == PRODUCER_WARP && lane == 0)
      load_tiles(smem, params, maps);
    else if (warp == TURN_WARP && lane == 0)
      wait_for_turns(smem, params);
    else if (warp == RELEASE_WARP && lane == 0)
      end_turns(smem, params);
  } else if (warpgroup == GRADIENT_WARPGROUP) {
    raise_registers<GRADIENT_REGISTERS>();
    sum_gradients(smem, params, warp, lane);
  } else {
    raise_registers<SOFTMAX_REGISTERS>();
    compute_scores(smem, params, warpgroup - 1, warp, lane);
  }
}
