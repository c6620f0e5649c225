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

// Writes batch n: steps from `done` on of a kv tile, up to BATCH_STEPS and as far as all or none
// are cut by the diagonal. Returns how many.
DC_FN int plan_batch(SharedStorage& smem, const BackwardParams& params,
                     const schedule::Shape& shape, int n_kv_head, const schedule::HeadWork& place,
                     int part, int kv_tile, int done, int n, int lane) {
  const Mask mask{params.q_len, params.kv_len, params.mask_offset};
  const int q_per_kv = params.n_q_head / n_kv_head;
  const int n_step = schedule::num_steps(shape, kv_tile);
  const int left = n_step * q_per_kv - done;
  Batch& batch = smem.batches[n % N_BATCH];
  bool masked = false, not_final = false;
  if (lane < min_int(BATCH_STEPS, left)) {
    Step step;
    step.q_head = (done + lane) / n_step;
    step.q_tile = schedule::q_tile(shape, kv_tile, done + lane - step.q_head * n_step);
    const int ticket = schedule::ticket(shape, kv_tile, step.q_tile);
    step.ticket = u32(ticket);
    step.tile_index = (place.head * q_per_kv + step.q_head) * shape.n_q + step.q_tile;
    batch.steps[lane] = step;
    masked = mask.diagonal_cuts(step.q_tile * Q_TILE, kv_tile * KV_TILE, KV_TILE);
    not_final = ticket + 1 < schedule::num_contributors(shape, step.q_tile);
  }
  const u32 masked_bits = __ballot_sync(0xffffffffu, masked);
  const u32 not_final_bits = __ballot_sync(0xffffffffu, not_final);
  const u32 others = masked_bits & 1 ? ~masked_bits : masked_bits;  // not as step 0
  const int count = min_int(min_int(BATCH_STEPS, left), others ? __ffs(others) - 1 : BATCH_STEPS);
  if (lane == 0) {
    const Batch& before = smem.batches[(n + N_BATCH - 1) % N_BATCH];
    batch.count = count;
    batch.kv_tile0 = n == 0 ? 0 : before.kv_tile0 + (before.is_last && before.has_steps);
    batch.has_steps = n_step > 0;
    batch.masked = masked_bits & 1;
    batch.not_final = not_final_bits;
    batch.is_first = done == 0;
    batch.is_last = count == left;
    batch.ends_work = count == left && part + 1 == schedule::work_size(shape, place.work);
    batch.stop = 0;
    batch.batch = place.head / n_kv_head;
    batch.kv_head = place.head % n_kv_head;
    batch.row0 = kv_tile * KV_TILE;
  }
  return count;
}

// The planner: takes works from the counter and lists their steps for everybody else.
DC_FN void plan_steps(SharedStorage& smem, const BackwardParams& params, int lane) {
  const Barriers& barriers = smem.barriers;
  int n = 0;  // batches so far
  const auto wait_for_batch = [&]() {
    mbarrier_wait(smem_address(&barriers.batch_empty[n % N_BATCH]), empty_parity(n / N_BATCH));
  };
  const auto publish = [&]() {
    mbarrier_arrive_warp(smem_address(&barriers.batch_full[n % N_BATCH]), lane);
    ++n;
  };

  for (int n_work = 0;; ++n_work) {
    int q_len = params.q_len, n_kv_head = params.n_kv_head;
    compute_late(q_len);  // registers are short: nothing that follows from these outlives a work
    compute_late(n_kv_head);
    const schedule::Shape shape =
        schedule::make_shape(q_len, params.kv_len, params.mask_offset);
    const int n_head = params.batch * n_kv_head;
    wait_for_batch();
    // A work is taken when the last batch of the one before is begun: others may be nearer to it.
    if (n >= 2)
      mbarrier_wait(smem_address(&barriers.batch_empty[(n - 2) % N_BATCH]),
                    full_parity((n - 2) / N_BATCH));
    // A CTA with two works of a team could make the team hang (schedules/contract.cuh). Without
    // teams a work waits only for works taken before it, and may be taken while we are busy.
    if (n_work > 0 && schedule::team_size(shape) > 1)
      mbarrier_wait(smem_address(&barriers.turns_came), full_parity(n_work - 1));
    int work = 0;
    if (lane == 0) work = int(atomicAdd(params.work_counter, 1u));
    work = __shfl_sync(0xffffffffu, work, 0);
    if (work >= n_head * schedule::num_work(shape)) {
      if (lane == 0) smem.batches[n % N_BATCH].stop = 1;
      publish();
      return;
    }
    const schedule::HeadWork place = schedule::decode(shape, n_head, params.head_group, work);
    for (int part = 0; part < schedule::work_size(shape, place.work); ++part) {
      const int kv_tile = schedule::kv_tile(shape, place.work, part);
      int done = 0;  // steps of the kv tile that are planned
      do {
        if (part + done > 0) wait_for_batch();
        done += plan_batch(smem, params, shape, n_kv_head, place, part, kv_tile, done, n, lane);
        publish();
      } while (!smem.batches[(n + N_BATCH - 1) % N_BATCH].is_last);
    }
  }
}

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
