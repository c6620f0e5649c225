"""How much memory and time a check will take, before it starts."""

from __future__ import annotations

import time
from dataclasses import replace

from ..errors import InvalidInputError
from ..layout import numpy_dtype
from ..problem import Problem
from .cases import Case
from .inputs import make_inputs
from .run import REPEATED, Settings
from .subject import FORWARD, Subject
from .truth import memory_bytes, references, reference_scores

# Random numbers are drawn as 64-bit words, and summed as 32-bit integers.
_DRAW_BYTES = 8 + 4 + 4
_PROBE_LEN = 1024
_PROBE_LEN_OF_REFERENCE = 512
_PROBES = 3
_SHORT_SCORES = 1 << 28  # seconds on one core
# A backward has five products of matrices, a forward two.
_BACKWARD_WORK = 2.5


def require_memory(case: Case, n_backward: int) -> None:
    """Refuse a case whose arrays alone do not fit into the memory of this machine.

    Raises
    ------
    InvalidInputError
        With both sizes.
    """
    p, memory = case.problem, memory_bytes()
    as_q = p.batch * p.q_len * p.n_q_head * p.head_dim
    as_k = p.batch * p.kv_len * p.n_kv_head * p.head_dim
    itemsize = numpy_dtype(p.dtype).itemsize
    inputs, gradients = 2 * (as_q + as_k), as_q + 2 * as_k
    needed = ((2 * inputs + as_q + n_backward * gradients) * itemsize
              + _DRAW_BYTES * max(as_q, as_k))
    if memory is not None and needed > memory:
        raise InvalidInputError(
            f"the arrays of this check take {_gib(needed)}, and this machine has {_gib(memory)}: "
            f"give a smaller --batch, --len, --kv-len or --heads, or one --schedule")


def estimate_seconds(subject: Subject, work: list[tuple[Case, list[str]]],
                     settings: Settings) -> float:
    """Time on the CPU, from that of a small problem of the same kind; 0 if it is short anyway."""
    calls = sum(settings.repeats - 1 for test in REPEATED if test in settings.tests)
    calls += 1 + sum(test in settings.tests for test in ("batch", "strided", "process"))
    scores = calls * sum(each.n_score * (1 + _BACKWARD_WORK * len(names)) for each, names in work)
    if scores < _SHORT_SCORES:
        return 0.0
    case, _ = work[0]
    p = case.problem
    probe = Problem(1, _PROBE_LEN, _PROBE_LEN, p.q_per_kv, 1, p.head_dim, p.dtype, p.mask, p.scale)
    arrays = {name: subject.place.put(array)
              for name, array in make_inputs(case.inputs, probe).items()}
    per_score = _best(lambda: subject.compute(probe, FORWARD, arrays, {})) / (
        _PROBE_LEN * _PROBE_LEN * p.q_per_kv)
    seconds = scores * per_score
    if settings.values:
        rows = _PROBE_LEN_OF_REFERENCE
        small = replace(probe, q_len=rows, kv_len=rows, n_q_head=1)
        inputs = make_inputs(case.inputs, small)
        per_score = _best(lambda: references(small, inputs)) / rows**2
        seconds += sum(reference_scores(each.problem) for each, _ in work) * per_score
    return seconds


def _best(compute) -> float:
    """Seconds of the fastest of a few calls: the first one warms up, others may be disturbed."""
    seconds = []
    for _ in range(_PROBES):
        start = time.perf_counter()
        compute()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB"
