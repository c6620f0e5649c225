// Vector loads and stores, and the two halves of a hand-over between CTAs.
#pragma once
#include "common.cuh"

// What is written before a red_release_increment of the value seen is visible after this load.
// PTX ISA: ld with .acquire, memory consistency model.
DC_FN u32 ld_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Whether *p has reached v; if so, an acquire load. An acquire empties L1, so those who look often
// do that once: a relaxed load, and a fence behind the last one (sm_90; NVRTC before 12.9 is
// untested). PTX ISA: fence with .acquire; the mapping of C++ loads in its atomics ABI.
DC_FN bool has_reached(const u32* p, u32 v) {
#if __CUDA_ARCH__ >= 900 && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209
  u32 seen;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p) : "memory");
  if (seen < v) return false;
  asm volatile("fence.acquire.gpu;" ::: "memory");
  return true;
#else
  return ld_acquire(p) >= v;
#endif
}

// Adds 1, after everything this thread wrote or saw written (a CTA barrier passes it on) is
// visible, to a count below 2^31 - 1. Not by red.add: with a constant, the compiler has a warp's
// lanes vote who adds for all, between the wait and the release. PTX ISA: red with .release, memory
// consistency model.
DC_FN void red_release_increment(u32* p) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(p), "r"(0x7fffffffu) : "memory");
}

// What this thread read and wrote in global memory so far comes before the bulk copies that it
// starts after this (sm_90). PTX ISA: membar/fence, fence.proxy.async.
DC_FN void fence_async_gmem() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// 16 bytes through L2 only: the line is shared with other SMs and read once here.
DC_FN float4 ld_cg(const float4* p) {
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

DC_FN void st_cg(float4* p, float4 v) {
  asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w)
               : "memory");
}

// Four float32 additions in L2, each an element's own; subnormals count as 0 (sm_90).
// PTX ISA: red with .v4, memory consistency model.
DC_FN void red_add_v4(float4* p, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x),
               "f"(y), "f"(z), "f"(w)
               : "memory");
}

DC_FN void st_shared(u32 smem, u32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(v) : "memory");
}

DC_FN void st_shared_v4(u32 smem, const u32 (&v)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}

DC_FN void st_shared_v4(u32 smem, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(smem), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}

DC_FN void st_shared_v2(u32 smem, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(smem), "f"(x), "f"(y) : "memory");
}

DC_FN float2 ld_shared_f32_v2(u32 smem) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(smem) : "memory");
  return v;
}

DC_FN void ld_shared_v4(u32 (&v)[4], u32 smem) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(smem)
               : "memory");
}

DC_FN u32 ld_shared(u32 smem) {
  u32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(smem) : "memory");
  return v;
}

DC_FN float ld_shared_f32(u32 smem) { return __uint_as_float(ld_shared(smem)); }
