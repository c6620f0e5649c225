"""Shape, strides and dtype of an array, whatever framework it comes from."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np


class Layout(NamedTuple):
    """What a plan may depend on: shape, strides in elements (None on the CPU), dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str


@functools.lru_cache(maxsize=4096)
def layout_of_bytes(shape: tuple[int, ...], strides: tuple[int, ...],
                    dtype: np.dtype) -> Layout | None:
    """Layout from strides in bytes; None if they are no multiples of the elements."""
    if any(stride % dtype.itemsize for stride in strides):
        return None
    return Layout(shape, tuple(stride // dtype.itemsize for stride in strides), dtype_name(dtype))


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """Name of a NumPy dtype; ml_dtypes' bfloat16 is ``"bfloat16"``."""
    return dtype.name


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """NumPy dtype of a name."""
    if name == "bfloat16":
        import ml_dtypes
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
