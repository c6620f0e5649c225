// The Hopper backwards, the planner: works from the counter, as batches of steps.
//
// Included behind a layout: SharedStorage with `batches`, barriers batch_full, batch_begun,
// batch_empty and turns_came, and init_barriers; Q_TILE, KV_TILE; needs_mask, which says whether
// keys of a step must be hidden; note_left, which keeps how many steps the kv tile has from a batch
// on, if anybody asks.
#pragma once

// What every thread of a Hopper backward does first.
DC_FN SharedStorage& open_shared_storage() {
  extern __shared__ __align__(1024) u8 smem_bytes[];
  SharedStorage& smem = *reinterpret_cast<SharedStorage*>(smem_bytes);
  if (threadIdx.x == 0) init_barriers(smem);
#if DC_CLUSTER > 1
  cluster_sync();
#else
  __syncthreads();
#endif
  wait_for_kernels_before();  // row values, semaphores, counter
  return smem;
}

// Writes batch n: steps from `done` on of a kv tile, up to BATCH_STEPS and as far as all or none
// need a mask. Returns how many.
DC_FN int plan_batch(SharedStorage& smem, const BackwardParams& params,
                     const schedule::Shape& shape, int n_kv_head, const schedule::HeadWork& place,
                     int part, int kv_tile, int done, int n, int lane) {
  compute_late(n);  // registers are short: nothing that follows from these outlives a batch
  compute_late(n_kv_head);
  compute_late(kv_tile);
  const Mask mask{params.q_len, params.kv_len, params.mask_offset};
  const int q_per_kv = params.n_q_head / n_kv_head;
  const int n_step = schedule::num_steps(shape, kv_tile);
  const int left = n_step * q_per_kv - done;
  Batch& batch = smem.batches[n % N_BATCH];
  bool masked = false;
  if (lane < min_int(BATCH_STEPS, left)) {
    Step step;
    const int number = (done + lane) / q_per_kv;  // in the order of the schedule
    step.q_head = done + lane - number * q_per_kv;
    step.q_tile = schedule::q_tile(shape, kv_tile, number);
    step.ticket = u32(schedule::ticket(shape, kv_tile, step.q_tile));
    step.tile_index = (place.head * q_per_kv + step.q_head) * shape.n_q + step.q_tile;
    batch.steps[lane] = step;
    masked = needs_mask(mask, step.q_tile * Q_TILE, kv_tile * KV_TILE);
  }
  const u32 masked_bits = __ballot_sync(0xffffffffu, masked);
  const u32 others = masked_bits & 1 ? ~masked_bits : masked_bits;  // not as step 0
  const int count = min_int(min_int(BATCH_STEPS, left), others ? __ffs(others) - 1 : BATCH_STEPS);
  if (lane == 0) {
    const Batch& before = smem.batches[(n + N_BATCH - 1) % N_BATCH];
    batch.count = count;
    batch.kv_tile0 = n == 0 ? 0 : before.kv_tile0 + (before.is_last && before.has_steps);
    batch.has_steps = n_step > 0;
    note_left(smem, n % N_BATCH, left);
    batch.masked = masked_bits & 1;
    batch.is_first = done == 0;
    batch.is_last = count == left;
    batch.ends_work = count == left && part + 1 == schedule::work_size(shape, place.work);
    batch.stop = 0;
    batch.batch = place.head / n_kv_head;
    batch.kv_head = place.head % n_kv_head;
    batch.row0 = kv_tile * KV_TILE + cta_rank() * CTA_KEYS;
  }
  return count;
}

// The next work, from the counter.
DC_FN int take_work(SharedStorage&, const BackwardParams& params, int, int lane) {
  int work = 0;
  if (lane == 0) work = int(atomicAdd(params.work_counter, 1u));
  return __shfl_sync(0xffffffffu, work, 0);
}

// The planner: takes works and lists their steps for everybody else.
template <class TakeWork>
DC_FN void plan_steps(SharedStorage& smem, const BackwardParams& params, int lane,
                      const TakeWork& take_next) {
  let_next_kernel_start();  // bwd_postprocess, which waits for each sum by itself
  const Barriers& barriers = smem.barriers;
  int n = 0;  // batches so far
  const auto wait_for_room = [&]() {
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
    wait_for_room();
    // A work is taken when the last batch of the one before is begun: others may be nearer to it.
    if (n > 0)
      mbarrier_wait(smem_address(&barriers.batch_begun[(n - 1) % N_BATCH]),
                    full_parity((n - 1) / N_BATCH));
    // A CTA with two works of a team could make the team hang (schedules/contract.cuh). Without
    // teams a work waits only for works taken before it, and may be taken while we are busy.
    if (n_work > 0 && schedule::team_size(shape) > 1)
      mbarrier_wait(smem_address(&barriers.turns_came), full_parity(n_work - 1));
    const int work = take_next(smem, params, n_work, lane);
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
        if (part + done > 0) wait_for_room();
        done += plan_batch(smem, params, shape, n_kv_head, place, part, kv_tile, done, n, lane);
        publish();
      } while (!smem.batches[(n + N_BATCH - 1) % N_BATCH].is_last);
    }
  }
}
