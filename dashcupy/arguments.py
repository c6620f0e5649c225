"""The parameter structs of a plan's kernels, filled in for one call."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence

from . import params, tensor_map
from .config_sm90 import WARPGROUP_ROWS, backward_loop
from .layout import Layout
from .plan import Plan, head_group, scale_log2
from .plan_sm90 import head_group as forward_head_group
from .problem import ROW_ARRAYS

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
        "dlse_batch": 0, "dlse_head": 0,  # of what may be left away
        "head_group": (forward_head_group(problem) if plan.direction == "forward" else
                       head_group(plan)),
    }
    order = _address_order(plan)
    for name in layouts:
        strides = used_strides(_as_used(order, layouts, name)[1])
        if name in ROW_ARRAYS:
            values[f"{name}_batch"], values[f"{name}_head"] = strides[:2]
        else:
            for axis, stride in zip(("batch", "row", "head"), strides):
                values[f"{name}_strides.{axis}"] = stride
    return values


class Arguments:
    """A parameter struct: what is the same in every call, and what completes it.

    Parameters
    ----------
    kind
        Which one of ``params.FIELDS``.
    plan, layouts
        As for `launch.Launcher`.
    copies
        For "copy": names of source and target.

    Attributes
    ----------
    constant
        The struct without pointers and tensor maps.
    """

    def __init__(self, kind: str, plan: Plan, layouts: Mapping[str, Layout],
                 copies: tuple[str, str] | None):
        values = _copy_values(layouts, *copies) if copies else struct_values(plan, layouts)
        self.constant = params.pack(kind, values)
        self._pack_into = params.leading(kind).pack_into
        self._maps = _MAPS[kind](plan, layouts) if kind in _MAPS else ()
        order = _address_order(plan)
        # Parts of the workspace that a plan has not: their pointers are null.
        names = copies or [_as_used(order, layouts, name)[0] if name in layouts else name
                           for name, code in params.FIELDS[kind] if code == "P"]
        pointers = [order.index(name if name in order else "null") for name in names]
        self._pick = operator.itemgetter(*pointers) if pointers else lambda addresses: ()

    def complete(self, memory: ctypes.Array, addresses: Sequence[int]) -> None:
        """Fill in the rest of a copy of ``constant``, in ``memory``.

        Addresses come in the order of ``params.ARRAYS``, then of ``plan.workspace``; that of a
        work counter beside the workspace, if there is one, and null follow.
        """
        self._pack_into(memory, 0, *[make(addresses) for make in self._maps],
                        *self._pick(addresses))


class _Map:
    """A tensor map, made once for an address.

    Parameters
    ----------
    which, skip
        Which of a call's addresses, and how many bytes behind it the array starts.
    layout, rows
        As for `tensor_map.encode_rows`.
    """

    def __init__(self, which: int, skip: int, layout: Layout, rows: int):
        self._which, self._skip, self._layout, self._rows = which, skip, layout, rows
        self._made: dict[int, bytes] = {}

    def __call__(self, addresses: Sequence[int]) -> bytes:
        pointer = addresses[self._which] + self._skip
        found = self._made.get(pointer)
        if found is None:
            if len(self._made) >= _MAX_MAPS:
                self._made.clear()
            found = self._made[pointer] = tensor_map.encode_rows(pointer, self._layout, self._rows)
        return found


def _forward_maps(plan: Plan, layouts: Mapping[str, Layout]) -> list[_Map]:
    """Those of q, k, v and out.

    Of the keys that some row sees. A tile of keys is loaded whole: those that no row sees must be
    read as zeros, as 0 times their NaN or infinity would be NaN.
    """
    problem, order = plan.problem, _address_order(plan)
    n_seen = problem.kv_len
    if problem.causal:
        n_seen = min(n_seen, max(problem.q_len + problem.mask_offset, 1))
    maps = []
    for name in ("q", "k", "v", "out"):
        of_keys = name in ("k", "v")
        rows = plan.config.kv_tile if of_keys else WARPGROUP_ROWS
        # Without a key nothing of k and v is looked at, but a map must be of something.
        source = "q" if of_keys and problem.kv_len == 0 else name
        source, layout = _as_used(order, layouts, source)
        if of_keys and problem.kv_len > 0:
            batch, _, n_head, head_dim = layout.shape
            layout = layout._replace(shape=(batch, n_seen, n_head, head_dim))
        maps.append(_Map(order.index(source), 0, layout, rows))
    return maps


def _backward_maps(plan: Plan, layouts: Mapping[str, Layout]) -> list[Callable]:
    """Those of q, dout, k and v, of the rows and keys that see or are seen, and of dk and dv.

    Rows that see no key and keys that no row sees lie outside and are read as zeros: they may hold
    NaN, and 0 times NaN is NaN.
    """
    problem, order = plan.problem, _address_order(plan)
    loop = backward_loop(problem.head_dim)
    first_row, key_end = 0, problem.kv_len
    if problem.causal:
        first_row = max(0, -problem.mask_offset)
        key_end = min(problem.kv_len, problem.q_len + problem.mask_offset)
    of_rows = loop.q_tile, first_row, problem.q_len
    of_keys = loop.kv_tile // loop.cluster, 0, key_end
    of_results = loop.result_rows, 0, problem.kv_len
    boxes = {"q": of_rows, "dout": of_rows, "k": of_keys, "v": of_keys,
             "dk": of_results, "dv": of_results}
    reads = problem.q_len > 0 and problem.n_q_head > 0
    maps = []
    for name, _ in params.FIELDS["backward_maps"]:
        if not reads and name not in ("dk", "dv"):
            maps.append(lambda addresses: b"")  # no step reads it, and a map must be of something
            continue
        rows, begin, end = boxes[name]
        name, layout = _as_used(order, layouts, name)
        skip = tensor_map.ELEMENT_BYTES * begin * layout.strides[1]
        batch, _, n_head, head_dim = layout.shape
        maps.append(_Map(order.index(name), skip,
                         layout._replace(shape=(batch, end - begin, n_head, head_dim)), rows))
    return maps


def _as_used(order: Sequence[str], layouts: Mapping[str, Layout],
             name: str) -> tuple[str, Layout]:
    """Name and layout of what kernels use of this array: the copy, if the workspace has one."""
    layout, copy = layouts[name], f"{name}_copy"
    if copy not in order:
        return name, layout
    return copy, layout._replace(strides=contiguous_strides(layout.shape))


_MAPS = {"forward_sm90": _forward_maps, "backward_maps": _backward_maps}


def _copy_values(layouts: Mapping[str, Layout], source: str,
                 target: str) -> dict[str, int | float]:
    """From an array of the caller to the workspace, or back."""
    layout = layouts[source if source in layouts else target]
    batch, length, n_head, _ = layout.shape
    values = {"batch": batch, "len": length, "n_head": n_head, "reserved": 0}
    for field, name in (("from", source), ("to", target)):
        strides = used_strides(layout) if name in layouts else contiguous_strides(layout.shape)
        for axis, stride in zip(("batch", "row", "head"), strides):
            values[f"{field}_strides.{axis}"] = stride
    return values


def _address_order(plan: Plan) -> tuple[str, ...]:
    workspace = (region.name for region in plan.workspace)
    return (*params.ARRAYS[plan.direction], *workspace, "work_counter", "null")
