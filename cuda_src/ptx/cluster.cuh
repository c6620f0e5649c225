// Clusters: CTAs that run side by side and reach into one another's shared memory (sm_90).
#pragma once
#include "ptx/tma.cuh"

// An address in shared memory here is that of the same thing in every CTA of the cluster;
// cluster_address makes the one of another CTA (or of this one) of it. Only what says so below
// takes such an address.

// Number of this CTA in its cluster. PTX ISA: special registers, %cluster_ctarank.
DC_FN int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// An address without what tells the CTAs apart, the bits from 18 on.
DC_FN u32 smem_offset(const void* p) { return smem_address(p) & 0x3ffff; }

// PTX ISA: mapa.
DC_FN u32 cluster_address(u32 smem, int rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(smem), "r"(rank));
  return r;
}

// Waits for all threads of all CTAs; what they wrote before is seen after it.
// PTX ISA: barrier.cluster.
DC_FN void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n\t"
      "barrier.cluster.wait.acquire;" ::: "memory");
}

// One arrival at a barrier given by its cluster_address; what this thread wrote before is seen by
// who waits there for Arrivals::OF_CLUSTER. PTX ISA: mbarrier.arrive.
DC_FN void mbarrier_arrive_cluster(u32 barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// The same for a whole warp that hands back memory which it has only read: nothing it wrote is
// passed on, and a release to the cluster would wait for all that the warp has under way.
DC_FN void mbarrier_free_cluster_warp(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0)
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// To a cluster_address. PTX ISA: st, .shared::cluster.
DC_FN void store_cluster(u32 to, u32 value) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

// As tma_load, into the shared memory of every CTA whose bit is set in `ranks`, each of which
// counts the bytes at its own barrier. PTX ISA: cp.async.bulk.tensor, .multicast::cluster.
DC_FN void tma_load_multicast(u32 smem, const TensorMap& map, u32 barrier, u16 ranks, int c0,
                              int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(smem),
      "l"(&map), "r"(barrier), "h"(ranks), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// As bulk_load, likewise. PTX ISA: cp.async.bulk, .multicast::cluster.
DC_FN void bulk_load_multicast(u32 smem, const void* gmem, int n_bytes, u32 barrier, u16 ranks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(smem),
      "l"(gmem), "r"(n_bytes), "r"(barrier), "h"(ranks)
      : "memory");
}

// From this CTA's shared memory to a cluster_address, whose CTA counts the bytes at its barrier,
// given by its cluster_address. PTX ISA: cp.async.bulk, shared::cta to shared::cluster.
DC_FN void bulk_copy_cluster(u32 to, u32 from, int n_bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(to),
      "r"(from), "r"(n_bytes), "r"(barrier)
      : "memory");
}
