"""Other work beside the one that is checked: CTAs and threads start late, and elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from .. import driver, modules

Nudge = Callable[[int], None]
_THREADS = 128  # of a CTA of the load
_SHORTEST_CYCLES, _MORE_CYCLES = 60_000, 50_000


@contextmanager
def on_cpu() -> Iterator[Nudge]:
    """Keep every core busy with a thread each; what is yielded has nothing to do.

    The threads call no BLAS: that may count the threads that are in use, and choose another order
    of its sums, which is not the fault of the caller.
    """
    end = threading.Event()

    def work():
        x = np.linspace(0.0, 1.0, 1 << 14)
        while not end.is_set():
            np.cos(x, out=x)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(os.cpu_count() or 1)]
    for thread in threads:
        thread.start()
    try:
        yield lambda i: None
    finally:
        end.set()
        for thread in threads:
            thread.join()


@contextmanager
def on_gpu() -> Iterator[Nudge]:
    """Call what is yielded before each call: it takes another number of SMs for another time.

    The load runs on a stream of its own, and ends by itself after some 30 to 150 microseconds.
    """
    stream = driver.require_cupy().cuda.Stream(non_blocking=True)
    try:
        yield lambda i: spin(10 + 37 * i % 100, _SHORTEST_CYCLES + _MORE_CYCLES * (i % 5), stream)
    finally:
        stream.synchronize()


def spin(n_cta: int, cycles: int, stream) -> None:
    """Occupy that many SMs of CuPy's current GPU, with all their shared memory, for a while.

    Parameters
    ----------
    n_cta
        SMs.
    cycles
        Clock cycles.
    stream : cupy.cuda.Stream or cupy.cuda.ExternalStream
    """
    device = driver.require_cupy().cuda.runtime.getDevice()
    smem_bytes = driver.device(device).smem_bytes
    kernel = modules.load("spin", (), device, smem_bytes=smem_bytes).raw
    with stream:
        kernel((n_cta,), (_THREADS,), (np.int64(cycles),), shared_mem=smem_bytes)
