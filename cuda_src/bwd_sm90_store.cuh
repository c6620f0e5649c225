// The Hopper backwards, dk and dv of a kv tile on their way to global memory: a warpgroup puts a
// panel of 64 columns into shared memory and goes on; the copy engine takes it from there.
#pragma once
#include "bwd_sm90_steps.cuh"
#include "params_bwd_sm90.cuh"
#include "ptx/tma.cuh"

// One thread of a warpgroup sends all panels, for it alone can wait for them. Asked anew each time:
// registers are short.
DC_FN bool sends_panels() { return thread_index() % WARPGROUP_SIZE == 0; }

// Until all but the last N panels that this warpgroup has sent are read, so that their places may
// be written again, and all its warps are here. `barrier` is a named one of the warpgroup.
template <int N>
DC_FN void wait_for_panels(int barrier) {
  if (sends_panels()) bulk_wait_read<N>();
  named_barrier_sync(barrier, WARPGROUP_SIZE);
}

// Sends a panel that the warpgroup has written: its keys from `key` on, of the kv head of these
// steps, columns from `column` on. The map leaves out what the array has not.
DC_FN void send_panel(const TensorMap& map, u32 panel, int column, int key, const Batch& batch,
                      int barrier) {
  fence_async_smem();  // each thread, for what it wrote
  named_barrier_sync(barrier, WARPGROUP_SIZE);
  if (!sends_panels()) return;
  tma_store(map, panel, column, key, batch.kv_head, batch.batch);
  bulk_commit();
}

// Before the warpgroup ends, and shared memory with it.
DC_FN void finish_panels() {
  if (sends_panels()) bulk_wait<0>();
}
