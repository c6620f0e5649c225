"""Errors of results against float64, beside the bound and the error of the plain formula."""

from __future__ import annotations

import os

import numpy as np

from ..errors import InvalidInputError
from ..problem import Problem
from ..reference import (
    ErrorReport,
    attention_backward_reference,
    attention_backward_terms,
    attention_backward_yardstick,
    attention_reference,
    attention_yardstick,
    default_floor,
    error_report,
)

# Scores that the float64 reference may compute for one case (some seconds). Heads beyond that are
# left out: a head's results do not depend on the others, and bits are compared for all of them.
MAX_REFERENCE_SCORES = 1 << 24
# Scores of one head, above which there is no reference: it holds whole matrices (2 GiB each).
MAX_HEAD_SCORES = 1 << 28
_MATRICES = 8  # of float64 that it holds at a time, at most
_GRADIENT_FACTOR = 3.0
_FORWARD_FACTOR = 2.0
_SUMMED_BY_TENSOR_CORES = ("float16", "bfloat16")
_LEAST_FLOOR = 2.0**-126  # smaller float32 numbers become 0 on a GPU


def memory_bytes() -> int | None:
    """Memory of this machine; None where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


class Truth:
    """Float64 results of a case, or of as many of its heads as are cheap.

    Parameters
    ----------
    problem
    inputs
        ``q``, ``k``, ``v`` and ``dout``.

    Raises
    ------
    InvalidInputError
        A result is beyond what the dtype can hold: an error could be anything.

    Attributes
    ----------
    sample : list of (batch, kv head)
        Heads that are compared; empty if one alone is too long.
    """

    def __init__(self, problem: Problem, inputs: dict[str, np.ndarray]):
        self._problem = problem
        self.sample = _sample(problem)
        self._exact: dict[str, np.ndarray] = {}
        self._plain: dict[str, np.ndarray] = {}
        self._plain_errors: dict[str, float] = {}
        if self.sample:
            self._exact, self._plain = references(
                problem, {name: self._gather(name, array) for name, array in inputs.items()})
            with np.errstate(over="ignore", invalid="ignore"):
                self._judge_plain()

    def compare(self, name: str, got: np.ndarray) -> tuple[ErrorReport | None, float | None]:
        """Errors of a result and their bounds, and the plain formula's largest error."""
        if not self.sample:
            return None, None
        return self._report(name, self._gather(name, got)), self._plain_errors[name]

    def _report(self, name: str, got: np.ndarray) -> ErrorReport:
        exact = self._exact[name]
        factor = _FORWARD_FACTOR if name in ("out", "lse") else _GRADIENT_FACTOR
        floor = self._lse_floor(exact) if name == "lse" else None
        if name in ("dq", "dk"):
            # Multiples of the scale: beside those of a tiny one the default would allow anything.
            share = min(1.0, self._problem.scale * self._problem.head_dim ** 0.5)
            floor = max(share * default_floor(got.dtype), _LEAST_FLOOR)
        return error_report(got, exact, self._plain[name], factor=factor, floor=floor,
                            terms=self._exact.get(f"{name}_terms"))

    def _judge_plain(self) -> None:
        """The plain formula is within its own bounds, unless it overflows or they do."""
        p = self._problem
        for name, plain in self._plain.items():
            report = self._report(name, plain)
            if not report.ok:
                raise InvalidInputError(
                    f"--scale {p.scale:g}: {name} of the inputs of this check is beyond what "
                    f"{p.dtype} can hold, or its square what float64 can, so that no error can be "
                    f"judged; give a scale nearer to the default, {p.head_dim ** -0.5:.3g}")
            self._plain_errors[name] = report.max_error

    def _lse_floor(self, exact: np.ndarray) -> float | None:
        """Error of lse that tensor cores may make.

        They add the products of 16 columns to a float32 sum at a time and cut off what does not
        fit, always downwards; the plain formula rounds to nearest, and errors cancel.
        """
        if self._problem.dtype not in _SUMMED_BY_TENSOR_CORES:
            return None
        largest = float(np.abs(exact[np.isfinite(exact)]).max(initial=32.0))
        return -(-self._problem.head_dim // 16) * 2.0**-23 * largest

    def _gather(self, name: str, array: np.ndarray) -> np.ndarray:
        """The sampled groups of heads of an array, each as a sequence of its own."""
        if name == "lse":
            n_head = self._problem.q_per_kv
            return np.stack([array[batch, head * n_head:(head + 1) * n_head]
                             for batch, head in self.sample])
        n_head = array.shape[2] // self._problem.n_kv_head
        return np.stack([array[batch, :, head * n_head:(head + 1) * n_head]
                         for batch, head in self.sample])


def _sample(problem: Problem) -> list[tuple[int, int]]:
    """(batch, kv head) pairs for the reference: all, or as many as are cheap; none if too long."""
    scores = problem.q_len * problem.kv_len
    memory = memory_bytes()
    if scores > MAX_HEAD_SCORES or (memory and 8 * _MATRICES * scores > memory):
        return []
    n_pair = problem.batch * problem.n_kv_head
    count = min(n_pair, max(1, MAX_REFERENCE_SCORES // max(1, scores * problem.q_per_kv)))
    return [divmod(round(i), problem.n_kv_head) for i in np.linspace(0, n_pair - 1, count)]


def reference_scores(problem: Problem) -> int:
    """Scores that the float64 reference computes for a case."""
    return len(_sample(problem)) * problem.q_len * problem.kv_len * problem.q_per_kv


def references(problem: Problem, inputs: dict[str, np.ndarray]
               ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Float64 results and those of the plain formula in the precision of the inputs.

    The former, for 16-bit dtypes, with ``dq_terms`` and ``dk_terms``, from
    `attention_backward_terms`: `error_report` allows nothing on their account to others.
    """
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    options = {"mask": problem.mask, "scale": problem.scale}
    results = []
    for forward, backward in ((attention_reference, attention_backward_reference),
                              (attention_yardstick, attention_backward_yardstick)):
        with np.errstate(over="ignore", invalid="ignore"):  # `Truth` refuses what comes of it
            out, lse = forward(q, k, v, **options)
            dq, dk, dv = backward(dout, q, k, v, **options)
        results.append({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
    exact, plain = results
    if problem.dtype in _SUMMED_BY_TENSOR_CORES:
        with np.errstate(over="ignore", invalid="ignore"):
            exact["dq_terms"], exact["dk_terms"] = attention_backward_terms(dout, q, k, v,
                                                                            **options)
    return exact, plain
