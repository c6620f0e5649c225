// The backward on Hopper, head_dim 72 to 128: dq, dk, dv of one pass, dq summed in ticket order.
//
//   S = q k^T * scale     P = exp2(S - lse)     dP = dout v^T     dS = P (dP - delta)
//   dv = P^T dout         dk = dS^T q * scale   dq = dS k * scale
//
// A CTA takes pieces of work from a counter: one or two kv tiles of a kv head. k and v of the tile
// stay in shared memory, dk and dv in registers, while it visits the q tiles of all q heads of the
// group, at each step of the schedule one of each. bwd_preprocess runs before (rows of lse and
// delta, semaphores at zero), bwd_postprocess after (dq from dq_accum).
//
//   Roles        warps   regs   does
//   producer     0       24     k, v of a kv tile, q, dout, row values of a step -> shared memory
//   dq_writer    1, 2    24     dq_part of every second step -> dq_accum, at its turn
//   planner      3       24     works from the counter -> batches of steps for all other roles
//   consumer     4..11   240    the products; dk, dv -> global memory (bwd_sm90_math.cuh)
//
// Barriers stand in bwd_sm90_layout.cuh. Between CTAs there is dq_semaphore (tile/turnstile.cuh).
#include "bwd_sm90_dq.cuh"
#include "bwd_sm90_layout.cuh"
#include "bwd_sm90_math.cuh"
#include "bwd_sm90_planner.cuh"
#include "bwd_sm90_producer.cuh"

extern "C" __global__ void __launch_bounds__(N_THREAD, 1)
    bwd_sm90(const __grid_constant__ BackwardParams params,
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
    else if (warp >= FIRST_WRITER_WARP && lane == 0)
      write_dq(smem, params, warp - FIRST_WRITER_WARP);
  } else {
    raise_registers<CONSUMER_REGISTERS>();
    if (dq_columns(0) == dq_columns(1))
      consume<dq_columns(0)>(smem, params, maps, warpgroup - 1, warp, lane);
    else if (warpgroup == 1)
      consume<dq_columns(0)>(smem, params, maps, 0, warp, lane);
    else
      consume<dq_columns(1)>(smem, params, maps, 1, warp, lane);
  }
}
