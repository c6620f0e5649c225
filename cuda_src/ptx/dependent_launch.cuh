// Kernels that start before the one before them in the stream has ended (from 9.0 on; below, and
// in a launch without that attribute, the stream's order holds and these do nothing).
#pragma once
#include "common.cuh"

// All that the kernels before have written is visible after this; ends when they have.
// PTX ISA: griddepcontrol.wait.
DC_FN void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start when every CTA of this one has called this or has ended.
// PTX ISA: griddepcontrol.launch_dependents.
DC_FN void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
