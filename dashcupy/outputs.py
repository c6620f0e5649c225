"""Preallocated results: an array that a call writes must be writable, and alone in its memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from .arrays import CPU, Borrowed, Framework
from .errors import InvalidInputError
from .layout import Layout, numpy_dtype

# Effort of the exact overlap test; arrays with nested axes (all that slicing and transposing
# give) take a handful of steps.
_MAX_WORK = 100_000
_TOO_HARD = getattr(np, "exceptions", np).TooHardError  # np.exceptions came with NumPy 1.25


def check_outputs(framework: Framework, outputs: Mapping[str, Borrowed],
                  inputs: Mapping[str, Borrowed]) -> None:
    """Refuse results that cannot be written, or whose writing would change something else.

    Parameters
    ----------
    framework
        Where the arrays come from.
    outputs
        Arrays that will be written.
    inputs
        Arrays that will only be read.

    Raises
    ------
    InvalidInputError
        Immutable or read-only, elements that share memory, or memory shared with another array.
    """
    for name, output in outputs.items():
        if framework.immutable:
            raise InvalidInputError(f"{framework.name} arrays cannot be written: leave {name} "
                                    f"away and take the results that are returned")
        if framework.read_only(output):
            raise InvalidInputError(f"{name} is read-only (or requires a gradient) and cannot be "
                                    f"written: give a writable array, or leave it away")
    places = {name: _place(framework, array) for name, array in (inputs | outputs).items()}
    for name in outputs:
        pointer, layout = places.pop(name)
        if _overlaps_itself(layout):
            raise InvalidInputError(
                f"{name} has shape {tuple(layout.shape)} and strides {layout.strides}: several of "
                f"its elements lie at one address (a broadcast result?); give an array of its own")
        # Outputs before this one are checked already, and are popped.
        for other, (other_pointer, other_layout) in places.items():
            low, high = _near(layout, other_layout)
            distance = other_pointer - pointer
            if low < distance < high and _overlap(layout, other_layout, distance):
                raise InvalidInputError(
                    f"{name} shares memory with {other}, which is still needed while {name} is "
                    f"written: give another array")


class Apart:
    """The part of `check_outputs` that addresses decide, for arrays that passed the rest of it.

    Parameters
    ----------
    layouts
        Of inputs, then of arrays that are written; None for each that is not there.
    n_input
        How many of them are inputs.
    """

    def __init__(self, layouts: Sequence[Layout | None], n_input: int):
        there = [i for i, layout in enumerate(layouts) if layout is not None]
        self._pairs = tuple((i, j, *_near(layouts[i], layouts[j]), layouts[i], layouts[j])
                            for i in there if i >= n_input
                            for j in there if j < n_input or j > i)

    def holds(self, pointers: Sequence[int]) -> bool:
        """Whether nothing that is written shares memory with another array."""
        for i, j, low, high, layout, other in self._pairs:
            distance = pointers[j] - pointers[i]
            if low < distance < high and _overlap(layout, other, distance):
                return False
        return True


def _place(framework: Framework, borrowed: Borrowed) -> tuple[int, Layout]:
    """Address and layout of an array, with strides also on the CPU (there in bytes)."""
    if borrowed.device != CPU:
        return borrowed.pointer, borrowed.layout
    view = framework.to_numpy(borrowed)
    as_bytes = Layout((*view.shape, view.itemsize), (*view.strides, 1), "uint8")
    return view.__array_interface__["data"][0], as_bytes


@functools.lru_cache(maxsize=4096)
def _span(layout: Layout) -> tuple[int, int]:
    """Bytes [first, end) that an array reaches over, from the address of its first element."""
    if 0 in layout.shape:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(layout.shape, layout.strides)]
    first, last = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
    itemsize = numpy_dtype(layout.dtype).itemsize
    return itemsize * first, itemsize * (last + 1)


def _near(a: Layout, b: Layout) -> tuple[int, int]:
    """Between which distances in bytes from ``a`` to ``b`` their spans meet (ends left out)."""
    (first, end), (other_first, other_end) = _span(a), _span(b)
    return first - other_end, end - other_first


@functools.lru_cache(maxsize=4096)
def _overlaps_itself(layout: Layout) -> bool:
    """Whether two elements may share an address: an axis does not clear those inside it."""
    if 0 in layout.shape:
        return False
    end = 1
    for stride, size in sorted((abs(stride), size) for size, stride
                               in zip(layout.shape, layout.strides) if size > 1):
        if stride < end:
            return True
        end += stride * (size - 1)
    return False


@functools.lru_cache(maxsize=4096)
def _overlap(a: Layout, b: Layout, distance: int) -> bool:
    """Whether two arrays share a byte; the second starts ``distance`` bytes after the first."""
    # Any address will do, as nothing is read; this one is far from both ends.
    address = 1 << 62
    try:
        return np.shares_memory(np.asarray(_Addresses(address, a)),
                                np.asarray(_Addresses(address + distance, b)), max_work=_MAX_WORK)
    except _TOO_HARD:
        return True


class _Addresses:
    """Address, shape and strides in NumPy's terms; what lies there is never read."""

    def __init__(self, address: int, layout: Layout):
        itemsize = numpy_dtype(layout.dtype).itemsize
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{itemsize}", "shape": tuple(layout.shape),
            "data": (address, False),
            "strides": tuple(stride * itemsize for stride in layout.strides)}
