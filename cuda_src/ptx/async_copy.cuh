// cp.async: copies from global to shared memory that run beside the arithmetic (sm_80 and later).
#pragma once
#include "common.cuh"

DC_FN u32 smem_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// 16 bytes; with `valid` false nothing is read and zeros are written.
// PTX ISA: data movement, cp.async.
DC_FN void cp_async_16(u32 smem, const void* gmem, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
               "r"(valid ? 16 : 0)
               : "memory");
}

DC_FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most N of this thread's groups are under way.
template <int N>
DC_FN void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
