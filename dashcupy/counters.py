"""Work counters in device memory for kernels that hand out their work as they go."""

from __future__ import annotations

import functools
import itertools
import threading

from . import driver

COUNTER_BYTES = 8  # two words; a kernel leaves them as zero as it found them
N_COUNTER = 1 << 16
_NON_BLOCKING = 1  # cudaStreamNonBlocking


class Counters:
    """Counters of one GPU: one for each launch in flight.

    Half of them are handed out in turn, so that two launches share one only if 2^15 others were
    enqueued between them; those would have to pass it on other streams while it waits. A launch
    that a CUDA graph records may run again at any time, so it gets one of the other half for
    good, and each replay sets it to zero first. Two instances of one graph share it, as they share
    results and workspace: they must not run at the same time.
    """

    def __init__(self):
        self._base = 0
        self._guard = threading.Lock()
        self._launches = itertools.count()
        self._captured = itertools.count()

    def take(self, stream: int) -> int:
        """Address of a counter for the next launch on a stream of the current GPU.

        0, with which kernels do without, if there is no memory for counters, or if a graph asks
        and none is left.
        """
        captured = driver.is_capturing(stream)
        half = N_COUNTER // 2
        index = half + next(self._captured) if captured else next(self._launches) % half
        if index >= N_COUNTER or not self._memory():
            return 0
        counter = self._base + index * COUNTER_BYTES
        if captured:
            driver.require_cupy().cuda.runtime.memsetAsync(counter, 0, COUNTER_BYTES, stream)
        return counter

    def _memory(self) -> int:
        """Address of all counters, made when first asked for; 0: no memory left for now."""
        if not self._base:
            with self._guard:
                if not self._base:
                    try:
                        self._base = _zeros()
                    except RuntimeError:  # CuPy's; a later launch tries again
                        return 0
        return self._base


def _zeros() -> int:
    """Memory for all counters of the current GPU, kept as long as the process.

    Also while graphs are recorded, by this thread or others: it waits for a stream of its own, as
    none that is recorded may be waited for, nor may the whole GPU.
    """
    runtime = driver.require_cupy().cuda.runtime
    n_bytes = N_COUNTER * COUNTER_BYTES
    with driver.relaxed_capture():
        stream = runtime.streamCreateWithFlags(_NON_BLOCKING)
        try:
            base = runtime.malloc(n_bytes)
            runtime.memsetAsync(base, 0, n_bytes, stream)
            runtime.streamSynchronize(stream)
        finally:
            runtime.streamDestroy(stream)
    return base


@functools.cache
def of_device(device: int) -> Counters:
    """The counters of a GPU."""
    return Counters()
