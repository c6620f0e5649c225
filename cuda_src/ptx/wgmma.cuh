// wgmma: products of a warpgroup, 64 x N x 16 each, from shared memory and registers (sm_90a).
#pragma once
#include "element.cuh"

// Accumulators d[N / 2]: thread t of the warpgroup holds rows 16 (t / 32) + t % 32 / 4 and that
// + 8; d[4 j], d[4 j + 1] are columns 8 j + 2 (t % 4) + {0, 1} of the first row, d[4 j + 2],
// d[4 j + 3] of the second. Two neighbours packed are one register of an A operand: accumulator
// columns 16 k to 16 k + 15, packed in order, are the A operand of k step k.
//
// Operands in shared memory are panels with rows of 64 elements (128 bytes), at a multiple of 1024
// bytes, swizzled: 16-byte chunk c of row r lies at c ^ (r & 7), as the copy engine writes it.
//   K_MAJOR   a row of the panel is one m (or n), its elements are 64 k. A k step is 32 bytes
//             further; the next 64 k are the next panel.
//   MN_MAJOR  a row of the panel is one k, its elements are 64 m (or n). A k step is 2048 bytes
//             further; the next 64 m are the next panel, panel_bytes away.
// PTX ISA: asynchronous warpgroup level matrix instructions, matrix descriptor.
constexpr int K_MAJOR = 0, MN_MAJOR = 1;
constexpr int PANEL_COLUMNS = 64;  // elements of a row of a panel
constexpr int PANEL_ROW_BYTES = 128;
constexpr int K_STEP_BYTES = 32;  // to the next 16 k, K_MAJOR
constexpr int K_STEP_ROWS_BYTES = 16 * PANEL_ROW_BYTES;  // the same, MN_MAJOR

// Low half of a descriptor; add bytes / 16 to move on. panel_bytes counts for MN_MAJOR only. An
// address of a CTA in a cluster has too many bits for it: give its smem_offset (ptx/cluster.cuh).
DC_FN u32 descriptor_low(u32 smem, int panel_bytes = 16) {
  return smem >> 4 | u32(panel_bytes >> 4) << 16;
}

// The descriptor; the high half is always 128-byte swizzle, 1024 bytes from 8 rows to the next 8.
DC_FN u64 descriptor(u32 low) {
  u64 r;
  asm("mov.b64 %0, {%1, %2};" : "=l"(r) : "r"(low), "r"(1u << 30 | 1024u >> 4));
  return r;
}

// From k step 0 to k step k of an operand, for `descriptor_low`; panel_bytes from 64 k to the next.
DC_FN constexpr u32 k_major_step(int k, int panel_bytes) {
  return u32(k / 4 * panel_bytes + k % 4 * K_STEP_BYTES) / 16;
}
DC_FN constexpr u32 mn_major_step(int k) { return u32(k * K_STEP_ROWS_BYTES) / 16; }

// Before the first product that reads registers written by other instructions.
// PTX ISA: wgmma.fence.
DC_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of products. PTX ISA: wgmma.commit_group.
DC_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most N groups are under way. PTX ISA: wgmma.wait_group.
template <int N>
DC_FN void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// No use of x may move above this point: x is the result of products just waited for.
template <int N>
DC_FN void keep_below(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// x stays where it is up to this point: additions to memory read their registers late, and what is
// written over those waits for them.
template <int N>
DC_FN void keep_alive(const float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" ::"f"(x[i]));
}

// The five forms below, for one N:
//   wgmma_ss<A, B>(d, a, b)     d += a b, both from shared memory; A, B: K_MAJOR or MN_MAJOR
//   wgmma_ss_first<A, B>(...)   d = a b: what was in d is not read, so its registers were free
//   wgmma_rs<B>(d, a, b)        d += a b, a in four registers
//   wgmma_rs_first<B>(d, a, b)  d = a b
//   wgmma_rs_first_bf16<B>(...) d = a b, with bfloat16 elements in every build: for values that
//                               float16 cannot hold
// N follows from the length of d. The elements of the other four are those of the build.
#if DC_BF16
#define DC_WGMMA_NAME(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "
#else
#define DC_WGMMA_NAME(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 "
#endif

#define DC_WGMMA_BF16_NAME(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "

// The accumulators as operands of an asm, and their names in its text.
#define DC_ADD(x) "+f"(x)
#define DC_SET(x) "=f"(x)
#define DC_D8(USE, i) \
  USE(d[i]), USE(d[i + 1]), USE(d[i + 2]), USE(d[i + 3]), USE(d[i + 4]), USE(d[i + 5]), \
      USE(d[i + 6]), USE(d[i + 7])
#define DC_D16(USE, i) DC_D8(USE, i), DC_D8(USE, i + 8)
#define DC_D32(USE, i) DC_D16(USE, i), DC_D16(USE, i + 16)
#define DC_D64(USE, i) DC_D32(USE, i), DC_D32(USE, i + 32)
#define DC_OPERANDS_16(USE) DC_D16(USE, 0)
#define DC_OPERANDS_40(USE) DC_D32(USE, 0), DC_D8(USE, 32)
#define DC_OPERANDS_32(USE) DC_D32(USE, 0)
#define DC_OPERANDS_48(USE) DC_D32(USE, 0), DC_D16(USE, 32)
#define DC_OPERANDS_64(USE) DC_D64(USE, 0)
#define DC_OPERANDS_96(USE) DC_D64(USE, 0), DC_D32(USE, 64)
#define DC_OPERANDS_128(USE) DC_D64(USE, 0), DC_D64(USE, 64)

#define DC_NAMES_16 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define DC_NAMES_32 \
  DC_NAMES_16 ", " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DC_NAMES_40 \
  DC_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define DC_NAMES_48 \
  DC_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define DC_NAMES_64 \
  DC_NAMES_48 ", " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DC_NAMES_80 \
  DC_NAMES_64 ", " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define DC_NAMES_88 \
  DC_NAMES_80 ", " \
  "%80, %81, %82, %83, %84, %85, %86, %87"
#define DC_NAMES_96 \
  DC_NAMES_88 ", " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define DC_NAMES_128 \
  DC_NAMES_96 ", " \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, " \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, " \
  "%123, %124, %125, %126, %127"

// P0 .. P5 are the names of the first operands after the accumulators. PTX ISA: wgmma.mma_async.
#define DC_WGMMA(N, R, P0, P1, P2, P3, P4, P5) \
  template <int A, int B> \
  DC_FN void wgmma_ss(float (&d)[R], u64 a, u64 b) { \
    asm volatile(DC_WGMMA_NAME(N) "{" DC_NAMES_##R "}, " P0 ", " P1 ", 1, 1, 1, " P2 ", " P3 ";" \
                 : DC_OPERANDS_##R(DC_ADD) \
                 : "l"(a), "l"(b), "n"(A), "n"(B)); \
  } \
  template <int A, int B> \
  DC_FN void wgmma_ss_first(float (&d)[R], u64 a, u64 b) { \
    asm volatile(DC_WGMMA_NAME(N) "{" DC_NAMES_##R "}, " P0 ", " P1 ", 0, 1, 1, " P2 ", " P3 ";" \
                 : DC_OPERANDS_##R(DC_SET) \
                 : "l"(a), "l"(b), "n"(A), "n"(B)); \
  } \
  template <int B> \
  DC_FN void wgmma_rs(float (&d)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
    asm volatile(DC_WGMMA_NAME(N) "{" DC_NAMES_##R "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 \
                 ", 1, 1, 1, " P5 ";" \
                 : DC_OPERANDS_##R(DC_ADD) \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(B)); \
  } \
  template <int B> \
  DC_FN void wgmma_rs_first(float (&d)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
    asm volatile(DC_WGMMA_NAME(N) "{" DC_NAMES_##R "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 \
                 ", 0, 1, 1, " P5 ";" \
                 : DC_OPERANDS_##R(DC_SET) \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(B)); \
  } \
  template <int B> \
  DC_FN void wgmma_rs_first_bf16(float (&d)[R], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) { \
    asm volatile(DC_WGMMA_BF16_NAME(N) "{" DC_NAMES_##R "}, {" P0 ", " P1 ", " P2 ", " P3 "}, " P4 \
                 ", 0, 1, 1, " P5 ";" \
                 : DC_OPERANDS_##R(DC_SET) \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "n"(B)); \
  }

DC_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
DC_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
DC_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45")
DC_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53")
DC_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
DC_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101")
DC_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef DC_WGMMA
#undef DC_WGMMA_NAME
#undef DC_WGMMA_BF16_NAME
#undef DC_ADD
#undef DC_SET
#undef DC_D8
#undef DC_D16
#undef DC_D32
#undef DC_D64
