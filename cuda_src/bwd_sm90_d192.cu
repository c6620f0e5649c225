// The backward on Hopper, head_dim 136 to 192: as bwd_sm90_d64, with dk and dv in a warpgroup each.
//
//   S = q k^T * scale     P = exp2(S - lse)     dP = dout v^T     dS = P (dP - delta)
//   dv = P^T dout         dk = dS^T q * scale   dq = dS k * scale
//
// A step is 64 q rows by 96 keys. One warpgroup makes the scores and dq; two more hold dv and dk of
// the kv tile, whose products run beside its arithmetic. bwd_preprocess runs before (lse_log2 and
// delta, semaphores at zero), bwd_postprocess after (dq from dq_accum).
//
//   Roles        warps   regs   does
//   producer     0       24     k, v of a kv tile, q, dout, lse, delta of a step -> shared memory
//   turn         1       24     waits for the ticket of a step, and ends its turn
//   planner      3       24     works from the counter -> batches of steps for all other roles
//   softmax      4..7    136    S, P, dP, dS, dq (bwd_sm90_d192_softmax.cuh)
//   dv, dk       8..15   176    dv, dk -> global memory (bwd_sm90_d192_gradient.cuh)
//
// Barriers stand in bwd_sm90_d192_layout.cuh. Between CTAs there is dq_semaphore
// (tile/turnstile.cuh).
#include "bwd_sm90_d192_layout.cuh"
#include "bwd_sm90_d192_gradient.cuh"
#include "bwd_sm90_d192_softmax.cuh"
#include "bwd_sm90_planner.cuh"
#include "bwd_sm90_producer.cuh"
#include "bwd_sm90_turns.cuh"

extern "C" __global__ void __launch_bounds__(N_THREAD, 1)
    bwd_sm90_d192(const __grid_constant__ BackwardParams params,
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
    else if (warp == FIRST_TURN_WARP && lane == 0)
      take_turns(smem, params, 0);
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
}
