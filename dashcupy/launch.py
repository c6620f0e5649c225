"""From a plan to kernels on a stream: the parameter struct, the grid, the launch and its errors."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from . import counters, driver, modules, schedules, tensor_map
from .arguments import Arguments, used_strides
from .config import workers
from .errors import DeviceError, HangError, InvalidInputError, UnsupportedError
from .kernel_launch import KernelLaunch, resident_clusters
from .layout import Layout
from .plan import Plan
from .plan_backward import REPORT_WORDS
from .plan_parts import KernelPlan
from .problem import ROW_ARRAYS

# Bytes that the kernels read at a time from arrays that are aligned.
_VECTOR_BYTES = 16
_VECTOR_ELEMENTS = 8


def is_aligned(pointers: Sequence[int], layouts: Mapping[str, Layout],
               by_tensor_map: bool = False) -> bool:
    """Whether all 16-bit arrays may be used 16 bytes at a time, or by the copy engine.

    Parameters
    ----------
    pointers
        Addresses of their first elements.
    layouts
        By name; lse and dlse are left out, as they are read one element at a time, and so are
        empty arrays, of which nothing is read or written.
    by_tensor_map
        Whether the kernels use the copy engine, which also refuses strides of 0 and less.
    """
    if functools.reduce(lambda a, b: a | b, pointers, 0) % _VECTOR_BYTES:
        return False
    vectors = [layout for name, layout in layouts.items()
               if name not in ROW_ARRAYS and 0 not in layout.shape]
    if by_tensor_map and not all(map(tensor_map.can_describe, vectors)):
        return False
    return all(stride % _VECTOR_ELEMENTS == 0 for layout in vectors
               for stride in used_strides(layout)[:-1])


def require_contiguous_rows(name: str, layout: Layout) -> None:
    """Refuse a last axis that is not contiguous: the kernels read whole rows.

    Raises
    ------
    InvalidInputError
        With the strides that were found.
    """
    # A stride of 0 counts, unlike that of an axis of one element: a row is not one element.
    if layout.shape[-1] > 1 and layout.strides[-1] != 1 and 0 not in layout.shape:
        raise InvalidInputError(
            f"{name} has strides {tuple(layout.strides)} (in elements): on a GPU the last axis "
            f"must be contiguous (stride 1), the others are free; copy {name} to C order")


class Launcher:
    """A plan made ready for one GPU and one set of strides; calling it enqueues the kernels.

    The GPU must be the current one while a launcher is made and called.

    Parameters
    ----------
    plan
    layouts
        Shapes and strides of all arrays that there are, results included, by name.
    device
        Number of the GPU.
    max_ctas
        Upper limit on the CTAs of a persistent kernel, of which one cluster always runs; None: as
        many as are resident.

    Raises
    ------
    CompileError, DeviceError
        A kernel cannot be built or loaded.
    UnsupportedError
        The schedule needs more resident CTAs than this GPU has.
    """

    def __init__(self, plan: Plan, layouts: Mapping[str, Layout], device: int,
                 max_ctas: int | None = None):
        self.plan = plan
        self.device = device
        self._offsets = tuple(region.offset for region in plan.workspace)
        self._cleared = tuple((plan.region(name).offset, plan.region(name).n_bytes)
                              for name in plan.cleared)
        self._kernels = tuple(_LoadedKernel(kernel, plan, device, max_ctas)
                              for kernel in plan.kernels)
        keys = [[(kind, kernel.copies) for kind in (kernel.params, kernel.maps) if kind]
                for kernel in plan.kernels]
        used = list(dict.fromkeys(itertools.chain(*keys)))  # kernels share equal structs
        self._structs = tuple(Arguments(kind, plan, layouts, copies) for kind, copies in used)
        self._takes = tuple([used.index(key) for key in taken] for taken in keys)
        self._free: list[_Slot] = []  # of calls that are over
        self._counters = (counters.of_device(device)
                          if any(kernel.counter for kernel in plan.kernels) else None)
        self._reports = plan.debug and "report" in plan.cleared

    def __call__(self, pointers: Sequence[int], workspace: int, stream: int) -> None:
        """Enqueue the kernels; waits for nothing, except in a debug build.

        Parameters
        ----------
        pointers
            Of the arrays, in the order of ``params.ARRAYS``; 0 for one that is not given.
        workspace
            Address of ``plan.workspace_bytes`` bytes, a multiple of 16; any contents.
        stream
            Handle of the CUDA stream.

        Raises
        ------
        DeviceError
            The driver refuses a launch or a tensor map.
        HangError
            Debug builds: a CTA gave up waiting for its turn.
        """
        counter = self._counters.take(stream) if self._counters else 0
        addresses = (*pointers, *[workspace + offset for offset in self._offsets], counter, 0)
        try:  # one step, so that no two calls, of threads or of a finalizer, get the same
            slot = self._free.pop()
        except IndexError:
            slot = self._new_slot()
        for complete, memory in slot.structs:
            complete(memory, addresses)
        for offset, n_bytes in self._cleared:
            driver.require_cupy().cuda.runtime.memsetAsync(workspace + offset, 0, n_bytes, stream)
        for launch, arguments in slot.launches:
            launch(stream, arguments)
        self._free.append(slot)
        if self._reports:
            _raise_hang(self.plan, workspace, stream)

    def _new_slot(self) -> _Slot:
        memory = [ctypes.create_string_buffer(struct.constant, len(struct.constant))
                  for struct in self._structs]
        return _Slot(
            tuple((struct.complete, part) for struct, part in zip(self._structs, memory)),
            tuple((kernel.launch, (ctypes.c_void_p * len(taken))(
                *[ctypes.addressof(memory[i]) for i in taken]))
                for kernel, taken in zip(self._kernels, self._takes)))


class _Slot(NamedTuple):
    """Memory for the parameters of one call, which no other call has at the same time.

    Parameters
    ----------
    structs
        What completes each struct, and its memory.
    launches
        What launches each kernel, and the addresses of the structs that it takes.
    """

    structs: tuple[tuple[Callable[[ctypes.Array, Sequence[int]], None], ctypes.Array], ...]
    launches: tuple[tuple[Callable[[int, ctypes.Array], None], ctypes.Array], ...]


class _LoadedKernel:
    """A function on the GPU with its final grid."""

    def __init__(self, kernel: KernelPlan, plan: Plan, device: int, max_ctas: int | None):
        self._kernel = kernel
        self._device = device
        self._function = modules.load(kernel.kernel, kernel.defines, device,
                                      smem_bytes=kernel.smem_bytes).function
        self._grid = kernel.grid
        if kernel.persistent:
            resident = resident_workers(kernel, self._function, device)
            if resident == 0:
                raise UnsupportedError(
                    f"{kernel.kernel} runs in {workers(kernel.cluster)}, and this GPU "
                    f"({driver.device(device).name}) has no room for one: use a larger part of it")
            if max_ctas is not None:
                resident = min(resident, max(max_ctas // kernel.cluster, 1))
            if plan.schedule is not None:
                schedules.require_resident(plan.schedule, plan.shape, resident,
                                           workers(kernel.cluster))
            self._grid = kernel.cluster * min(kernel.grid, resident)
        self._call = KernelLaunch(self._function, self._grid, kernel.threads, kernel.smem_bytes,
                                  kernel.cooperative, kernel.early)

    def launch(self, stream: int, arguments: ctypes.Array) -> None:
        code = self._call(stream, arguments)
        if code and driver.made_context(code):
            code = self._call(stream, arguments)
        if code:
            kernel = self._kernel
            raise DeviceError(
                f"launching {kernel.kernel} failed with error {code} ({_error_text(code)}): grid "
                f"{self._grid}, {kernel.threads} threads, {kernel.smem_bytes} bytes of dynamic "
                f"shared memory{', cooperative' if kernel.cooperative else ''}, on "
                f"{driver.device(self._device).name}; an error of an earlier kernel may show up "
                f"here: run with CUDA_LAUNCH_BLOCKING=1")


def resident_workers(kernel: KernelPlan, function: int, device: int) -> int:
    """CTAs of a kernel, or clusters of them, that a GPU keeps resident together.

    Parameters
    ----------
    kernel
    function
        Its CUfunction handle.
    device
        Number of the GPU, which is the current one.
    """
    if kernel.cluster > 1:
        return resident_clusters(function, kernel.cluster, kernel.threads, kernel.smem_bytes)
    return driver.device(device).n_sm * driver.occupancy(function, kernel.threads,
                                                         kernel.smem_bytes)


def _error_text(code: int) -> str:
    text = ctypes.c_char_p()
    driver.library().cuGetErrorString(code, ctypes.byref(text))
    return text.value.decode() if text.value else "unknown"


def _raise_hang(plan: Plan, workspace: int, stream: int) -> None:
    """Wait, read the report of a debug build, and raise if a CTA gave up."""
    runtime = driver.require_cupy().cuda.runtime
    report = np.zeros(REPORT_WORDS, np.uint32)
    runtime.streamSynchronize(stream)
    runtime.memcpy(report.ctypes.data, workspace + plan.region("report").offset, report.nbytes,
                   runtime.memcpyDeviceToHost)
    check_report(plan, report)


def check_report(plan: Plan, report: np.ndarray) -> None:
    """Raise if a CTA of a debug build gave up waiting.

    Parameters
    ----------
    plan
    report : ndarray of uint32
        1 if somebody gave up, then q tile among those of all sequences and heads, kv tile (2^32 - 1
        for ``bwd_postprocess``, which waits for all of them), q tile, expected and seen ticket.

    Raises
    ------
    HangError
        Somebody did; the results are worthless.
    """
    if not report[0]:
        return
    tile_index, kv_tile, q_tile, expected, seen = (int(word) for word in report[1:6])
    batch, q_head = divmod(tile_index // plan.shape.n_q, plan.problem.n_q_head)
    who = "bwd_postprocess" if kv_tile == 2**32 - 1 else f"kv tile {kv_tile}"
    raise HangError(
        f"schedule {plan.schedule!r}: {who} gave up waiting for its turn in the sum "
        f"of dq of q tile {q_tile} (batch {batch}, q head {q_head}): it waited for ticket "
        f"{expected} and saw {seen}; the results are worthless. Plan:\n{plan.explain()}")
