// The backward on Hopper, head_dim 128: dq, dk, dv of one pass, dq summed in ticket order.
//
//   S = q k^T * scale     P = exp2(S - lse)     dP = dout v^T     dS = P (dP - delta)
//   dv = P^T dout         dk = dS^T q * scale   dq = dS k * scale
//
// A CTA takes pieces of work from a counter: one or two kv tiles of a kv head. k and v of the tile
// stay in shared memory, dk and dv in registers, while it visits the q tiles of all q heads of the
// group in the order of the schedule. bwd_preprocess runs before (rows of lse and delta, semaphores
// at zero), bwd_postprocess after (dq from dq_accum).
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

// The producer: loads k and v of each kv tile, and q, row values and dout of each step.
DC_FN void load_tiles(SharedStorage& smem, const BackwardParams& params, const BackwardMaps& maps) {
  const Barriers& barriers = smem.barriers;
  const int first_row = Mask{params.q_len, params.kv_len, params.mask_offset}.first_row();
  const int q_per_kv = params.n_q_head / params.n_kv_head;
  const auto load_panels = [](const u8* to, int panel_bytes, const TensorMap& map, u32 barrier,
                              int row, int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < HEAD_DIM / 64; ++panel)
      tma_load(smem_address(to) + panel * panel_bytes, map, barrier, 64 * panel, row, head, batch);
  };
  int t = 0, n_kv_tile = 0;  // steps, and kv tiles with steps, so far
  for (int n = 0;; ++n) {
    const Batch& batch = smem.batches[n % N_BATCH];
    mbarrier_wait(smem_address(&barriers.batch_full[n % N_BATCH]), full_parity(n / N_BATCH));
    if (batch.stop) return;
    for (int i = 0; i < batch.count; ++i, ++t) {
      const bool new_kv_tile = i == 0 && batch.is_first;
      const u32 kv_full = smem_address(&barriers.kv_full);
      if (new_kv_tile) {
        mbarrier_wait(smem_address(&barriers.v_empty), empty_parity(n_kv_tile));
        mbarrier_arrive_expect(kv_full, 2 * KV_TILE_BYTES);
        load_panels(smem.v, KV_TILE_BYTES / 2, maps.v, kv_full, batch.row0, batch.kv_head,
                    batch.batch);
      }
      const int stage = t % N_STAGE;
      const Step step = batch.steps[i];
      const int row = step.q_tile * Q_TILE - first_row;
      const int q_head = batch.kv_head * q_per_kv + step.q_head;
      const u32 q_full = smem_address(&barriers.q_full[stage]);
      const u32 dout_full = smem_address(&barriers.dout_full[stage]);
      random_delay(t);
      mbarrier_wait(smem_address(&barriers.stage_empty[stage]), empty_parity(t / N_STAGE));
      mbarrier_arrive_expect(q_full, Q_TILE_BYTES + ROW_TILE_BYTES);
      load_panels(smem.q[stage], Q_TILE_BYTES / 2, maps.q, q_full, row, q_head, batch.batch);
      const u8* rows = reinterpret_cast<const u8*>(params.lse_log2);
      bulk_load(smem_address(smem.rows[stage]), rows + i64(step.tile_index) * ROW_TILE_BYTES,
                ROW_TILE_BYTES, q_full);
      mbarrier_arrive_expect(dout_full, Q_TILE_BYTES);
      load_panels(smem.dout[stage], Q_TILE_BYTES / 2, maps.dout, dout_full, row, q_head,
                  batch.batch);
      if (new_kv_tile) {  // last, for k is the last that the kv tile before lets go
        mbarrier_wait(smem_address(&barriers.k_empty), empty_parity(n_kv_tile));
        load_panels(smem.k, KV_TILE_BYTES / 2, maps.k, kv_full, batch.row0, batch.kv_head,
                    batch.batch);
        ++n_kv_tile;
      }
    }
    mbarrier_arrive(smem_address(&barriers.batch_empty[n % N_BATCH]));
  }
}

extern "C" __global__ void __launch_bounds__(N_THREAD, 1)
    bwd_sm90(const __grid_constant__ BackwardParams params,
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
    else if (warp >= FIRST_WRITER_WARP && lane == 0)
      write_dq(smem, params, warp - FIRST_WRITER_WARP);
  } else {
    raise_registers<CONSUMER_REGISTERS>();
    consume(smem, params, warpgroup - 1, warp, lane);
  }
}
