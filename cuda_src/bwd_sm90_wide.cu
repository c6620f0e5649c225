// The backward on Hopper, head_dim 200 to 256: as bwd_sm90, for rows of which a CTA can hold 64.
//
// Roles, work and the kernels around it are those of bwd_sm90 (its head comment has them), but for
// two: both warpgroups compute all keys of the kv tile, each for half of the columns
// (bwd_sm90_wide_math.cuh), and each dq_writer has half of the columns of both.
//
// Barriers stand in bwd_sm90_wide_layout.cuh. Between CTAs there is dq_semaphore, a word for each
// writer (tile/turnstile.cuh).
#include "bwd_sm90_wide_layout.cuh"
#include "bwd_sm90_planner.cuh"
#include "bwd_sm90_producer.cuh"
#include "bwd_sm90_wide_dq.cuh"
#include "bwd_sm90_wide_math.cuh"

extern "C" __global__ void __launch_bounds__(N_THREAD, 1)
    bwd_sm90_wide(const __grid_constant__ BackwardParams params,
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
    else if (warp == FIRST_WRITER_WARP && lane == 0)
      write_dq<0>(smem, params);
    else if (warp == FIRST_WRITER_WARP + 1 && lane == 0)
      write_dq<1>(smem, params);
  } else {
    raise_registers<CONSUMER_REGISTERS>();
    consume(smem, params, warpgroup - 1, warp, lane);
  }
}
