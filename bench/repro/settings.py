"""What makes all but attention repeat to the bit, set in one place and kept in the record."""

from __future__ import annotations

import os

import torch

# Read by the libraries when a process first uses them, so `apply` comes before any of that.
ENVIRONMENT = {
    # cuBLAS picks its algorithm by the workspace that it finds; a fixed one of its own for each
    # stream is NVIDIA's condition for equal bits, and PyTorch's deterministic mode insists on it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # NCCL chooses among rings, trees and sums inside the switch by tables and by what it finds at
    # run time; each adds in another order. One ring, one protocol, no NVLink SHARP: one order.
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NVLS_ENABLE": "0",
}


def apply() -> dict:
    """Make PyTorch's own operators deterministic, in this process; before the first use of a GPU.

    Returns
    -------
    dict
        What was set, for the record.
    """
    os.environ.update(ENVIRONMENT)
    # Operators with a deterministic form take it (the backward of indexing sorts instead of using
    # atomics), those without one raise. Embedding and cross entropy need no more: both sum in a
    # fixed order.
    torch.use_deterministic_algorithms(True)
    # Deterministic mode also fills every new tensor with NaN, to show reads of memory that nobody
    # wrote. That changes no result here, and would be counted as time of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # A float32 product is one: never TF32, never three bfloat16 products. And a bfloat16 product
    # adds its parts in float32.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    # No timing decides which algorithm runs.
    torch.backends.cudnn.benchmark = False
    return {
        "environment": dict(ENVIRONMENT),
        "use_deterministic_algorithms": True,
        "fill_uninitialized_memory": False,
        "float32_matmul_precision": "highest",
        "allow_bf16_reduced_precision_reduction": False,
        "threads": torch.get_num_threads(),
    }
