// The backward on Hopper, head_dim 200 to 256: as bwd_sm90_d192, by pairs of CTAs.
//
//   S = q k^T * scale     P = exp2(S - lse)     dP = dout v^T     dS = P (dP - delta)
//   dv = P^T dout         dk = dS^T q * scale   dq = dS k * scale
//
// A step of a pair (a cluster of two CTAs) is 64 q rows by 128 keys. Each CTA makes the scores, dk
// and dv of 64 keys, and half of the columns of dq for all 128: it gets dS of the other's keys.
// q and dout are read once for both. bwd_preprocess runs before (lse_log2 and delta, semaphores at
// zero), bwd_postprocess after (dq from dq_accum).
//
//   Roles        warps   regs   does
//   producer     0       32     k, v of a kv tile; q, lse, delta (CTA 0) or dout (CTA 1) of a step,
//                               for both CTAs
//   turn         1       32     waits for the ticket of a step, and ends its turn
//   exchange     2       32     dS -> the other CTA
//   planner      3       32     works -> batches of steps for all other roles; CTA 0 takes them
//                               from the counter for both
//   softmax      4..7    160    S, P, dP, dS, dq (bwd_sm90_d256_softmax.cuh)
//   dv, dk       8..15   160    dv, dk -> global memory (bwd_sm90_d256_gradient.cuh)
//
// Barriers stand in bwd_sm90_d256_layout.cuh. Between pairs there is dq_semaphore, a word for each
// half of the columns (tile/turnstile.cuh).
#include "bwd_sm90_d256_layout.cuh"
#include "bwd_sm90_d256_exchange.cuh"
#include "bwd_sm90_d256_gradient.cuh"
#include "bwd_sm90_d256_softmax.cuh"
#include "bwd_sm90_planner.cuh"
#include "bwd_sm90_turns.cuh"

extern "C" __global__ void __cluster_dims__(DC_CLUSTER, 1, 1) __launch_bounds__(N_THREAD, 1)
    bwd_sm90_d256(const __grid_constant__ BackwardParams params,
                  const __grid_constant__ BackwardMaps maps) {
  const int warpgroup = warpgroup_index(), warp = warp_in_warpgroup();
  const int lane = threadIdx.x % WARP_SIZE;
  SharedStorage& smem = open_shared_storage();
  if (warpgroup == 0) {
    drop_registers<HELPER_REGISTERS>();
    if (warp == PLANNER_WARP)
      plan_steps(smem, params, lane, take_work_of_pair);
    else if (warp == PRODUCER_WARP && lane == 0)
      load_tiles(smem, params, maps);
    else if (warp == FIRST_TURN_WARP && lane == 0)
      take_turns(smem, params, 0);
    else if (warp == EXCHANGE_WARP && lane == 0)
      send_scores(smem);
  } else if (warpgroup == SOFTMAX_WARPGROUP) {
    raise_registers<SOFTMAX_REGISTERS>();
    compute_scores(smem, params, warp, lane);
  } else if (warpgroup == DV_WARPGROUP) {
    raise_registers<GRADIENT_REGISTERS>();
    sum_gradient<true>(smem, params, maps, warp, lane);
  } else {
    raise_registers<GRADIENT_REGISTERS>();
    sum_gradient<false>(smem, params, maps, warp, lane);
  }
  cluster_sync();  // nobody reaches into the shared memory of a CTA that has ended
}
