#include "fwd_sm90_consumer.cuh"
#include "fwd_sm90_producer.cuh"

// Registers of a thread, multiples of 8: the pool is what the CTA is launched with, 168 for each of
// 384 threads and 128 for each of 512.
constexpr int PRODUCER_REGISTERS = N_CONSUMER == 2 ? 40 : 32;
constexpr int CONSUMER_REGISTERS = N_CONSUMER == 2 ? 232 : 160;
static_assert(N_CONSUMER == 2 || N_CONSUMER == 3, "register budget");

DC_FN void init_barriers(SharedStorage& smem) {
  constexpr int n_warp = N_CONSUMER * WARPGROUP_SIZE / WARP_SIZE;
  for (int i = 0; i < STAGES; ++i) {
    mbarrier_init(address(smem.k_full[i]), 1);
    mbarrier_init(address(smem.v_full[i]), 1);
    mbarrier_init(address(smem.k_empty[i]), n_warp);
    mbarrier_init(address(smem.v_empty[i]), n_warp);
  }
  for (int i = 0; i < Q_STAGES; ++i) {
    mbarrier_init(address(smem.q_full[i]), 1);
    mbarrier_init(address(smem.q_empty[i]), 1);
  }
  for (int i = 0; i < 2; ++i) {
    mbarrier_init(address(smem.verdict[i]), n_warp);
    mbarrier_init(address(smem.out_full[i]), n_warp);
    smem.failed[i] = 0;
  }
  mbarrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(N_THREAD, 1)
    fwd_sm90(const __grid_constant__ ForwardSm90Params params) {
  SharedStorage& smem = shared_storage();
  const int warpgroup = warpgroup_index();
  if (threadIdx.x == 0) init_barriers(smem);
  __syncthreads();
  if (warpgroup == 0) {
    drop_registers<PRODUCER_REGISTERS>();
    const int warp = warp_in_warpgroup();
    if (threadIdx.x % WARP_SIZE != 0) return;
    if (warp == 0) produce(params, smem);
    if (warp == 1) store(params, smem);
  } else {
    raise_registers<CONSUMER_REGISTERS>();
    Consumer(params, smem, warpgroup - 1).run();
  }
}
