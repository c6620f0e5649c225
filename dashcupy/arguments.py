"""The parameter structs of a plan's kernels, filled in for one call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from . import params, tensor_map
from .config_sm90 import WARPGROUP_ROWS
from .layout import Layout
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
        "scale": problem.scale, "scale_log2": scale_log2(problem), "reserved": 0,
        "head_group": (forward_head_group(problem) if plan.direction == "forward" else
                       head_group(problem, plan.config)),
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
                   copies: tuple[str, str] | None) -> Callable[[Sequence[int], int], bytes]:
    """What fills in the struct ``kind``: called with addresses and a counter, returns its bytes.

    Addresses come in the order of ``params.ARRAYS`` and then of ``plan.workspace``.
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
        packer = params.pointer_packer(kind)
        self._pack = packer.pack
        self._after = params.pack(kind, struct_values(plan, layouts))[packer.size:]
        # Parts of the workspace that a plan has not: their pointers are null.
        order = _address_order(plan)
        self._pick = operator.itemgetter(*[
            order.index(name) if name in order else len(order)
            for name, code in params.FIELDS[kind] if code == "P"])

    def __call__(self, addresses: Sequence[int], counter: int) -> bytes:
        return self._pack(*self._pick((*addresses, 0))) + self._after


class _Copy:
    """From an array of the caller to the workspace, or back."""

    def __init__(self, plan: Plan, layouts: Mapping[str, Layout], source: str, target: str):
        order = _address_order(plan)
        self._from, self._to = order.index(source), order.index(target)
        layout = layouts[source if source in layouts else target]
        batch, length, n_head, _ = layout.shape
        values = {"batch": batch, "len": length, "n_head": n_head, "reserved": 0}
        for field, name in (("from", source), ("to", target)):
            strides = (used_strides(layout) if name in layouts else
                       contiguous_strides(layout.shape))
            for axis, stride in zip(("batch", "row", "head"), strides):
                values[f"{field}_strides.{axis}"] = stride
        packer = params.pointer_packer("copy")
        self._pack, self._after = packer.pack, params.pack("copy", values)[packer.size:]

    def __call__(self, addresses: Sequence[int], counter: int) -> bytes:
        return self._pack(addresses[self._from], addresses[self._to]) + self._after


class _ForwardSm90:
    """Tensor maps of q, k, v and out, each made once for an address; then pointers and the rest."""

    def __init__(self, plan: Plan, layouts: Mapping[str, Layout]):
        packer, offset = params.pointer_packer("forward_sm90"), params.offsets("forward_sm90")
        self._pack = packer.pack
        values = params.pack("forward_sm90", struct_values(plan, layouts))
        self._after = values[offset["lse"] + packer.size:]
        order, problem = _address_order(plan), plan.problem
        self._lse = order.index("lse")
        # Keys that some row sees. A tile of keys is loaded whole: those that no row sees must be
        # read as zeros, as 0 times their NaN or infinity would be NaN.
        n_seen = problem.kv_len
        if problem.causal:
            n_seen = min(n_seen, max(problem.q_len + problem.mask_offset, 1))
        self._maps = []  # (which address, layout, box rows, maps made), in the order of the struct
        for name in ("q", "k", "v", "out"):
            of_keys = name in ("k", "v")
            rows = plan.config.kv_tile if of_keys else WARPGROUP_ROWS
            # Without a key nothing of k and v is looked at, but a map must be of something.
            source = "q" if of_keys and problem.kv_len == 0 else name
            layout = layouts[source]
            if f"{source}_copy" in order:
                layout = layout._replace(strides=contiguous_strides(layout.shape))
                source = f"{source}_copy"
            if of_keys and problem.kv_len > 0:
                batch, _, n_head, head_dim = layout.shape
                layout = layout._replace(shape=(batch, n_seen, n_head, head_dim))
            self._maps.append((order.index(source), layout, rows, {}))

    def __call__(self, addresses: Sequence[int], counter: int) -> bytes:
        parts = []
        for which, layout, rows, made in self._maps:
            parts.append(_map(addresses[which], layout, rows, made))
        return b"".join((*parts, self._pack(addresses[self._lse], counter), self._after))


class _BackwardMaps:
    """Tensor maps of q, dout, k and v, of the rows and keys that see or are seen.

    Rows that see no key and keys that no row sees lie outside and are read as zeros: they may hold
    NaN, and 0 times NaN is NaN.
    """

    def __init__(self, plan: Plan, layouts: Mapping[str, Layout]):
        problem, order = plan.problem, _address_order(plan)
        first_row, key_end = 0, problem.kv_len
        if problem.causal:
            first_row = max(0, -problem.mask_offset)
            key_end = min(problem.kv_len, problem.q_len + problem.mask_offset)
        copied = {name for kernel in plan.kernels for name in kernel.copies or ()}
        self._none = bytes(params.n_bytes("backward_maps"))
        self._maps = []  # (which address, bytes behind it, layout, box rows, maps made)
        if problem.q_len == 0 or problem.n_q_head == 0:
            return  # no step reads anything, and a map must be of something
        for name, _ in params.FIELDS["backward_maps"]:
            rows, begin, end = (
                (plan.config.kv_tile, 0, key_end) if name in ("k", "v") else
                (plan.config.q_tile, first_row, problem.q_len))
            layout = layouts[name]
            if f"{name}_copy" in copied:
                layout = layout._replace(strides=contiguous_strides(layout.shape))
                name = f"{name}_copy"
            skip = tensor_map.ELEMENT_BYTES * begin * layout.strides[1]
            batch, _, n_head, head_dim = layout.shape
            self._maps.append((order.index(name), skip,
                               layout._replace(shape=(batch, end - begin, n_head, head_dim)),
                               rows, {}))

    def __call__(self, addresses: Sequence[int], counter: int) -> bytes:
        return b"".join([_map(addresses[which] + skip, layout, rows, made)
                         for which, skip, layout, rows, made in self._maps]) or self._none


def _map(pointer: int, layout: Layout, rows: int, made: dict[int, bytes]) -> bytes:
    """The tensor map of an array at that address, from those that were made before if it can."""
    found = made.get(pointer)
    if found is None:
        if len(made) >= _MAX_MAPS:
            made.clear()
        found = made[pointer] = tensor_map.encode_rows(pointer, layout, rows)
    return found


def _address_order(plan: Plan) -> tuple[str, ...]:
    return params.ARRAYS[plan.direction] + tuple(region.name for region in plan.workspace)
