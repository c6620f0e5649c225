"""Run one case of `python -m dashcupy check`: errors against float64, and bits."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import HangError, InvalidInputError, UnsupportedError
from ..problem import Problem
from ..reference import ErrorReport
from .bits import TESTS, Difference, digest, first_difference
from .cases import Case
from .inputs import digest_of, make_inputs
from .subject import FORWARD, Arrays, Subject
from .truth import Truth

EQUAL, DIFFERENT = "equal", "different"
# Comparisons on the same arrays, ``Settings.repeats`` calls each; and those in other arrays.
REPEATED = ("repeats", "load")
_VARIANTS = ("alone", "batch", "strided")
_PAD = 8  # elements behind each row of a strided view: rows stay aligned to 16 bytes


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
    differences
        What the comparisons of bits found.
    """

    name: str
    report: ErrorReport | None
    yardstick_error: float | None
    digest: str
    differences: tuple[Difference, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether errors are within their bounds and no bit changed."""
        return (self.report is None or self.report.ok) and not self.differences


@dataclass(frozen=True)
class RunResult:
    """The forward, or the backward with one schedule.

    Parameters
    ----------
    name
        ``"forward"`` or the schedule.
    fingerprint
        What the bits depend on beside the values; "" where no kernel serves it.
    tensors
        Its results.
    tests
        Comparison -> ``"equal"``, ``"different"``, or why it was not made.
    seconds
        Of all calls, with the copies back.
    refused
        Why this device cannot run it; then there are no tensors. "" if it ran.
    error
        Why it failed before there were tensors: a wait was given up, or a refusal of what was
        asked for. "" if it did not.
    """

    name: str
    fingerprint: str
    tensors: tuple[TensorResult, ...]
    tests: dict[str, str]
    seconds: float
    refused: str = ""
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether all that ran holds."""
        return not self.error and all(tensor.ok for tensor in self.tensors)

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
    inputs_digest
        SHA-256 of q, k, v and dout.
    reference_heads, heads
        kv heads compared with float64, and those there are; bits are compared for all.
    """

    case: Case
    runs: tuple[RunResult, ...]
    inputs_digest: str
    reference_heads: int
    heads: int

    @property
    def ok(self) -> bool:
        """Whether all that ran holds."""
        return all(run.ok for run in self.runs)


@dataclass(frozen=True)
class Settings:
    """How thoroughly to look.

    Parameters
    ----------
    repeats
        Times that each result is computed.
    tests
        Comparisons of bits to make, of ``TESTS``; those of ``REPEATED`` need two repeats.
    seed
        Of the inputs.
    values
        Whether results are compared with float64.
    required
        Whether a backward that is refused is a failure: it was asked for by name.
    """

    repeats: int
    tests: tuple[str, ...] = ("repeats", *_VARIANTS)
    seed: int = 0
    values: bool = True
    required: bool = False


@dataclass
class _Run:
    """A run on its way: what the first call gave, and what was found since."""

    name: str
    first: dict[str, np.ndarray] = field(default_factory=dict)
    found: dict[str, list[Difference]] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    refused: str = ""
    error: str = ""


def run_case(subject: Subject, case: Case, names: list[str], settings: Settings,
             on_step: Callable[[], None] = lambda: None) -> CaseResult:
    """Run the forward and the backwards of a case.

    Parameters
    ----------
    subject, case
        What to compute.
    names
        Of the backwards; all must be defined for the mask.
    settings
    on_step
        Called `n_steps` times.

    Raises
    ------
    InvalidInputError
        Results are beyond what the dtype can hold; or the subject writes its arguments.
    UnsupportedError
        There is no forward for the problem. A backward that cannot run is no error: the result
        says why.
    """
    return _CaseRun(subject, case, names, settings, on_step).result()


def n_steps(names: list[str], settings: Settings) -> int:
    """Steps of a case with those backwards."""
    return 1 + len(names) + sum(test in settings.tests for test in _VARIANTS)


class _CaseRun:
    """One case: its inputs there, and its runs."""

    def __init__(self, subject: Subject, case: Case, names: list[str], settings: Settings,
                 on_step: Callable[[], None]):
        self._subject, self._case, self._settings = subject, case, settings
        self._on_step = on_step
        self._host = make_inputs(case.inputs, case.problem, settings.seed)
        self._arrays = {name: subject.place.put(array) for name, array in self._host.items()}
        self._results: Arrays = {}
        self._runs = [_Run(name) for name in (FORWARD, *names)]
        # Before the calls, which take long: what cannot be judged is refused.
        self._truth = Truth(case.problem, self._host) if settings.values else None

    def result(self) -> CaseResult:
        for run in self._runs:
            self._first_calls(run)
            self._on_step()
        for test in _VARIANTS:
            if test in self._settings.tests:
                self._compare_variant(test)
                self._on_step()
        self._require_same_inputs()
        problem, truth = self._case.problem, self._truth
        return CaseResult(self._case, tuple(self._finished(run) for run in self._runs),
                          digest_of(self._host), len(truth.sample) if truth else 0,
                          problem.batch * problem.n_kv_head)

    def _first_calls(self, run: _Run) -> None:
        """The first call, and those that repeat it on the same arrays."""
        subject, settings, problem = self._subject, self._settings, self._case.problem
        start = time.perf_counter()

        def compute() -> Arrays:
            return subject.compute(problem, run.name, self._arrays, self._results)

        try:
            first = compute()
            run.first = {name: subject.place.get(array) for name, array in first.items()}
            if run.name == FORWARD:
                self._results = first
            for test in REPEATED:
                if test in settings.tests:
                    self._compare(run, test, self._repeated(compute, test == "load"), run.first)
            if "graph" in settings.tests:
                self._compare_graph(run)
        except HangError as error:  # of a backward, in a debug build
            run.error = str(error)
        except UnsupportedError as error:
            if run.name == FORWARD:
                raise
            if settings.required:
                run.error = str(error)
            else:
                run.refused = str(error)
        run.seconds += time.perf_counter() - start

    def _require_same_inputs(self) -> None:
        for name, array in self._arrays.items():
            if first_difference(self._subject.place.get(array), self._host[name]):
                raise InvalidInputError(f"{self._subject.title} changes its argument {name}, so "
                                        f"its results cannot be compared: it must only read it")

    def _repeated(self, compute: Callable[[], Arrays], loaded: bool) -> Iterator[Arrays]:
        with self._subject.place.load() if loaded else nullcontext(lambda i: None) as nudge:
            for i in range(self._settings.repeats - 1):
                nudge(i)
                yield compute()

    def _compare_graph(self, run: _Run) -> None:
        try:
            got = self._subject.replay(self._case.problem, run.name, self._arrays, self._results)
        except UnsupportedError as error:
            run.tests["graph"] = str(error)
        else:
            self._compare(run, "graph", [got], run.first)

    def _compare_variant(self, test: str) -> None:
        """All runs on the same values in other arrays."""
        problem = self._case.problem
        if test == "alone" and problem.batch * problem.n_kv_head == 1:
            for run in self._runs:
                run.tests[test] = "there is only one"
            return
        variant, arrays, expected_of = self._variant(test)
        results: Arrays = {}
        refusal = ""
        for run in self._runs:
            if not run.first:
                continue
            try:
                if refusal:
                    raise UnsupportedError(refusal)
                start = time.perf_counter()
                got = self._subject.compute(variant, run.name, arrays, results)
                expected = {name: expected_of(name, x) for name, x in run.first.items()}
                self._compare(run, test, [got], expected)
                run.seconds += time.perf_counter() - start
                if run.name == FORWARD:
                    results = got
            except HangError as error:
                run.error = str(error)
            except UnsupportedError as error:
                run.tests[test] = str(error)
                refusal = str(error) if run.name == FORWARD else ""

    def _variant(self, test: str) -> tuple[Problem, Arrays, Callable[[str, np.ndarray], object]]:
        """Problem and arrays of a variant, and what its results must be, from the first ones."""
        problem, put = self._case.problem, self._subject.place.put
        if test == "alone":
            # Views of the last sequence and its last kv head, which lie apart in memory.
            one = replace(problem, batch=1, n_q_head=problem.q_per_kv, n_kv_head=1)
            return one, {name: _last_head(name, x, problem) for name, x in self._arrays.items()}, \
                lambda name, x: _last_head(name, x, problem)
        if test == "batch":
            def rearranged(x):
                return np.concatenate([x[:1], x[::-1]])
            return (replace(problem, batch=problem.batch + 1),
                    {name: put(rearranged(x)) for name, x in self._host.items()},
                    lambda name, x: rearranged(x))
        return problem, {name: _strided(x, put) for name, x in self._host.items()}, \
            lambda name, x: x

    def _compare(self, run: _Run, test: str, calls, expected: dict[str, np.ndarray]) -> None:
        """Compare the results of calls with what is expected; only the first fault is kept."""
        place, problem = self._subject.place, self._case.problem
        faults: dict[str, tuple] = {}
        bad = dict.fromkeys(expected, 0)
        n_call = 0
        for results in calls:
            n_call += 1
            for name, array in results.items():
                fault = first_difference(place.get(array), expected[name])
                if fault:
                    bad[name] += 1
                    faults.setdefault(name, fault)
        for name, (count, index, got, wanted) in faults.items():
            run.found.setdefault(name, []).append(Difference(
                test, bad[name], n_call, count, expected[name].size, index, got, wanted,
                self._subject.locate(problem, run.name, name, index)))
        run.tests[test] = DIFFERENT if faults else EQUAL

    def _finished(self, run: _Run) -> RunResult:
        truth = self._truth
        tensors = () if run.error or run.refused else tuple(
            TensorResult(name, *(truth.compare(name, array) if truth else (None, None)),
                         digest(array), tuple(run.found.get(name, ())))
            for name, array in run.first.items())
        fingerprint = self._subject.fingerprint(self._case.problem, run.name)
        tests = {test: run.tests[test] for test in TESTS if test in run.tests}
        return RunResult(run.name, fingerprint, tensors, tests, run.seconds, run.refused,
                         run.error)


def _last_head(name: str, array, problem: Problem):
    """The last kv head of the last sequence, or the q heads that share it."""
    n_head = 1 if name in ("k", "v", "dk", "dv") else problem.q_per_kv
    return array[-1:, -n_head:] if name == "lse" else array[-1:, :, -n_head:]


def _strided(array: np.ndarray, put: Callable[[np.ndarray], object]):
    """The same values there, in memory [batch, heads, len, head_dim] with a gap behind each row."""
    batch, rows, heads, head_dim = array.shape
    memory = np.zeros((batch, heads, rows, head_dim + _PAD), array.dtype)
    memory[..., :head_dim] = array.swapaxes(1, 2)
    return put(memory)[..., :head_dim].swapaxes(1, 2)
