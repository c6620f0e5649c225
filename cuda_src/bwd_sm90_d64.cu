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
#include "bwd_sm90_turns.cuh"

// The producer: loads k and v of each kv tile, and q, dout, lse and delta of each step.
DC_FN void load_tiles(SharedStorage& smem, const BackwardParams& params, const BackwardMaps& maps) {
  const Barriers& barriers = smem.barriers;
  const int first_row = Mask{params.q_len, params.kv_len, params.mask_offset}.first_row();
  const int q_per_kv = params.n_q_head / params.n_kv_head;
  int t = 0;  // steps so far
  for (int n = 0;; ++n) {
    const Batch& batch = smem.batches[n % N_BATCH];
    wait_for_batch(barriers, n);
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
    free_batch(barriers, n);
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
      plan_steps(smem, params, lane, take_work);
    else if (warp == PRODUCER_WARP && lane == 0)
      load_tiles(smem, params, maps);
    else if (warp >= FIRST_TURN_WARP && lane == 0)
      take_turns(smem, params, warp - FIRST_TURN_WARP);
  } else if (warpgroup == GRADIENT_WARPGROUP) {
    raise_registers<GRADIENT_REGISTERS>();
    sum_gradients(smem, params, maps, warp, lane);
  } else {
    raise_registers<SOFTMAX_REGISTERS>();
    compute_scores(smem, params, warpgroup - 1, warp, lane);
  }
}
