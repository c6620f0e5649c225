"""The text of `python -m dashcupy check` for people."""

from __future__ import annotations

import textwrap
from collections import Counter

from ..terminal import duration, paint
from .bits import TESTS
from .expect import Comparison
from .inputs import INPUTS
from .run import DIFFERENT, EQUAL, REPEATED, CaseResult, RunResult, Settings, TensorResult
from .subject import Dashcupy, Subject

_WIDTH = 98
_VALUES = """\
Three figures for each tensor: its largest error against float64, the error of plain NumPy in the
same precision, and the bound."""
_BITS = """\
bits: a digest over the results of a line. They must be the same in every comparison:"""
_MAX_LINES = 20  # of one kind, in the comparison with another record


def print_head(subject: Subject, settings: Settings) -> None:
    """What is checked, where and how."""
    place = subject.place
    print(f"{paint(subject.title, 'bold')} on {paint(place.title, 'bold')}")
    why = f"({place.kind.upper()} because: {place.why})"
    print(textwrap.fill(why, _WIDTH, initial_indent="  ", subsequent_indent="  ") + "\n")
    if settings.values:
        print(_VALUES)
    if settings.tests:
        print(_BITS)
    for test in settings.tests:
        times = f", {settings.repeats} calls in all" if test in REPEATED else ""
        print(f"  {test:<8} {TESTS[test]}{times}")
    print(flush=True)


def print_case(result: CaseResult) -> None:
    """One case: a table with a line for each run, and what is wrong below it."""
    case, p = result.case, result.case.problem
    print(paint(f"{case.title} - {p.mask}", "bold"))
    print(f"  {p.dtype}, batch {p.batch}, {p.q_len} rows, {p.kv_len} keys, {p.n_q_head} heads on "
          f"{p.n_kv_head}, head_dim {p.head_dim}\n  {INPUTS[case.inputs]}")
    if 0 < result.reference_heads < result.heads:
        print(f"  float64 for {result.reference_heads} of {result.heads} kv heads; bits for all")
    for number, run in enumerate(result.runs):
        if number < 2 and run.tensors:  # one head line for the forward, one for the backwards
            print(paint(_columns("", "", [tensor.name for tensor in run.tensors], "bits"), "dim"))
        print(_run_line(run))
        for tensor in run.tensors:
            for fault in _faults(tensor):
                print(_indented(paint(f"{tensor.name}: {fault}", "red")))
    _print_not_made(result)
    print(flush=True)


def print_summary(subject: Subject, results: list[CaseResult], settings: Settings,
                  seconds: float) -> None:
    """One line about all cases, and one for each kind of failure."""
    runs = [run for result in results for run in result.runs]
    failed = sum(not run.ok for run in runs)
    refused = sum(bool(run.refused) for run in runs)
    done = len(runs) - refused
    bits = ", bits always the same" if settings.tests else ""
    text = f"all {done} checks hold: errors within bounds{bits}"
    if failed:
        text = f"{failed} of {done} checks FAILED"
        if isinstance(subject, Dashcupy):
            text += "; please report this with the output of `python -m dashcupy info`"
    more = f" ({refused} refused, see above)" if refused else ""
    print(paint(text, "red" if failed else "green") + f"{more}; {duration(seconds)}")
    kinds = {"values": "errors beyond their bounds"} | TESTS
    broken = Counter(kind for run in runs for kind in _broken(run))
    for kind in filter(broken.get, kinds):
        print(f"  {kind:<8} fails in {broken[kind]} of {done}: {kinds[kind]}")


def _broken(run: RunResult) -> list[str]:
    """Kinds of failures of a run."""
    wrong = any(tensor.report is not None and not tensor.report.ok for tensor in run.tensors)
    return ["values"] * wrong + [test for test, state in run.tests.items() if state == DIFFERENT]


def print_comparison(comparison: Comparison) -> None:
    """What ``--expect`` found."""
    print(f"\nbits here and in {comparison.file} ({comparison.other}):")
    total = comparison.n_equal + len(comparison.different)
    if total:
        text = f"{comparison.n_equal} of {total} results are equal, bit for bit"
        print(f"  {paint(text, 'red' if comparison.different else 'green')}")
    for title, lines, colour in (("", comparison.different, "red"),
                                 ("not comparable: ", comparison.incomparable, "yellow")):
        for line in lines[:_MAX_LINES]:
            print(_indented(paint(title, colour) + line, 2))
        if len(lines) > _MAX_LINES:
            print(f"  ... and {len(lines) - _MAX_LINES} more")
    if not total:
        print(f"  {paint('nothing could be compared', 'red')}")


def _columns(mark: str, name: str, cells: list[str], bits: str) -> str:
    return f"  {mark or '    '} {name:<15} " + "".join(
        f"{cell:<23}" for cell in (*cells, "", "")[:3]) + bits


def _run_line(run: RunResult) -> str:
    if run.refused:
        return f"  {paint('refused', 'yellow')} {run.name}: {run.refused}"
    if run.error:
        return f"  {paint('FAIL', 'red')} {run.name}: {run.error}"
    mark = paint("ok  ", "green") if run.ok else paint("FAIL", "red")
    return _columns(mark, run.name, [_cell(tensor) for tensor in run.tensors], run.digest[:8])


def _cell(tensor: TensorResult) -> str:
    if tensor.report is None or tensor.yardstick_error is None:
        return "-"
    report = tensor.report
    return " ".join(map(_short, (report.max_error, tensor.yardstick_error, report.max_bound)))


def _short(value: float) -> str:
    """Two digits: ``1.2e-3``."""
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _faults(tensor: TensorResult) -> list[str]:
    faults = [str(difference) for difference in tensor.differences]
    if tensor.report is not None and not tensor.report.ok:
        faults.insert(0, f"wrong values: {tensor.report}")
    return faults


def _print_not_made(result: CaseResult) -> None:
    """Comparisons that were asked for and could not be made, each reason once."""
    if result.reference_heads == 0 and any(
            tensor.report is None for run in result.runs for tensor in run.tensors):
        print("  values not compared: too long for float64 here; take shorter --len and --kv-len")
    reasons: dict[tuple[str, str], list[str]] = {}
    for run in result.runs:
        for test, state in run.tests.items():
            if state not in (EQUAL, DIFFERENT):
                reasons.setdefault((test, state), []).append(run.name)
    for (test, reason), names in reasons.items():
        of = "" if len(names) == len(result.runs) else f" of {', '.join(names)}"
        print(_indented(f"{paint(test + ' not compared', 'yellow')}{of}: {reason}", 2))


def _indented(text: str, by: int = 7) -> str:
    return textwrap.fill(text, _WIDTH, initial_indent=" " * by, subsequent_indent=" " * by,
                         break_long_words=False)
