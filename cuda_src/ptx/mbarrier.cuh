// mbarriers: arrivals and bytes of asynchronous copies counted in shared memory (sm_90).
#pragma once
#include "ptx/async_copy.cuh"

// Barriers are given by their address in shared memory, 8 bytes each. A wait names the parity of
// the phase it waits for: 0 for the first, then 1, 0, ...; a wait for parity 1 of a new barrier
// returns at once.

// A phase ends after `count` arrivals and all bytes that were expected in it.
// PTX ISA: mbarrier.init.
DC_FN void mbarrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Makes the initialised barriers known to the copy engine; a barrier of all threads must follow.
// PTX ISA: membar/fence, fence.mbarrier_init.
DC_FN void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival; what this thread wrote before is seen by who waits.
// PTX ISA: mbarrier.arrive.
DC_FN void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival, and `n_bytes` more that copies have to deliver in this phase.
// PTX ISA: mbarrier.arrive with .expect_tx.
DC_FN void mbarrier_arrive_expect(u32 barrier, int n_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(n_bytes)
               : "memory");
}

// Whose arrivals pass on what they wrote to who waits: those of this CTA, or of its cluster.
enum class Arrivals { OF_CTA, OF_CLUSTER };

// Whether the phase has ended; the hardware may wait some time before it says no.
// PTX ISA: mbarrier.try_wait.
#define DC_TRY_WAIT(ACQUIRE)                                                 \
  asm volatile(                                                              \
      "{\n\t.reg .pred p;\n\t"                                               \
      "mbarrier.try_wait.parity" ACQUIRE ".shared::cta.b64 p, [%1], %2;\n\t" \
      "selp.u32 %0, 1, 0, p;\n\t}"                                           \
      : "=r"(done)                                                           \
      : "r"(barrier), "r"(parity)                                            \
      : "memory")
template <Arrivals ARRIVALS>
DC_FN bool mbarrier_try_wait(u32 barrier, u32 parity) {
  u32 done;
  if (ARRIVALS == Arrivals::OF_CLUSTER)
    DC_TRY_WAIT(".acquire.cluster");
  else
    DC_TRY_WAIT("");
  return done;
}
#undef DC_TRY_WAIT

// Debug builds give up after some seconds and go on with wrong data: a trap in a loop around wgmma
// makes ptxas forget the register budget of setmaxnreg and serialise the products.
template <Arrivals ARRIVALS = Arrivals::OF_CTA>
DC_FN void mbarrier_wait(u32 barrier, u32 parity) {
#if DC_DEBUG
  for (int i = 0; i < (1 << 22) && !mbarrier_try_wait<ARRIVALS>(barrier, parity); ++i) {
  }
#else
  while (!mbarrier_try_wait<ARRIVALS>(barrier, parity)) {
  }
#endif
}

// One arrival for the whole warp, after all its lanes are done.
DC_FN void mbarrier_arrive_warp(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0) mbarrier_arrive(barrier);
}
