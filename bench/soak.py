"""Endurance: ``python -m bench.soak``. Many small calls; memory, bits and errors are watched.

Backward calls at mixed shapes, in turns on several streams, with fresh results and workspace from
CuPy's pool each time. Every result is compared on the GPU with that of the first call of its kind.
Each few thousand calls the memory of pool, GPU and process is read, and a few calls run out of
memory half-way. The exit status is 1 if a bit changed, memory grew, or an error was not clean; a
call that hangs ends the process with status 1, too.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

import dashcupy
from dashcupy import driver
from dashcupy.layout import numpy_dtype

from . import harness

# q_len, kv_len, q heads, kv heads, head_dim, causal, schedule.
SHAPES = (
    (1, 1, 1, 1, 64, False, "auto"), (64, 64, 2, 2, 64, True, "auto"),
    (65, 130, 4, 2, 64, True, "symmetric_shift"), (200, 333, 2, 1, 64, False, "shift"),
    (129, 300, 2, 2, 128, True, "shortest_first"), (64, 400, 4, 1, 128, False, "shift"),
    (300, 300, 2, 2, 128, True, "symmetric_shift"), (300, 100, 1, 1, 128, True, "descending"),
)
N_STREAM = 3
HANG_S = 30  # longest time between two readings
# Growth that is no leak: the driver's own pools, Python's.
GPU_SLACK, HOST_SLACK = 4 << 20, 16 << 20

_COMPARE = """
extern "C" __global__ void compare(const unsigned short* x, const unsigned short* y, long long n,
                                   unsigned long long* different) {
  for (long long i = blockIdx.x * 256ll + threadIdx.x; i < n; i += gridDim.x * 256ll)
    if (x[i] != y[i]) atomicAdd(different, 1ull);
}
"""


@dataclass(frozen=True)
class Kind:
    """Arguments of one kind of call, and the gradients of the first such call."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    expected: tuple[Any, ...]

    def call(self) -> tuple[Any, ...]:
        """One backward."""
        return dashcupy.attention_backward(*self.arguments, **self.options)


@dataclass(frozen=True)
class Memory:
    """Bytes in use: of CuPy's pool, of the GPU, of this process."""

    pool: int
    gpu: int
    host: int


def normal(cupy: ModuleType, shape: tuple[int, ...], dtype: str = "bfloat16") -> Any:
    """A CuPy array of normal numbers, the same for a shape each time."""
    x = np.random.default_rng(shape).standard_normal(shape).astype(numpy_dtype(dtype))
    return cupy.asarray(x.view(np.uint16)).view(x.dtype)


def make_kind(cupy: ModuleType, shape: tuple) -> Kind:
    """Random inputs of a shape, and the first results."""
    q_len, kv_len, n_q_head, n_kv_head, head_dim, causal, schedule = shape
    q, dout = normal(cupy, (2, 1, q_len, n_q_head, head_dim))
    k, v = normal(cupy, (2, 1, kv_len, n_kv_head, head_dim))
    out, lse = dashcupy.attention(q, k, v, causal=causal, return_lse=True)
    arguments, options = (dout, q, k, v, out, lse), {"causal": causal, "schedule": schedule}
    return Kind(arguments, options, dashcupy.attention_backward(*arguments, **options))


def comparer(cupy: ModuleType) -> tuple[Callable[[tuple, tuple], None], Any]:
    """What counts different elements on the GPU, and the counter."""
    kernel = cupy.RawKernel(_COMPARE, "compare")
    different = cupy.zeros(1, np.uint64)

    def compare(got: tuple, expected: tuple) -> None:
        for x, y in zip(got, expected):
            kernel((min(8, -(-x.size // 256)),), (256,), (x, y, np.int64(x.size), different))
    return compare, different


def read_memory(cupy: ModuleType) -> Memory:
    """Wait for the GPU, and look."""
    cupy.cuda.Device().synchronize()
    gc.collect()
    free, total = cupy.cuda.runtime.memGetInfo()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return Memory(cupy.get_default_memory_pool().used_bytes(), total - free, int(pages) * 4096)


def run_out_of_memory(cupy: ModuleType, kind: Kind) -> list[str]:
    """Calls of which the first, second, ... allocation fails; what is wrong with their end."""
    pool, wrong = cupy.get_default_memory_pool(), []
    cupy.cuda.Device().synchronize()
    before = pool.used_bytes()
    for failing in range(4):  # dq, dk, dv, workspace
        count = itertools.count()

        def allocate(n_bytes, count=count, failing=failing):
            if next(count) == failing:
                raise cupy.cuda.memory.OutOfMemoryError(n_bytes, pool.total_bytes())
            return pool.malloc(n_bytes)

        try:
            with cupy.cuda.using_allocator(allocate):
                kind.call()
            wrong.append(f"a call of which allocation {failing} failed succeeded")
        except cupy.cuda.memory.OutOfMemoryError as error:
            error.__traceback__ = None  # its frames hold the results
        gc.collect()
        if pool.used_bytes() != before:
            wrong.append(f"{pool.used_bytes() - before} bytes stay taken after allocation "
                         f"{failing} failed")
    return wrong


def soak(cupy: ModuleType, n_call: int, n_reading: int, shared_gpu: bool) -> list[str]:
    """Run, print a line for each reading, and return what was wrong."""
    kinds = [make_kind(cupy, shape) for shape in SHAPES]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(N_STREAM)]
    compare, different = comparer(cupy)
    cupy.cuda.Device().synchronize()
    wrong, first, start = [], None, time.perf_counter()
    for reading in range(n_reading + 1):  # the first fills pools and caches
        for i in range(n_call // n_reading):
            kind = kinds[i % len(kinds)]
            with streams[i // len(kinds) % N_STREAM]:
                compare(kind.call(), kind.expected)
        memory = read_memory(cupy)
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        wrong += run_out_of_memory(cupy, kinds[reading % len(kinds)])
        print(f"{reading * (n_call // n_reading):8} calls {time.perf_counter() - start:6.1f} s  "
              f"{int(different.get()[0])} elements changed  pool {memory.pool}  "
              f"GPU {memory.gpu >> 20} MiB  host {memory.host >> 20} MiB", flush=True)
        first = first or memory
    if int(different.get()[0]):
        wrong.append(f"{int(different.get()[0])} elements differ from those of the first call")
    for what, grown, slack in (("pool", memory.pool - first.pool, 0),
                               ("GPU", 0 if shared_gpu else memory.gpu - first.gpu, GPU_SLACK),
                               ("host", memory.host - first.host, HOST_SLACK)):
        if grown > slack:
            wrong.append(f"memory of the {what} grew by {grown} bytes (allowed: {slack})")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m dashcupy bench soak", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=harness.count, default=100_000)
    parser.add_argument("--readings", type=harness.count, default=20)
    parser.add_argument("--shared-gpu", action="store_true",
                        help="others use the GPU, too: what it holds in all says nothing of ours")
    options = parser.parse_args(arguments)
    driver.device(0)  # says so if there is none
    faulthandler.dump_traceback_later(10 * HANG_S, exit=True)  # the first calls compile
    wrong = soak(driver.require_cupy(), options.calls, options.readings, options.shared_gpu)
    faulthandler.cancel_dump_traceback_later()
    print("\n".join(wrong) or f"{options.calls} calls: equal bits, no growth, clean errors")
    return 1 if wrong else 0


if __name__ == "__main__":
    harness.script(main)
