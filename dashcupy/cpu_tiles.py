"""Attention of whole heads, tile by tile, every sum in a fixed order: the core of the CPU backend.

Heads stand one by one in contiguous arrays ``[heads, len, head_dim]``. Scores are kept transposed,
``[keys, rows of q]``: what belongs to a row of q (maximum, sum, lse, delta) is then a vector along
the contiguous axis, and NumPy's loops run at full width. BLAS works on one head at a time, with
sizes that depend on the lengths and the tiles only, so the bits of a head do not depend on the
heads beside it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .errors import HangError
from .schedules import Schedule, Shape


def forward_heads(q_scaled: np.ndarray, k: np.ndarray, v: np.ndarray,
                  shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """out [heads, q_len, head_dim] and lse [heads, 1, q_len]; q_scaled is q * scale."""
    out = np.zeros_like(q_scaled)
    lse = np.full((len(q_scaled), 1, shape.q_len), -np.inf, q_scaled.dtype)
    score_scratch = _Scratch(q_scaled.dtype)
    out_scratch = _Scratch(q_scaled.dtype)
    ones = np.ones((1, shape.kv_rows), q_scaled.dtype)  # BLAS sums faster than np.sum
    total = np.zeros_like(lse)
    for q_tile in range(shape.n_q):
        for kv_tile in range(shape.num_kv_tiles(q_tile)):
            keys, rows, hidden = _tile(shape, kv_tile, q_tile)
            p = score_scratch.view(len(k), _length(keys), _length(rows))
            np.matmul(k[:, keys], q_scaled[:, rows].swapaxes(1, 2), out=p)
            if hidden is not None:
                np.copyto(p, -np.inf, where=hidden)
            row_max = p.max(axis=1, keepdims=True)
            np.maximum(row_max, lse[:, :, rows], out=row_max)
            # Scores that are all -inf so far: their weights are 0 against any finite number.
            reference = row_max.copy()
            reference[row_max == -np.inf] = 0
            p -= reference
            np.exp(p, out=p)
            row_sum = np.matmul(ones[:, :p.shape[1]], p)
            weights = p.swapaxes(1, 2)
            hidden = None if hidden is None else hidden.T
            if kv_tile == 0:
                _visible_product(weights, v[:, keys], hidden, out[:, rows])
            else:
                part = out_scratch.view(len(v), _length(rows), v.shape[2])
                _visible_product(weights, v[:, keys], hidden, part)
                # lse holds the running maximum until the row is finished.
                shrink = np.exp(lse[:, :, rows] - reference)
                row_sum += total[:, :, rows] * shrink
                out[:, rows] *= shrink.swapaxes(1, 2)
                out[:, rows] += part
            total[:, :, rows] = row_sum
            lse[:, :, rows] = row_max
    live = slice(max(0, -shape.offset) if shape.causal else 0, None)
    out[:, live] /= total[:, :, live].swapaxes(1, 2)
    lse[:, :, live] += np.log(total[:, :, live])
    return out, lse


def backward_heads(dout: np.ndarray, q_scaled: np.ndarray, k: np.ndarray, v: np.ndarray,
                   delta: np.ndarray, lse: np.ndarray, dk: np.ndarray, dv: np.ndarray,
                   shape: Shape, schedule: Schedule, *, first_member: bool) -> np.ndarray:
    """Gradients of one q head for every kv head: dk and dv in place, dq / scale as the result.

    Parameters
    ----------
    dout, q_scaled : ndarray, shape [heads, q_len, head_dim]
        ``q_scaled`` is q * scale, so that dk comes out with its factor.
    k, v : ndarray, shape [heads, kv_len, head_dim]
    delta, lse : ndarray, shape [heads, 1, q_len]
    dk, dv : ndarray, shape [heads, kv_len, head_dim]
        Zero for the first member of the group; the sums so far for the others.
    shape, schedule
        Tiles and order.
    first_member
        Whether the first term of a sum of dk and dv is stored instead of added.
    """
    dtype = k.dtype
    p_scratch, ds_scratch, part_scratch = _Scratch(dtype), _Scratch(dtype), _Scratch(dtype)
    dq = np.zeros_like(q_scaled)
    for kv_tile, q_tile, step, ticket in task_order(schedule, shape):
        keys, rows, hidden = _tile(shape, kv_tile, q_tile)
        size = (len(k), _length(keys), _length(rows))
        p, ds = p_scratch.view(*size), ds_scratch.view(*size)
        np.matmul(k[:, keys], q_scaled[:, rows].swapaxes(1, 2), out=p)
        p -= lse[:, :, rows]
        if hidden is not None:
            np.copyto(p, -np.inf, where=hidden)
        np.exp(p, out=p)
        np.matmul(v[:, keys], dout[:, rows].swapaxes(1, 2), out=ds)
        ds -= delta[:, :, rows]
        ds *= p
        if hidden is not None:
            np.copyto(ds, 0, where=hidden)  # 0 * NaN where a row may not see the key
        first = first_member and step == 0
        _add_product(dv[:, keys], p, dout[:, rows], hidden, first, part_scratch)
        _add_product(dk[:, keys], ds, q_scaled[:, rows], hidden, first, part_scratch)
        hidden = None if hidden is None else hidden.T
        _add_product(dq[:, rows], ds.swapaxes(1, 2), k[:, keys], hidden, ticket == 0, part_scratch)
    return dq


def task_order(schedule: Schedule, shape: Shape) -> Iterator[tuple[int, int, int, int]]:
    """Tiles of one head in an order that one worker can run without ever waiting.

    Parameters
    ----------
    schedule
        A schedule module.
    shape : Shape

    Yields
    ------
    kv_tile, q_tile, step, ticket : int
        Steps of a kv tile come in order, and so do the tickets of a q tile.

    Raises
    ------
    HangError
        The schedule's waits form a circle.
    """
    chains = [schedule.kv_tile(shape, work, part) for work in range(schedule.num_work(shape))
              for part in range(schedule.work_size(shape, work))]
    next_step = [0] * shape.n_kv
    next_ticket = [0] * shape.n_q
    while chains:
        waiting = []
        moved = False
        for kv_tile in chains:
            num_steps = schedule.num_steps(shape, kv_tile)
            while (step := next_step[kv_tile]) < num_steps:
                q_tile = schedule.q_tile(shape, kv_tile, step)
                ticket = schedule.ticket(shape, kv_tile, q_tile)
                if ticket != next_ticket[q_tile]:
                    waiting.append(kv_tile)
                    break
                yield kv_tile, q_tile, step, ticket
                next_step[kv_tile] += 1
                next_ticket[q_tile] += 1
                moved = True
        if waiting and not moved:
            raise HangError(f"schedule {schedule.NAME!r} waits in a circle for {shape}: kv tiles "
                            f"{waiting} can never run; this is a fault of the schedule")
        chains = waiting


class _Tile(NamedTuple):
    """The part of one (kv tile, q tile) pair that holds a visible score."""

    keys: slice
    rows: slice
    hidden: np.ndarray | None  # [keys, rows]; None where every score is visible


def _tile(shape: Shape, kv_tile: int, q_tile: int) -> _Tile:
    first_key, first_row = kv_tile * shape.kv_rows, q_tile * shape.q_rows
    last_key = min(first_key + shape.kv_rows, shape.kv_len) - 1
    last_row = min(first_row + shape.q_rows, shape.q_len) - 1
    hidden = None
    if shape.causal:
        # Rows that see none of these keys, and keys that none of these rows sees, take no part.
        first_row = max(first_row, first_key - shape.offset)
        last_key = min(last_key, last_row + shape.offset)
        if last_key > first_row + shape.offset:
            hidden = _hidden(last_key + 1 - first_key, last_row + 1 - first_row,
                             first_row + shape.offset - first_key)
    return _Tile(slice(first_key, last_key + 1), slice(first_row, last_row + 1), hidden)


@functools.lru_cache(maxsize=16)
def _hidden(n_keys: int, n_rows: int, shift: int) -> np.ndarray:
    """Whether row i may not see key j, at [j, i]: ``j > i + shift``."""
    hidden = np.arange(n_keys)[:, None] > np.arange(n_rows) + shift
    hidden.flags.writeable = False
    return hidden


def _add_product(total: np.ndarray, weights: np.ndarray, values: np.ndarray,
                 hidden: np.ndarray | None, first: bool, scratch: _Scratch) -> None:
    """``total += weights @ values``, or ``total = ...`` for the first term of the sum."""
    if first:
        _visible_product(weights, values, hidden, total)
        return
    part = scratch.view(*total.shape)
    _visible_product(weights, values, hidden, part)
    total += part


def _visible_product(weights: np.ndarray, values: np.ndarray, hidden: np.ndarray | None,
                     out: np.ndarray) -> None:
    """``out = weights @ values``, with no trace of a NaN or inf behind a hidden weight.

    Hidden weights are 0, which is enough for finite values only: 0 * NaN is NaN.
    """
    if hidden is None or np.isfinite(values).all():
        np.matmul(weights, values, out=out)
        return
    bad = ~np.isfinite(values)
    np.matmul(weights, np.where(bad, values.dtype.type(0), values), out=out)
    for head, index in np.argwhere(bad.any(axis=2)):
        seen = ~hidden[:, index]
        term = weights[head, seen, index, None] * values[head, index]
        out[head, seen] += np.where(bad[head, index], term, 0)


class _Scratch:
    """One buffer handed out in any shape, always contiguous, so that BLAS never copies."""

    def __init__(self, dtype: np.dtype):
        self._flat = np.empty(0, dtype)

    def view(self, *shape: int) -> np.ndarray:
        size = math.prod(shape)
        if self._flat.size < size:
            self._flat = np.empty(size, self._flat.dtype)
        return self._flat[:size].reshape(shape)


def _length(part: slice) -> int:
    return part.stop - part.start
