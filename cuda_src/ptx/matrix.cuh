// Warp-wide tensor-core instructions of sm_80: ldmatrix and mma.sync.
#pragma once
#include "element.cuh"

// Lane of this thread, read anew at each call: what depends on it stays where the call stands.
// PTX ISA: special registers, %laneid.
DC_FN int lane_id() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
// PTX ISA: warp level matrix load instruction, ldmatrix.
DC_FN void ldmatrix_x4(u32 (&r)[4], u32 smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

// The same, each matrix transposed.
DC_FN void ldmatrix_x4_trans(u32 (&r)[4], u32 smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

// d[16 x 8] += a[16 x 16] b[16 x 8], float32 sums. Lane l holds d rows l / 4 and l / 4 + 8,
// columns 2 (l % 4) + {0, 1}: d[0], d[1] of the first row, d[2], d[3] of the second.
// PTX ISA: mma.m16n8k16 with floating point type. No memory clobber: registers only.
DC_FN void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if DC_BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}
