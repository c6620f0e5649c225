// Bulk copies by the copy engine, with and without a tensor map (sm_90).
#pragma once
#include "ptx/async_copy.cuh"
#include "tensor_map.cuh"

// Coordinates are in elements, innermost axis first; what lies outside the tensor is read as zero
// and not written. Loads announce their bytes (of the whole box, zeros included) to a barrier.

// PTX ISA: cp.async.bulk.tensor, global to shared.
DC_FN void tma_load(u32 smem, const TensorMap& map, u32 barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}

DC_FN void tma_load(u32 smem, const TensorMap& map, u32 barrier, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

DC_FN void tma_load(u32 smem, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

DC_FN void tma_load(u32 smem, const TensorMap& map, u32 barrier, int c0, int c1, int c2, int c3,
                    int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem),
      "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Brings a box into L2, where a load finds it later; nothing waits for it.
// PTX ISA: cp.async.bulk.prefetch.tensor.
DC_FN void tma_prefetch(const TensorMap& map, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile "
      "[%0, {%1, %2, %3, %4}];" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The map itself, which the first copy would wait for. PTX ISA: prefetch with .tensormap.
DC_FN void tensor_map_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Joins the open group of this thread. PTX ISA: cp.async.bulk.tensor, shared to global.
DC_FN void tma_store(const TensorMap& map, u32 smem, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3}], [%1];" ::"l"(&map),
      "r"(smem), "r"(c0), "r"(c1)
      : "memory");
}

DC_FN void tma_store(const TensorMap& map, u32 smem, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(smem), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

DC_FN void tma_store(const TensorMap& map, u32 smem, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

DC_FN void tma_store(const TensorMap& map, u32 smem, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group "
      "[%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
      "r"(smem), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// Contiguous bytes, a multiple of 16 from and to multiples of 16.
// PTX ISA: cp.async.bulk, global to shared.
DC_FN void bulk_load(u32 smem, const void* gmem, int n_bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(smem),
      "l"(gmem), "r"(n_bytes), "r"(barrier)
      : "memory");
}

// PTX ISA: cp.async.bulk, shared to global.
DC_FN void bulk_store(void* gmem, u32 smem, int n_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(gmem),
               "r"(smem), "r"(n_bytes)
               : "memory");
}

// gmem += smem in float32, each element on its own, no flush to zero.
// PTX ISA: cp.reduce.async.bulk.
DC_FN void bulk_add_f32(float* gmem, u32 smem, int n_bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
      "[%0], [%1], %2;" ::"l"(gmem),
      "r"(smem), "r"(n_bytes)
      : "memory");
}

// Closes the group of this thread's stores and adds. PTX ISA: cp.async.bulk.commit_group.
DC_FN void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most N of this thread's groups are incomplete; complete: written, and visible to it.
// PTX ISA: cp.async.bulk.wait_group.
template <int N>
DC_FN void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Until shared memory of all but the last N groups may be written again.
template <int N>
DC_FN void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// What this thread wrote to shared memory, and what others did that it knows of by a barrier, is
// seen by copies and wgmma that start after it. It waits for all memory operations of this thread.
// PTX ISA: membar/fence, fence.proxy.async.
DC_FN void fence_async_smem() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
