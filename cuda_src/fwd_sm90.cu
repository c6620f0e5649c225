// The forward on compute capability 9.0: out and lse, by TMA and wgmma, roles by warpgroup.
//
//   S = q k^T     P = 2^(S scale_log2 - reference)     O += P v     out = O / rowsum(P)
//
// As many CTAs as are resident take q tiles of heads one after another (work_of), each its kv tiles
// from the last to the first. A consumer has 64 rows of the q tile, from S to out: P goes from the
// accumulators of S to the A operands of P v in registers. S of a kv tile is issued together with
// P v of the one before, also where that one belongs to the q tile before; TURN lets one consumer
// at a time issue, so that the exponentials of one run beside the products of another.
//
// Which maximum. P needs a reference that keeps it in range, not the row's maximum. With
// FIXED_REFERENCE (bfloat16) a row's reference follows its maximum over the kv tiles that are
// masked for some row of the warpgroup and the first that is not; the tiles after that take it as
// it is. If then a sum is not below 2^100 or an out not finite, the q tile has failed: it is done
// again as a whole, with TRACK_MAXIMUM, and its results replace the first ones. A NaN fails once,
// and the second time nobody asks. The verdict looks at the q tile alone, so bits do not depend on
// what the CTA did before or does next. float16 ends at 2^16 and always tracks.
//
// Role          who                           regs       does
// planner       warpgroup 0, warp 2, 1 thread 40 or 32   claims q tiles; q into L2
// producer      warpgroup 0, warp 0, 1 thread 40 or 32   hands out q tiles and takes their verdicts
//                                                        (Scheduler); loads q, k, v
// storer        warpgroup 0, warp 1, 1 thread 40 or 32   out from shared to global memory
// consumer 0..  warpgroup 1..                 232 or 160 S, softmax, O; verdict, lse, out
// The first figure is for two consumers, the second for three; so it is below.
//
//   planner --coming_full--> producer --coming_empty--> planner
//
//   producer --q_full, k_full, v_full--> consumers --out_full--> storer
//      ^ ^------k_empty, v_empty, verdict----'                     |
//      '-------------------------q_empty---------------------------'
//
// Barrier       kind   arrivals        signalled by                waited on by     guards
// coming_full   mbar   1               planner                     producer         smem.coming
// coming_empty  mbar   1               producer, at CLAIM_AT       planner          smem.coming
// k_full[s]     mbar   1 + bytes       producer (expect), TMA      consumers        smem.k[s]
// v_full[s]     mbar   1 + bytes       producer (expect), TMA      consumers        smem.v[s]
// k_empty[s]    mbar   consumer warps  consumers, S is complete    producer         smem.k[s]
// v_empty[s]    mbar   consumer warps  consumers, P v is complete  producer         smem.v[s]
// q_full[s]     mbar   1 + bytes       producer (expect), TMA; no  consumers        smem.q[s], slot
//                                      bytes for HOLD and END
// q_empty[s]    mbar   1               storer, out has been read   producer         smem.q[s], slot
// verdict[i]    mbar   consumer warps  consumers, O is complete    producer         smem.failed[i]
// out_full[i]   mbar   consumer warps  consumers, out is in smem   storer           smem.q[s]
// TURN + c      named  256             consumer c - 1 arrives      consumer c       who issues next
// Q_DONE + c    named  128             consumer c                  consumer c       its rows of q
// [s]: of that stage; [i]: slot number modulo N_OPEN, as a slot may be signalled while some before
// it have not been looked at. HOLD and END signal verdict and out_full too. Loads reach wgmma
// through the mbarrier alone; out, written by ordinary stores, needs the fence in
// Consumer::finish_out.
//
// smem, bytes   head_dim 64        96, 128            192               256
//   q, out      49,152 (2 stages)  65,536 (2)         49,152 (1)        65,536 (1)
//               causal mask        98,304 (3)
//   k           65,536 (4 x 128)   65,536 (2 x 128)   73,728 (2 x 96)   81,920 (2 x 80)
//   v           65,536             65,536             73,728            81,920
//   rows         3,840              2,560                  16                16
//   slots, barriers, flags: some 300
// Registers of a consumer: O + S + P
//               32 + 64 + 32       64 + 64 + 32       96 + 48 + 24      128 + 40 + 20
//   of          160                232                232               232
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
  for (int i = 0; i < N_OPEN; ++i) {
    mbarrier_init(address(smem.verdict[i]), n_warp);
    mbarrier_init(address(smem.out_full[i]), n_warp);
    smem.failed[i] = 0;
  }
  mbarrier_init(address(smem.coming_full), 1);
  mbarrier_init(address(smem.coming_empty), 1);
  mbarrier_init_fence();
}

extern "C" __global__ void __launch_bounds__(N_THREAD, 1)
    fwd_sm90(const __grid_constant__ ForwardSm90Params params) {
  SharedStorage& smem = shared_storage();
  const int warpgroup = warpgroup_index();
  if (threadIdx.x == 0) init_barriers(smem);
  if (threadIdx.x == WARP_SIZE) {
    tensor_map_prefetch(params.q_map);
    tensor_map_prefetch(params.k_map);
    tensor_map_prefetch(params.v_map);
  }
  __syncthreads();
  if (warpgroup == 0) {
    drop_registers<PRODUCER_REGISTERS>();
    const int warp = warp_in_warpgroup();
    if (threadIdx.x % WARP_SIZE != 0) return;
    if (warp == 0) produce(params, smem);
    if (warp == 1) store(params, smem);
    if (warp == 2) plan(params, smem);
  } else {
    raise_registers<CONSUMER_REGISTERS>();
    Consumer(params, smem, warpgroup - 1).run();
  }
}
