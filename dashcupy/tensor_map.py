"""Tensor maps: what the copy engine of compute capability 9.0 must know of an array."""

from __future__ import annotations

import ctypes

import numpy as np

from . import driver
from .errors import DeviceError
from .layout import Layout

N_BYTES = 128
PANEL_COLUMNS = 64  # as in ptx/wgmma.cuh: 128 bytes, the most that a swizzle can take
# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
_DATA_TYPES = {"float16": 6, "bfloat16": 9}
_SWIZZLE_128_BYTES, _PROMOTE_128_BYTES = 3, 2
ELEMENT_BYTES = 2
_ALIGNMENT = 64  # of the map itself while it is encoded
_STRIDE_ALIGNMENT, _MAX_STRIDE = 16, 1 << 40  # bytes


def can_describe(layout: Layout) -> bool:
    """Whether a tensor map can say where the rows of a [batch, len, heads, head_dim] array lie.

    Strides of axes with several elements must be positive multiples of 16 bytes; the last axis is
    contiguous. (The address must be a multiple of 16 too.)
    """
    return all(size <= 1 or (0 < stride * ELEMENT_BYTES < _MAX_STRIDE
                             and stride * ELEMENT_BYTES % _STRIDE_ALIGNMENT == 0)
               for size, stride in zip(layout.shape[:-1], layout.strides[:-1]))


def encode_rows(pointer: int, layout: Layout, box_rows: int) -> bytes:
    """The map of an array whose boxes are 64 columns of ``box_rows`` rows of one head.

    Axes, outermost first: batch, head, row, column, so that a box never reaches into another
    sequence or head: what lies past the end of its own is read as zero and not written.

    Parameters
    ----------
    pointer
        Address of the first element, a multiple of 16.
    layout
        Of [batch, len, heads, head_dim] with no empty axis, float16 or bfloat16; see
        `can_describe`.
    box_rows
        At most 256.

    Raises
    ------
    DeviceError
        The driver refuses.
    """
    batch, length, n_head, head_dim = layout.shape
    # The stride of an axis of one element says nothing, and may be none that the driver takes.
    row, head, outer = (
        layout.strides[axis] * ELEMENT_BYTES if layout.shape[axis] > 1 else _STRIDE_ALIGNMENT
        for axis in (1, 2, 0))
    raw = np.zeros(N_BYTES + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    code = driver.with_context(lambda: driver.library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(raw.ctypes.data + start), _DATA_TYPES[layout.dtype], 4,
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 4)(head_dim, length, n_head, batch),
        (ctypes.c_uint64 * 3)(row, head, outer),
        (ctypes.c_uint32 * 4)(PANEL_COLUMNS, box_rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        0, _SWIZZLE_128_BYTES, _PROMOTE_128_BYTES, 0))
    if code:
        raise DeviceError(
            f"cuTensorMapEncodeTiled failed with error {code} for an array of shape "
            f"{tuple(layout.shape)}, strides {tuple(layout.strides)} (in elements), dtype "
            f"{layout.dtype}, at address {pointer:#x}: copy it to C order and please report it")
    return raw[start:start + N_BYTES].tobytes()
