"""Work counters in device memory for kernels that hand out their work as they go."""

from __future__ import annotations

import functools
import itertools

from . import driver

COUNTER_BYTES = 8  # two words; a kernel leaves them as zero as it found them
N_COUNTER = 1 << 16


class Counters:
    """Counters of one GPU: one for each launch in flight.

    Half of them are handed out in turn, so that two launches share one only if 2^15 others were
    enqueued between them, which is more than streams can hold. A launch that a CUDA graph records
    may run again at any time, so it gets one of the other half for good.
    """

    def __init__(self):
        self._base = 0
        self._launches = itertools.count()
        self._captured = itertools.count()

    def take(self, captured: bool) -> int:
        """Address of a counter for one launch on the current GPU.

        0, with which kernels do without, if there is no memory for counters; if a graph asks and
        none is left; or if it asks before the first other launch, for memory cannot be allocated
        while a graph is recorded.
        """
        half = N_COUNTER // 2
        if not captured:
            index = next(self._launches) % half
            if not self._base:
                try:
                    self._base = _zeros()
                except RuntimeError:  # no memory left: try again with a later launch
                    return 0
        else:
            if not self._base:
                return 0
            index = half + next(self._captured)
            if index >= N_COUNTER:
                return 0
        return self._base + index * COUNTER_BYTES


def _zeros() -> int:
    """Memory for all counters of the current GPU, kept as long as the process."""
    runtime = driver.require_cupy().cuda.runtime
    base = runtime.malloc(N_COUNTER * COUNTER_BYTES)
    runtime.memset(base, 0, N_COUNTER * COUNTER_BYTES)
    runtime.deviceSynchronize()  # streams that do not wait for the default one come next
    return base


@functools.cache
def of_device(device: int) -> Counters:
    """The counters of a GPU."""
    return Counters()
