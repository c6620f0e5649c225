"""The parameter structs of a plan's kernels, filled in for one call."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence

from . import params, tensor_map
from .arrays import Layout
from .config_sm90 import WARPGROUP_ROWS
from .plan import Plan, head_group, scale_log2
from .plan_sm90 import head_group as forward_head_group

# Tensor maps that are kept for one array; frameworks hand out the same few addresses in turn.
_MAX_MAPS = 256


def used_strides(layout: Layout) -> tuple[int, ...]:
    """Strides in elements; 0 for an axis of size 0 or 1, whose stride says nothing."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(layout.shape, layout.strides))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a new array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def struct_values(plan: Plan, layouts: Mapping[str, Layout]) -> dict[str, int | float]:
    """Every field of the parameter structs but pointers and tensor maps."""
    problem = plan.problem
    values: dict[str, int | float] = {
        "batch": problem.batch, "n_q_head": problem.n_q_head, "n_kv_head": problem.n_kv_head,
        "q_len": problem.q_len, "kv_len": problem.kv_len, "mask_offset": problem.mask_offset,
        "scale": problem.scale, "scale_log2": scale_log2(problem), "reserved": 0, "reversed": 0,
        "head_group": (forward_head_group if plan.direction == "forward" else head_group)(problem),
    }
    for name, layout in layouts.items():
        strides = used_strides(layout)
        if name == "lse":
            values["lse_batch"], values["lse_head"] = strides[:2]
        else:
            for axis, stride in zip(("batch", "row", "head"), strides):
                values[f"{name}_strides.{axis}"] = stride
    return values


def make_arguments(kind: str, plan: Plan, layouts: Mapping[str, Layout],
                   copies: tuple[str, str] | None):
    """What fills in the struct ``kind``: called with addresses and a counter, returns a buffer.

    Addresses come in the order of ``params.ARRAYS`` and then ``params.WORKSPACE``. Every call makes
    a buffer of its own, so that threads do not meet; the driver copies it.
    """
    if kind == "copy":
        return _Copy(plan, layouts, *copies)
    if kind == "forward_sm90":
        return _ForwardSm90(plan, layouts)
    if kind == "backward_maps":
        return _BackwardMaps(plan, layouts)
    return _Plain(kind, plan, layouts)


class _Plain:
    """Pointers first, then what is the same in every call."""

    def __init__(self, kind: str, plan: Plan, layouts: Mapping[str, Layout]):
        self._template = params.pack(kind, struct_values(plan, layouts))
        packer = params.pointer_packer(kind)
        self._pack, self._n_pointer = packer.pack_into, packer.size // 8

    def __call__(self, addresses: Sequence[int], counter: int) -> ctypes.Array:
        buffer = ctypes.create_string_buffer(self._template, len(self._template))
        self._pack(buffer, 0, *addresses[:self._n_pointer])
        return buffer


class _Copy:
    """From an array of the caller to the workspace, or back."""

    def __init__(self, plan: Plan, layouts: Mapping[str, Layout], source: str, target: str):
        order = _address_order(plan.direction)
        self._from, self._to = order.index(source), order.index(target)
        layout = layouts[source if source in layouts else target]
        batch, length, n_head, _ = layout.shape
        values = {"batch": batch, "len": length, "n_head": n_head, "reserved": 0}
        for field, name in (("from", source), ("to", target)):
            strides = (used_strides(layout) if name in layouts else
                       contiguous_strides(layout.shape))
            for axis, stride in zip(("batch", "row", "head"), strides):
                values[f"{field}_strides.{axis}"] = stride
        self._template = params.pack("copy", values)

    def __call__(self, addresses: Sequence[int], counter: int) -> ctypes.Array:
        buffer = ctypes.create_string_buffer(self._template, len(self._template))
        struct.pack_into("@PP", buffer, 0, addresses[self._from], addresses[self._to])
        return buffer


class _ForwardSm90:
    """Tensor maps of q, k, v and out, each made once for an address; then pointers and the rest."""

    def __init__(self, plan: Plan, layouts: Mapping[str, Layout]):
        self._template = params.pack("forward_sm90", struct_values(plan, layouts))
        self._pack = params.pointer_packer("forward_sm90").pack_into
        order = _address_order("forward")
        self._lse = order.index("lse")
        self._pointers_at = params.offsets("forward_sm90")["lse"]
        copied = {name for kernel in plan.kernels for name in kernel.copies or ()}
        problem = plan.problem
        # Keys that some row sees. A tile of keys is loaded whole: those that no row sees must be
        # read as zeros, as 0 times their NaN or infinity would be NaN.
        n_seen = problem.kv_len
        if problem.causal:
            n_seen = min(n_seen, max(problem.q_len + problem.mask_offset, 1))
        self._maps = []  # (offset in the struct, which address, layout, box rows, maps made)
        for name in ("q", "k", "v", "out"):
            of_keys = name in ("k", "v")
            rows = plan.config.kv_tile if of_keys else WARPGROUP_ROWS
            # Without a key nothing of k and v is looked at, but a map must be of something.
            source = "q" if of_keys and problem.kv_len == 0 else name
            layout = layouts[source]
            if f"{source}_copy" in copied:
                layout = layout._replace(strides=contiguous_strides(layout.shape))
                source = f"{source}_copy"
            if of_keys and problem.kv_len > 0:
                batch, _, n_head, head_dim = layout.shape
                layout = layout._replace(shape=(batch, n_seen, n_head, head_dim))
            offset = params.offsets("forward_sm90")[f"{name}_map"]
            self._maps.append((offset, order.index(source), layout, rows, {}))

    def __call__(self, addresses: Sequence[int], counter: int) -> ctypes.Array:
        buffer = ctypes.create_string_buffer(self._template, len(self._template))
        for offset, which, layout, rows, made in self._maps:
            pointer = addresses[which]
            buffer[offset:offset + tensor_map.N_BYTES] = _map(pointer, layout, rows, made)
        self._pack(buffer, self._pointers_at, addresses[self._lse], counter)
        return buffer


class _BackwardMaps:
    """Tensor maps of q, dout, k and v, of the rows and keys that see or are seen.

    Rows that see no key and keys that no row sees lie outside and are read as zeros: they may hold
    NaN, and 0 times NaN is NaN.
    """

    def __init__(self, plan: Plan, layouts: Mapping[str, Layout]):
        problem, order = plan.problem, _address_order("backward")
        first_row, key_end = 0, problem.kv_len
        if problem.causal:
            first_row = max(0, -problem.mask_offset)
            key_end = min(problem.kv_len, problem.q_len + problem.mask_offset)
        copied = {name for kernel in plan.kernels for name in kernel.copies or ()}
        self._maps = []  # (offset in the struct, which address, bytes behind it, layout, box, made)
        if problem.q_len == 0 or problem.n_q_head == 0:
            return  # no step reads anything, and a map must be of something
        for name, offset in params.offsets("backward_maps").items():
            rows, begin, end = (
                (plan.config.kv_tile, 0, key_end) if name in ("k", "v") else
                (plan.config.q_tile, first_row, problem.q_len))
            layout = layouts[name]
            if f"{name}_copy" in copied:
                layout = layout._replace(strides=contiguous_strides(layout.shape))
                name = f"{name}_copy"
            skip = tensor_map.ELEMENT_BYTES * begin * layout.strides[1]
            batch, _, n_head, head_dim = layout.shape
            self._maps.append((offset, order.index(name), skip,
                               layout._replace(shape=(batch, end - begin, n_head, head_dim)),
                               rows, {}))

    def __call__(self, addresses: Sequence[int], counter: int) -> ctypes.Array:
        buffer = ctypes.create_string_buffer(params.n_bytes("backward_maps"))
        for offset, which, skip, layout, rows, made in self._maps:
            buffer[offset:offset + tensor_map.N_BYTES] = _map(addresses[which] + skip, layout,
                                                              rows, made)
        return buffer


def _map(pointer: int, layout: Layout, rows: int, made: dict[int, bytes]) -> bytes:
    """The tensor map of an array at that address, from those that were made before if it can."""
    raw = made.get(pointer)
    if raw is None:
        if len(made) >= _MAX_MAPS:
            made.clear()
        raw = made[pointer] = tensor_map.encode_rows(pointer, layout, rows)
    return raw


def _address_order(direction: str) -> tuple[str, ...]:
    return params.ARRAYS[direction] + params.WORKSPACE[direction]
