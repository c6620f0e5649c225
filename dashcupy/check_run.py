"""Run one case of `python -m dashcupy check`: errors against float64, and bits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import env
from .api import attention, attention_backward
from .check_cases import Case, make_inputs
from .check_device import Place
from .errors import UnsupportedError
from .plan import make_plan
from .problem import Problem
from .reference import (
    ErrorReport,
    attention_backward_reference,
    attention_backward_yardstick,
    attention_reference,
    attention_yardstick,
    error_report,
)

# Scores that the float64 reference may compute for one case (some seconds). Heads beyond that are
# left out: a head's results do not depend on the others, and bits are compared for all of them.
MAX_REFERENCE_SCORES = 1 << 24
# Scores of one head, above which there is no reference: it holds whole matrices (2 GiB each).
MAX_HEAD_SCORES = 1 << 28
_GRADIENT_FACTOR = 3.0
_FORWARD_FACTOR = 2.0
_CAUSAL_ARGUMENT = {"full": False, "causal": True, "causal_top_left": "top_left"}


@dataclass(frozen=True)
class TensorResult:
    """One result tensor.

    Parameters
    ----------
    name
        ``"out"``, ``"lse"``, ``"dq"``, ``"dk"`` or ``"dv"``.
    report
        Errors against float64, and their bounds; None where the lengths are too large for that.
    yardstick_error
        Largest error of the plain formula in the same precision; None likewise.
    digest
        SHA-256 of the bytes, in hexadecimal.
    same
        Whether every repeat had that digest.
    alone
        Whether one sequence and one group of heads, computed alone from strided views, has the
        same bytes; None where there is only one.
    """

    name: str
    report: ErrorReport | None
    yardstick_error: float | None
    digest: str
    same: bool
    alone: bool | None

    @property
    def ok(self) -> bool:
        """Whether errors are within their bounds and no bit changed."""
        return bool((self.report is None or self.report.ok) and self.same
                    and self.alone is not False)


@dataclass(frozen=True)
class RunResult:
    """The forward, or the backward with one schedule.

    Parameters
    ----------
    name
        ``"forward"`` or the schedule.
    fingerprint
        All that the bits depend on, see `dashcupy.plan.Plan`; "" where no kernel serves it.
    tensors
        Its results.
    seconds
        Of all repeats, with the copies back.
    refused
        Why this device cannot run it; then there are no tensors. "" if it ran.
    """

    name: str
    fingerprint: str
    tensors: tuple[TensorResult, ...]
    seconds: float
    refused: str = ""

    @property
    def ok(self) -> bool:
        """Whether all that ran holds."""
        return all(tensor.ok for tensor in self.tensors)

    @property
    def digest(self) -> str:
        """One digest for all tensors."""
        return hashlib.sha256("".join(t.digest for t in self.tensors).encode()).hexdigest()


@dataclass(frozen=True)
class CaseResult:
    """One case: the forward first, then a backward for each schedule.

    Parameters
    ----------
    case
        What was asked.
    runs
        What came out.
    reference_heads, heads
        kv heads compared with float64, and those there are; bits are compared for all.
    """

    case: Case
    runs: tuple[RunResult, ...]
    reference_heads: int
    heads: int

    @property
    def ok(self) -> bool:
        """Whether all that ran holds."""
        return all(run.ok for run in self.runs)


def run_case(case: Case, schedules: list[str], place: Place, repeats: int, seed: int = 0,
             on_step: Callable[[], None] = lambda: None) -> CaseResult:
    """Run the forward and, for each schedule, the backward of a case.

    Parameters
    ----------
    case, place
        What to compute, and where.
    schedules
        Names; all must be defined for the mask.
    repeats
        Times that each is computed; the bits must be the same every time.
    seed
        Of the inputs.
    on_step
        Called after the forward and after each schedule.

    Raises
    ------
    UnsupportedError
        This device has no forward for the problem. A schedule that it cannot run, or a backward
        that it has not, is no error: the result says why.
    """
    problem, inputs = case.problem, make_inputs(case, seed)
    arrays = {name: place.put(array) for name, array in inputs.items()}
    sample = _sample(problem)
    truth, yardstick = _references(problem, {
        name: _gather(array, sample, problem) for name, array in inputs.items()
    }) if sample else ({}, {})

    def compare(name: str, got: np.ndarray) -> tuple[ErrorReport | None, float | None]:
        if not sample:
            return None, None
        got = _gather_rows(got, sample, problem) if name == "lse" else _gather(got, sample, problem)
        factor = _FORWARD_FACTOR if name in ("out", "lse") else _GRADIENT_FACTOR
        report = error_report(got, truth[name], yardstick[name], factor=factor)
        return report, error_report(yardstick[name], truth[name], yardstick[name]).max_error

    keep: dict[str, object] = {}

    def forward(part: _Part) -> dict[str, object]:
        out, lse = attention(*(part.of(arrays[name]) for name in "qkv"), return_lse=True,
                             causal=_CAUSAL_ARGUMENT[problem.mask], scale=problem.scale)
        if part.whole:
            keep.update(out=out, lse=lse)
        return {"out": out, "lse": lse}

    def backward(part: _Part, schedule: str) -> dict[str, object]:
        gradients = attention_backward(
            *(part.of(arrays[name]) for name in ("dout", "q", "k", "v")), part.of(keep["out"]),
            part.of_rows(keep["lse"]), causal=_CAUSAL_ARGUMENT[problem.mask],
            scale=problem.scale, schedule=schedule)
        return dict(zip(("dq", "dk", "dv"), gradients))

    debug = env.debug()
    plan = make_plan(problem, "forward", place.target)
    runs = [_run("forward", plan.fingerprint, forward, problem, place, repeats, compare)]
    on_step()
    for name in schedules:
        fingerprint = ""
        try:
            fingerprint = make_plan(problem, "backward", place.target, name,
                                    debug=debug).fingerprint
            runs.append(_run(name, fingerprint, lambda part, name=name: backward(part, name),
                             problem, place, repeats, compare))
        except UnsupportedError as error:
            runs.append(RunResult(name, fingerprint, (), 0.0, str(error)))
        on_step()
    return CaseResult(case, tuple(runs), len(sample), problem.batch * problem.n_kv_head)


class _Part:
    """All of a batch, or its last sequence with its last kv head as views."""

    def __init__(self, problem: Problem, whole: bool):
        self.whole, self._q_per_kv, self._n_kv_head = whole, problem.q_per_kv, problem.n_kv_head

    def of(self, array):
        """Part of an array [batch, len, heads, head_dim]."""
        n_head = array.shape[2] // self._n_kv_head
        return array if self.whole else array[-1:, :, -n_head:]

    def of_rows(self, array):
        """Part of an array [batch, n_q_head, q_len]."""
        return array if self.whole else array[-1:, -self._q_per_kv:]


def _run(name, fingerprint, compute, problem, place, repeats, compare) -> RunResult:
    whole, last = _Part(problem, True), _Part(problem, False)
    start = time.perf_counter()
    first = {name: place.get(array) for name, array in compute(whole).items()}
    digests = {name: _digest(array) for name, array in first.items()}
    same = dict.fromkeys(first, True)
    for _ in range(repeats - 1):
        for tensor, array in compute(whole).items():
            same[tensor] &= _digest(place.get(array)) == digests[tensor]
    alone = dict.fromkeys(first)
    if problem.batch * problem.n_kv_head > 1:
        for tensor, array in compute(last).items():
            part = last.of_rows(first[tensor]) if tensor == "lse" else last.of(first[tensor])
            alone[tensor] = _digest(place.get(array)) == _digest(part)
    seconds = time.perf_counter() - start
    tensors = tuple(TensorResult(tensor, *compare(tensor, array), digests[tensor], same[tensor],
                                 alone[tensor]) for tensor, array in first.items())
    return RunResult(name, fingerprint, tensors, seconds)


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).view(np.uint8)).hexdigest()


def _sample(problem: Problem) -> list[tuple[int, int]]:
    """(batch, kv head) pairs for the reference: all, or as many as are cheap; none if too long."""
    if problem.q_len * problem.kv_len > MAX_HEAD_SCORES:
        return []
    pairs = [(batch, head) for batch in range(problem.batch) for head in range(problem.n_kv_head)]
    scores = max(1, problem.q_len * problem.kv_len * problem.q_per_kv)
    count = min(len(pairs), max(1, MAX_REFERENCE_SCORES // scores))
    return [pairs[round(i)] for i in np.linspace(0, len(pairs) - 1, count)]


def _gather(array: np.ndarray, sample: list[tuple[int, int]], problem: Problem) -> np.ndarray:
    """The sampled groups of [batch, len, heads, head_dim], each as a sequence of its own."""
    n_head = array.shape[2] // problem.n_kv_head
    return np.stack([array[batch, :, head * n_head:(head + 1) * n_head] for batch, head in sample])


def _gather_rows(lse: np.ndarray, sample: list[tuple[int, int]], problem: Problem) -> np.ndarray:
    n_head = problem.q_per_kv
    return np.stack([lse[batch, head * n_head:(head + 1) * n_head] for batch, head in sample])


def _references(problem: Problem, inputs: dict[str, np.ndarray]
                ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Float64 results and those of the plain formula in the precision of the inputs."""
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    options = {"mask": problem.mask, "scale": problem.scale}
    results = []
    for forward, backward in ((attention_reference, attention_backward_reference),
                              (attention_yardstick, attention_backward_yardstick)):
        out, lse = forward(q, k, v, **options)
        dq, dk, dv = backward(dout, q, k, v, **options)
        results.append({"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv})
    return results[0], results[1]
