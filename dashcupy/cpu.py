"""The NumPy backend: tiles and the order of every sum as the kernels have them, on the CPU.

Bits depend neither on the batch nor on the heads, but on how this process computes: see
`arithmetic_id`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from . import schedules
from .cpu_tiles import backward_heads, forward_heads
from .problem import Problem
from .schedules import Shape

# How much is worked on at once. Bits do not depend on it: it bounds memory, keeps the score tiles
# in cache, and spreads the cost of a NumPy call over many heads when the heads are short.
MAX_TILE_ELEMENTS = 1 << 16
MAX_HEAD_ELEMENTS = 1 << 19


class Tiles(Protocol):
    """What this backend reads of a configuration: rows of a q tile and of a kv tile."""

    q_tile: int
    kv_tile: int


def choose_tiles(problem: Problem) -> tuple[int, int]:
    """Rows of a q tile and of a kv tile for this backend.

    Parameters
    ----------
    problem : Problem
        Only the lengths, ``head_dim``, ``dtype`` and ``mask`` matter: bits depend on the tiles,
        so batch and head counts must not.

    Returns
    -------
    q_tile, kv_tile : int
        Rows.
    """
    # Measured on 2 cores with 1 MiB of L2 each, forward + backward: within 3 % of the fastest of
    # (64 | 128 | 256 | 512) x (128 | 256 | 512) from 512 rows on, whatever the dtype; short causal
    # heads gain 10 to 25 % from the small tiles, which follow the diagonal more closely.
    return (128, 256) if problem.causal and problem.kv_len <= 512 else (256, 512)


def arithmetic_id() -> str:
    """Name of how this process computes: NumPy's version and a digest of sample results.

    Equal inputs give equal bits where the names are equal. The BLAS behind NumPy may choose
    another order inside a product for another CPU, and OpenBLAS does for another number of
    threads.
    """
    digest = hashlib.sha256()
    for dtype in (np.float32, np.float64):
        sample = (np.arange(640 * 64) * 40503 % 65536 / 32768 - 1).astype(dtype).reshape(640, 64)
        scores = sample[:512] @ sample[-256:].T  # as the products of a tile: K = 64, 512 and 256
        np.exp(scores, out=scores)
        for result in (scores, scores.T @ sample[:512], scores @ sample[:256],
                       np.ones((1, 512), dtype) @ scores):
            digest.update(result.tobytes())
    return f"numpy-{np.__version__}-{digest.hexdigest()[:12]}"


def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray, problem: Problem,
            config: Tiles) -> tuple[np.ndarray, np.ndarray]:
    """Attention, with memory linear in the lengths.

    Parameters
    ----------
    q : ndarray, shape [batch, q_len, n_q_head, head_dim]
    k, v : ndarray, shape [batch, kv_len, n_kv_head, head_dim]
        All of ``problem.dtype``, any strides; never written.
    problem : Problem
    config : Tiles

    Returns
    -------
    out : ndarray, shape and dtype of ``q``
    lse : ndarray, shape [batch, n_q_head, q_len]
        Natural-log log-sum-exp of the scaled scores; float32, or float64 for float64 inputs.
    """
    out = np.empty(q.shape, q.dtype)
    lse = np.empty((problem.batch, problem.n_q_head, problem.q_len), _compute_dtype(problem))
    if problem.q_len == 0 or problem.kv_len == 0:
        out[...], lse[...] = 0, -np.inf
        return out, lse
    shape = _shape(problem, config)
    with np.errstate(all="ignore"):  # NaN and inf pass through in silence, as on a GPU
        for heads in _chunks(problem, shape):
            k_head, v_head = _load(k, heads, lse.dtype), _load(v, heads, lse.dtype)
            for member in range(problem.q_per_kv):
                q_heads = _q_heads(heads, member, problem)
                q_scaled = _load(q, q_heads, lse.dtype)
                q_scaled *= problem.scale
                out_head, lse_head = forward_heads(q_scaled, k_head, v_head, shape)
                _store(out, q_heads, out_head)
                for index, (batch, head) in enumerate(q_heads):
                    lse[batch, head] = lse_head[index, 0]
    return out, lse


def backward(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray,
             lse: np.ndarray, problem: Problem, config: Tiles, schedule_name: str,
             dlse: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of attention, every sum in the order that the schedule fixes.

    dq of a q tile adds the kv tiles in order of their tickets; dk and dv of a kv tile add the q
    heads of the group, and for each of them the q tiles in order of the steps.

    Parameters
    ----------
    dout, q, out : ndarray, shape [batch, q_len, n_q_head, head_dim]
    k, v : ndarray, shape [batch, kv_len, n_kv_head, head_dim]
        All of ``problem.dtype``, any strides; never written.
    lse : ndarray, shape [batch, n_q_head, q_len]
        As :func:`forward` returns it.
    problem : Problem
    config : Tiles
    schedule_name : str
        A schedule, or ``"auto"``.
    dlse : ndarray, shape and dtype of ``lse``, optional
        Gradient of the loss with respect to ``lse``.

    Returns
    -------
    dq, dk, dv : ndarray, shapes and dtype of ``q``, ``k``, ``v``

    Raises
    ------
    InvalidInputError
        The schedule is unknown, or not defined for this mask.
    """
    shape = _shape(problem, config)
    schedule = schedules.resolve(schedule_name, shape)
    dq, dk, dv = (np.empty(like.shape, like.dtype) for like in (q, k, v))
    if problem.q_len == 0 or problem.kv_len == 0:
        for gradient in (dq, dk, dv):
            gradient[...] = 0
        return dq, dk, dv
    dtype = _compute_dtype(problem)
    with np.errstate(all="ignore"):
        for heads in _chunks(problem, shape):
            k_head, v_head = _load(k, heads, dtype), _load(v, heads, dtype)
            dk_head, dv_head = np.zeros_like(k_head), np.zeros_like(v_head)
            for member in range(problem.q_per_kv):
                q_heads = _q_heads(heads, member, problem)
                q_scaled = _load(q, q_heads, dtype)
                q_scaled *= problem.scale
                dout_head, out_head = _load(dout, q_heads, dtype), _load(out, q_heads, dtype)
                lse_head = _load_rows(lse, q_heads, dtype)
                delta = _delta(out_head, dout_head)
                if dlse is not None:  # d lse / d score = P, which is also the factor of -delta
                    delta -= _load_rows(dlse, q_heads, dtype)
                dq_head = backward_heads(
                    dout_head, q_scaled, k_head, v_head, delta, lse_head, dk_head, dv_head, shape,
                    schedule, first_member=member == 0)
                dq_head *= problem.scale
                _store(dq, q_heads, dq_head)
            _store(dk, heads, dk_head)  # q was scaled, so dk needs no factor
            _store(dv, heads, dv_head)
    return dq, dk, dv


def _delta(out: np.ndarray, dout: np.ndarray) -> np.ndarray:
    """Row sums of out * dout, [heads, 1, q_len]; overwrites ``out``."""
    out *= dout
    ones = np.ones((out.shape[2], 1), out.dtype)  # BLAS takes a sum in a fraction of np.sum's time
    return np.matmul(out, ones).reshape(len(out), 1, -1)


def _compute_dtype(problem: Problem) -> np.dtype:
    return np.dtype(np.float64 if problem.dtype == "float64" else np.float32)


def _shape(problem: Problem, config: Tiles) -> Shape:
    return Shape(problem.q_len, problem.kv_len, config.q_tile, config.kv_tile, problem.causal,
                 problem.mask_offset)


def _chunks(problem: Problem, shape: Shape) -> Iterator[list[tuple[int, int]]]:
    """(batch, kv_head) pairs, as many at once as the limits above allow."""
    tile = min(shape.q_rows, shape.q_len) * min(shape.kv_rows, shape.kv_len)
    head = (shape.q_len + shape.kv_len) * problem.head_dim
    count = max(1, min(MAX_TILE_ELEMENTS // tile, MAX_HEAD_ELEMENTS // head))
    total = problem.batch * problem.n_kv_head
    for start in range(0, total, count):
        yield [divmod(index, problem.n_kv_head)
               for index in range(start, min(start + count, total))]


def _q_heads(heads: list[tuple[int, int]], member: int, problem: Problem) -> list[tuple[int, int]]:
    return [(batch, head * problem.q_per_kv + member) for batch, head in heads]


def _load(array: np.ndarray, heads: list[tuple[int, int]], dtype: np.dtype) -> np.ndarray:
    """The named heads as contiguous [heads, len, head_dim]: one layout for BLAS, whatever came."""
    loaded = np.empty((len(heads), array.shape[1], array.shape[3]), dtype)
    for index, (batch, head) in enumerate(heads):
        loaded[index] = array[batch, :, head]
    return loaded


def _load_rows(array: np.ndarray, heads: list[tuple[int, int]], dtype: np.dtype) -> np.ndarray:
    """The named heads of lse or dlse, [heads, 1, q_len]."""
    rows = np.stack([array[batch, head] for batch, head in heads])[:, None]
    return rows.astype(dtype, copy=False)


def _store(array: np.ndarray, heads: list[tuple[int, int]], values: np.ndarray) -> None:
    for index, (batch, head) in enumerate(heads):
        array[batch, :, head] = values[index]
