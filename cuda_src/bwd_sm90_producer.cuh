// The Hopper backwards for head_dim 72 to 192, the producer: tiles into shared memory, by tensor
// maps.
//
// Included behind a layout: tiles, ROW_TILE_BYTES (of lse and delta), N_Q_STAGE, N_DOUT_STAGE,
// q_empty and dout_empty, ONE_STAGE (q and dout are handed back together), wait_for_v (until the
// place of v is free for kv tile n, whose first step is t), SharedStorage.
#pragma once

// Loads k and v of each kv tile, and q, its rows' lse and delta, and dout of each step.
DC_FN void load_tiles(SharedStorage& smem, const BackwardParams& params, const BackwardMaps& maps) {
  const Barriers& barriers = smem.barriers;
  const int first_row = Mask{params.q_len, params.kv_len, params.mask_offset}.first_row();
  const int q_per_kv = params.n_q_head / params.n_kv_head;
  const auto load_panels = [](const u8* to, int panel_bytes, const TensorMap& map, u32 barrier,
                              int row, int head, int batch) {
#pragma unroll
    for (int panel = 0; panel < N_PANEL; ++panel)
      tma_load(smem_address(to) + panel * panel_bytes, map, barrier, 64 * panel, row, head, batch);
  };
  int t = 0, n_kv_tile = 0;  // steps, and kv tiles with steps, so far
  for (int n = 0;; ++n) {
    const Batch& batch = smem.batches[n % N_BATCH];
    wait_for_batch(barriers, n);
    if (batch.stop) return;
    mbarrier_arrive(smem_address(&barriers.batch_begun[n % N_BATCH]));
    for (int i = 0; i < batch.count; ++i, ++t) {
      const bool new_kv_tile = i == 0 && batch.is_first;
      const u32 kv_full = smem_address(&barriers.kv_full);
      const int q_stage = t % N_Q_STAGE, dout_stage = t % N_DOUT_STAGE;
      const Step step = batch.steps[i];
      const int row = step.q_tile * Q_TILE - first_row;
      const int q_head = batch.kv_head * q_per_kv + step.q_head;
      const u32 q_full = smem_address(&barriers.q_full[q_stage]);
      const u32 dout_full = smem_address(&barriers.dout_full[dout_stage]);
      random_delay(t);
      mbarrier_wait(smem_address(&q_empty(barriers, q_stage)), empty_parity(t / N_Q_STAGE));
      mbarrier_arrive_expect(q_full, Q_TILE_BYTES + ROW_TILE_BYTES);
      load_panels(smem.q[q_stage], Q_TILE_BYTES / N_PANEL, maps.q, q_full, row, q_head,
                  batch.batch);
#if DC_ROW_VALUES
      const u8* rows = reinterpret_cast<const u8*>(params.lse_log2);
      bulk_load(smem_address(smem.rows[q_stage]), rows + i64(step.tile_index) * ROW_TILE_BYTES,
                ROW_TILE_BYTES, q_full);
#else
      const i64 rows = i64(step.tile_index) * Q_TILE;
      bulk_load(smem_address(smem.lse_log2[q_stage]), params.lse_log2 + rows, Q_TILE * 4, q_full);
      bulk_load(smem_address(smem.delta[q_stage]), params.delta + rows, Q_TILE * 4, q_full);
#endif
      if (!ONE_STAGE)  // registers are short: no wait that cannot matter
        mbarrier_wait(smem_address(&dout_empty(barriers, dout_stage)),
                      empty_parity(t / N_DOUT_STAGE));
      mbarrier_arrive_expect(dout_full, Q_TILE_BYTES);
      load_panels(smem.dout[dout_stage], Q_TILE_BYTES / N_PANEL, maps.dout, dout_full, row, q_head,
                  batch.batch);
      if (new_kv_tile) {  // behind q and dout, whose places as a rule are free before those of v, k
        wait_for_v(barriers, n_kv_tile, t);
        mbarrier_arrive_expect(kv_full, 2 * KV_TILE_BYTES);
        load_panels(smem.v, KV_TILE_BYTES / N_PANEL, maps.v, kv_full, batch.row0, batch.kv_head,
                    batch.batch);
        mbarrier_wait(smem_address(&barriers.k_empty), empty_parity(n_kv_tile));
        load_panels(smem.k, KV_TILE_BYTES / N_PANEL, maps.k, kv_full, batch.row0, batch.kv_head,
                    batch.batch);
        ++n_kv_tile;
      }
    }
    free_batch(barriers, n);
  }
}

