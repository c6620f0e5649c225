"""What is right and how wrong is allowed: float64 attention, a same-precision yardstick, bounds.

All of it is the plain formula on whole matrices, one head at a time: slow, and obviously right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from .problem import Problem

# What a sum of tensor cores may err, in eps of float32 and of the sum of its terms' sizes: they cut
# off what does not fit, where the plain formula rounds to nearest and may make no error at all.
_SUM_ROUNDINGS = 4


def attention_reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: str = "full",
                        scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64.

    Parameters
    ----------
    q : array_like, shape [batch, q_len, n_q_head, head_dim]
    k, v : array_like, shape [batch, kv_len, n_kv_head, head_dim]
        Any real dtype.
    mask : str
        ``"full"``, ``"causal"`` or ``"causal_top_left"``.
    scale : float, optional
        Factor on ``q k^T``; default ``1 / sqrt(head_dim)``.

    Returns
    -------
    out : ndarray, float64, shape of ``q``
    lse : ndarray, float64, shape [batch, n_q_head, q_len]
        Natural-log log-sum-exp. A row that sees no key has ``out`` 0 and ``lse`` -inf.
    """
    return _forward(q, k, v, mask, scale, _Exact())


def attention_backward_reference(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *,
                                 mask: str = "full", scale: float | None = None,
                                 dlse: np.ndarray | None = None
                                 ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv in float64, in the shapes of q, k, v.

    ``dout`` and ``dlse`` (None: zeros) are the gradients of the loss with respect to ``out`` and
    ``lse``; the other arguments as for :func:`attention_reference`.
    """
    return _backward(dout, q, k, v, mask, scale, dlse, _Exact())


def attention_backward_terms(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *,
                             mask: str = "full", scale: float | None = None
                             ) -> tuple[np.ndarray, np.ndarray]:
    """dq and dk with the sizes of all terms of ``dout v^T``, without delta.

    Where a row sees one key, ``dout v^T`` cancels against delta: dq and dk are exactly 0, and what
    a right result errs depends on these sizes alone.

    Returns
    -------
    dq_terms, dk_terms : ndarray, float64, shapes of ``q`` and ``k``
        For :func:`error_report`. Arguments as :func:`attention_reference`.
    """
    problem = _problem(q, k, mask, scale)
    dq_terms, dk_terms = np.zeros(q.shape), np.zeros(k.shape)
    for batch, head, kv_head in _heads(problem):
        q_, k_, v_, dout_ = (_Exact.operand(array) for array in (
            q[batch, :, head], k[batch, :, kv_head], v[batch, :, kv_head], dout[batch, :, head]))
        p, _ = _softmax(q_, k_, problem)
        terms = p * (np.abs(dout_) @ np.abs(v_).T)
        dk_terms[batch, :, kv_head] += problem.scale * (terms.T @ np.abs(q_))
        dq_terms[batch, :, head] = problem.scale * (terms @ np.abs(k_))
    return dq_terms, dk_terms


def attention_yardstick(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, mask: str = "full",
                        scale: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The plain formula in the precision of ``q.dtype``: what a fair error looks like.

    Sums are float32 (float64 for float64), and what a matrix product reads is rounded to the
    dtype: q, k, v, P, and out. Arguments and results as :func:`attention_reference`; ``out`` has
    the dtype of ``q``, ``lse`` that of the sums.
    """
    return _forward(q, k, v, mask, scale, _Rounded(q.dtype))


def attention_backward_yardstick(dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, *,
                                 mask: str = "full", scale: float | None = None,
                                 dlse: np.ndarray | None = None
                                 ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv as :func:`attention_yardstick` has out: P, dS, out and results are rounded."""
    return _backward(dout, q, k, v, mask, scale, dlse, _Rounded(q.dtype))


@dataclass(frozen=True)
class ErrorReport:
    """Errors of one tensor beside what is allowed; true where both are within their bound."""

    max_error: float
    max_bound: float
    frobenius_error: float
    frobenius_bound: float

    @property
    def ok(self) -> bool:
        """Whether both errors are within their bounds (never for a NaN or an infinite bound)."""
        return (self.max_error <= self.max_bound < math.inf
                and self.frobenius_error <= self.frobenius_bound < math.inf)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return (f"max error {self.max_error:.3g} (allowed {self.max_bound:.3g}), relative "
                f"Frobenius error {self.frobenius_error:.3g} (allowed {self.frobenius_bound:.3g})")


def error_report(got: np.ndarray, truth: np.ndarray, yardstick: np.ndarray, *,
                 factor: float = 2.0, floor: float | None = None,
                 terms: np.ndarray | None = None) -> ErrorReport:
    """Compare a result with the truth, allowing a multiple of what the plain formula errs.

    Parameters
    ----------
    got : ndarray
        The result; its dtype tells how large one rounding is.
    truth : ndarray, float64
        From :func:`attention_reference` or :func:`attention_backward_reference`.
    yardstick : ndarray
        The same tensor from the ``_yardstick`` functions.
    factor : float
        Multiple of the yardstick's error; 2 for ``out`` and ``lse``, 3 for gradients.
    floor : float, optional
        Absolute error that is always allowed, for results that should cancel to 0. The default
        suits inputs of unit size: some tens of roundings of float32 sums; more for float64, where
        the truth is no more precise than the result. Scale it with the inputs.
    terms : ndarray, float64, optional
        For dq and dk, from :func:`attention_backward_terms`: 4 float32 roundings of these sizes
        are allowed on top to 16-bit dtypes, which tensor cores sum. Without them, values that
        cancel to 0 would be judged by the yardstick's noise, which may be 0 too.

    Returns
    -------
    ErrorReport
        Max-abs error against ``factor`` times the yardstick's plus 2 ulp of the largest value,
        and relative Frobenius error against ``factor`` times the yardstick's plus one rounding.
        The second catches a small tile that is wrong by less than the first allows. Infinite
        values count as equal where ``got`` and ``truth`` agree on them.
    """
    eps = float(ml_dtypes.finfo(got.dtype).eps)
    floor = default_floor(got.dtype) if floor is None else floor
    error, allowed = _difference(got, truth), _difference(yardstick, truth)
    size = np.abs(truth[np.isfinite(truth)])
    norm = float(np.linalg.norm(size))
    unit = norm if norm > 0 else 1.0
    sums = np.zeros(()) if terms is None or got.itemsize > 2 else \
        _SUM_ROUNDINGS * np.finfo(np.float32).eps * terms
    return ErrorReport(
        max_error=float(error.max(initial=0)),
        max_bound=factor * float(allowed.max(initial=0)) + 2 * eps * float(size.max(initial=0))
        + floor + float(sums.max(initial=0)),
        frobenius_error=float(np.linalg.norm(error)) / unit,
        frobenius_bound=(factor * float(np.linalg.norm(allowed)) + eps * norm
                         + floor * truth.size ** 0.5 + float(np.linalg.norm(sums))) / unit)


def default_floor(dtype: np.dtype) -> float:
    """The ``floor`` of `error_report` for inputs of unit size and the default scale."""
    return 2.0 ** -40 if dtype == np.float64 else 2.0 ** -18


class _Exact:
    """Everything in float64."""

    sums = result = np.dtype(np.float64)

    @staticmethod
    def operand(array: np.ndarray) -> np.ndarray:
        return np.asarray(array).astype(np.float64)


class _Rounded:
    """Operands of products rounded to ``dtype``, sums in float32 (float64 for float64)."""

    def __init__(self, dtype: np.dtype):
        self.result = np.dtype(dtype)
        self.sums = np.dtype(np.float64 if dtype == np.float64 else np.float32)

    def operand(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array).astype(self.result).astype(self.sums)


def _visible(q_len: int, kv_len: int, mask: str) -> np.ndarray:
    """Whether row i sees key j: ``j <= i + offset``."""
    if mask == "full":
        return np.ones((q_len, kv_len), bool)
    offset = kv_len - q_len if mask == "causal" else 0
    return np.arange(kv_len) <= np.arange(q_len)[:, None] + offset


def _softmax(q: np.ndarray, k: np.ndarray, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """P [q_len, kv_len], rows that see no key 0, and lse [q_len]."""
    scores = q @ k.T * q.dtype.type(problem.scale)
    scores[~_visible(problem.q_len, problem.kv_len, problem.mask)] = -np.inf
    row_max = scores.max(axis=1, keepdims=True, initial=-np.inf)
    live = row_max[:, 0] != -np.inf
    p = np.zeros_like(scores)
    lse = np.full(problem.q_len, -np.inf, q.dtype)
    p[live] = np.exp(scores[live] - row_max[live])
    total = p.sum(axis=1, keepdims=True)
    p[live] /= total[live]
    lse[live] = (row_max[live] + np.log(total[live]))[:, 0]
    return p, lse


def _forward(q, k, v, mask, scale, precision) -> tuple[np.ndarray, np.ndarray]:
    problem = _problem(q, k, mask, scale)
    out = np.zeros(q.shape, precision.result)
    lse = np.zeros((problem.batch, problem.n_q_head, problem.q_len), precision.sums)
    for batch, head, kv_head in _heads(problem):
        q_, k_, v_ = (precision.operand(array) for array in
                      (q[batch, :, head], k[batch, :, kv_head], v[batch, :, kv_head]))
        p, lse[batch, head] = _softmax(q_, k_, problem)
        out[batch, :, head] = precision.operand(p) @ v_
    return out, lse


def _backward(dout, q, k, v, mask, scale, dlse,
              precision) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    problem = _problem(q, k, mask, scale)
    dq, dk, dv = (np.zeros(array.shape, precision.sums) for array in (q, k, v))
    factor = precision.sums.type(problem.scale)
    for batch, head, kv_head in _heads(problem):
        q_, k_, v_, dout_ = (precision.operand(array) for array in (
            q[batch, :, head], k[batch, :, kv_head], v[batch, :, kv_head], dout[batch, :, head]))
        p, lse = _softmax(q_, k_, problem)
        out = precision.operand(precision.operand(p) @ v_)
        delta = (out * dout_).sum(axis=1, keepdims=True)
        if dlse is not None:  # dS = P (dP - rowsum(out * dout)) + P dlse
            delta[lse != -np.inf, 0] -= dlse[batch, head][lse != -np.inf].astype(precision.sums)
        ds = precision.operand(p * (dout_ @ v_.T - delta))
        dv[batch, :, kv_head] += precision.operand(p).T @ dout_
        dk[batch, :, kv_head] += factor * (ds.T @ q_)
        dq[batch, :, head] = factor * (ds @ k_)
    return tuple(array.astype(precision.result) for array in (dq, dk, dv))


def _problem(q: np.ndarray, k: np.ndarray, mask: str, scale: float | None) -> Problem:
    batch, q_len, n_q_head, head_dim = q.shape
    return Problem(batch, q_len, k.shape[1], n_q_head, k.shape[2], head_dim, "float64", mask,
                   head_dim ** -0.5 if scale is None else scale)


def _heads(problem: Problem) -> Iterator[tuple[int, int, int]]:
    """(batch, q head, its kv head)."""
    for batch in range(problem.batch):
        for head in range(problem.n_q_head):
            yield batch, head, head // problem.q_per_kv


def _difference(array: np.ndarray, truth: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # inf - inf, replaced below
        array = array.astype(np.float64)
        return np.where(array == truth, 0.0, np.abs(array - truth))
