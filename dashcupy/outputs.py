"""Preallocated results: an array that a call writes must be writable, and alone in its memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .arrays import CPU, Borrowed, Framework, Layout, numpy_dtype
from .errors import InvalidInputError

# Effort of the exact overlap test; arrays with nested axes (all that slicing and transposing
# give) take a handful of steps.
_MAX_WORK = 100_000


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
    views: dict[str, np.ndarray] = {}
    for name, output in outputs.items():
        if framework.immutable:
            raise InvalidInputError(f"{framework.name} arrays cannot be written: leave {name} "
                                    f"away and take the results that are returned")
        if framework.read_only(output):
            raise InvalidInputError(f"{name} is read-only (or requires a gradient) and cannot be "
                                    f"written: give a writable array, or leave it away")
        view = views[name] = _view(framework, output)
        if _overlaps_itself(view):
            raise InvalidInputError(
                f"{name} has shape {view.shape} and strides of {view.strides} bytes: several of "
                f"its elements lie at one address (a broadcast result?); give an array of its own")
    others = {name: _view(framework, array) for name, array in inputs.items()}
    for name, view in views.items():
        for other_name, other in others.items():
            if _overlap(view, other):
                raise InvalidInputError(f"{name} shares memory with {other_name}, which is still "
                                        f"needed while {name} is written: give another array")
        others[name] = view


def _view(framework: Framework, borrowed: Borrowed) -> np.ndarray:
    """A NumPy array at the same addresses; one of GPU memory is never dereferenced."""
    if borrowed.device == CPU:
        return framework.to_numpy(borrowed)
    return np.asarray(_Addresses(borrowed.pointer, borrowed.layout))


class _Addresses:
    """Shape, strides and address of GPU memory in NumPy's terms."""

    def __init__(self, pointer: int, layout: Layout):
        itemsize = numpy_dtype(layout.dtype).itemsize
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{itemsize}", "shape": tuple(layout.shape),
            # A null pointer (an empty array) would make NumPy ask for a buffer.
            "data": (pointer or itemsize, False),
            "strides": tuple(stride * itemsize for stride in layout.strides)}


def _overlaps_itself(view: np.ndarray) -> bool:
    """Whether two elements may share an address: an axis does not clear those inside it."""
    if view.size == 0:
        return False
    end = view.itemsize
    for stride, size in sorted((abs(stride), size) for stride, size
                               in zip(view.strides, view.shape) if size > 1):
        if stride < end:
            return True
        end += stride * (size - 1)
    return False


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=_MAX_WORK)
    except np.exceptions.TooHardError:
        return True
