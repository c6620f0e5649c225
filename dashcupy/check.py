"""``python -m dashcupy check``: right values and unchanging bits, on this machine."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import textwrap
import time
from dataclasses import asdict
from pathlib import Path

from . import info, schedules
from .check_cases import INPUTS, Case, default_cases, own_cases
from .check_device import DEVICES, Place, choose_place
from .check_run import CaseResult, RunResult, TensorResult, run_case
from .config import GPU_DTYPES
from .errors import InvalidInputError
from .problem import DTYPES, Problem, mask_from_causal
from .terminal import Progress, duration, paint
from .version import __version__

DESCRIPTION = """\
Run the forward, and the backward with each schedule, on inputs that are hard in different ways.
Every result is compared with float64, and its bits with those of the repeats and of one sequence
and head computed alone. Exit status: 0 if all hold, 1 if not, 2 for an error.
"""
REPEATS = {"cpu": 3, "gpu": 20}
QUICK_REPEATS = {"cpu": 2, "gpu": 5}
_OWN_SHAPE = ("batch", "len", "kv_len", "heads", "kv_heads", "head_dim", "dtype", "causal")
_LEGEND = """\
Three figures for each tensor: its largest error against float64, the error of plain NumPy in the
same precision, and the bound. bits: a digest over the results of a line, all computed {repeats}
times; a sequence and head alone must have the same bits too.
"""


def add_parser(commands) -> None:
    """Add the command ``check`` to the subparsers of a command line."""
    parser = commands.add_parser(
        "check", help="are the results right, and their bits always the same, on this machine",
        description=DESCRIPTION)
    add = parser.add_argument
    add("--device", choices=DEVICES, default="auto", help="default: the GPU if there is one")
    add("--schedule", metavar="NAME",
        help=f"only this one of {', '.join(schedules.names())} and auto (default: all)")
    add("--quick", action="store_true", help="fewer cases, fewer repeats")
    add("--repeats", type=int, metavar="N",
        help=f"times that each result is computed (default: {REPEATS['cpu']} on the CPU, "
             f"{REPEATS['gpu']} on a GPU)")
    add("--seed", type=int, default=0, help="of the inputs (default: 0)")
    add("--json", metavar="FILE", help="write a record for machines; - for stdout, with no table")
    own = parser.add_argument_group(
        "own shape", "any of these replaces the cases by one problem of your own").add_argument
    own("--batch", type=int, metavar="N", help="sequences (default: 1)")
    own("--len", type=int, metavar="N", help="rows of q (default: 512)")
    own("--kv-len", type=int, metavar="N", help="rows of k and v (default: those of q)")
    own("--heads", type=int, metavar="N", help="q heads (default: 2)")
    own("--kv-heads", type=int, metavar="N", help="heads of k and v (default: those of q)")
    own("--head-dim", type=int, metavar="N", help="columns of a head (default: 64)")
    own("--dtype", choices=DTYPES, help="default: bfloat16")
    own("--causal", nargs="?", const="bottom_right", choices=("bottom_right", "top_left"),
        help="causal mask, aligned bottom_right (default) or top_left; without it, full")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    start = time.perf_counter()
    place = choose_place(args.device)
    cases = _cases(args, place)
    work = [(case, _schedules(args.schedule, case.problem)) for case in cases]
    work = [(case, names) for case, names in work if names]
    if not work:
        raise InvalidInputError(
            f"schedule={args.schedule!r} is defined for none of the masks to check (allowed here: "
            f"{', '.join(_schedules(None, cases[0].problem))})")
    repeats = _repeats(args, place)
    show = args.json != "-"
    if show:
        _print_head(place, repeats)

    results = []
    with Progress(sum(1 + len(names) for _, names in work),
                  work=sum((1 + len(names)) * case.n_score for case, names in work)) as progress:
        for case, names in work:
            progress.start(case.title)
            results.append(run_case(case, names, place, repeats, args.seed, functools.partial(
                progress.step, case.n_score)))
            progress.clear()
            if show:
                _print_case(results[-1])
    seconds = time.perf_counter() - start
    if show:
        _print_summary(results, seconds)
    if args.json:
        _write_record(args.json, _record(results, place, repeats, args.seed, seconds))
    return 0 if all(result.ok for result in results) else 1


def _cases(args: argparse.Namespace, place: Place) -> list[Case]:
    given = {name: getattr(args, name) for name in _OWN_SHAPE if getattr(args, name) is not None}
    if not given:
        return default_cases(place.target, args.quick)
    sizes = {"batch": 1, "len": 512, "heads": 2, "head_dim": 64, "dtype": GPU_DTYPES[1],
             "causal": False} | given
    sizes = {"kv_len": sizes["len"], "kv_heads": sizes["heads"]} | sizes
    for name, value in given.items():
        if type(value) is int and value < 1:
            raise InvalidInputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    return own_cases(Problem(
        sizes["batch"], sizes["len"], sizes["kv_len"], sizes["heads"], sizes["kv_heads"],
        sizes["head_dim"], sizes["dtype"], mask_from_causal(sizes["causal"]),
        sizes["head_dim"] ** -0.5))


def _schedules(asked: str | None, problem: Problem) -> list[str]:
    if asked == "auto":
        return ["auto"]
    names = [schedules.get(asked).NAME] if asked else schedules.names()
    return [name for name in names if schedules.supports(name, problem.mask)]


def _repeats(args: argparse.Namespace, place: Place) -> int:
    if args.repeats is None:
        return (QUICK_REPEATS if args.quick else REPEATS)[place.kind]
    if args.repeats < 1:
        raise InvalidInputError(f"--repeats {args.repeats}: must be at least 1")
    return args.repeats


def _print_head(place: Place, repeats: int) -> None:
    print(f"dashcupy {__version__} on {paint(place.title, 'bold')}")
    why = f"({place.kind.upper()} because: {place.why})"
    print(textwrap.fill(why, 98, initial_indent="  ", subsequent_indent="  ") + "\n")
    print(_LEGEND.format(repeats=repeats), flush=True)


def _print_case(result: CaseResult) -> None:
    case, p = result.case, result.case.problem
    print(paint(f"{case.title} - {p.mask}", "bold"))
    print(f"  {p.dtype}, batch {p.batch}, {p.q_len} rows, {p.kv_len} keys, {p.n_q_head} heads on "
          f"{p.n_kv_head}, head_dim {p.head_dim}\n  {INPUTS[case.inputs]}")
    if result.reference_heads < result.heads:
        print(f"  float64 for {result.reference_heads} of {result.heads} kv heads; bits for all")
    for number, line in enumerate(result.runs):
        if number < 2 and line.tensors:  # one head line for the forward, one for the backwards
            print(paint(_columns("", "", [tensor.name for tensor in line.tensors], "bits"), "dim"))
        print(_run_line(line))
        for tensor in line.tensors:
            for fault in _faults(tensor):
                print(paint(f"       {tensor.name}: {fault}", "red"))
    print(flush=True)


def _columns(mark: str, name: str, cells: list[str], bits: str) -> str:
    return f"  {mark or '    '} {name:<15} " + "".join(
        f"{cell:<23}" for cell in (*cells, "", "")[:3]) + bits


def _run_line(run: RunResult) -> str:
    if run.refused:
        return f"  {paint('refused', 'yellow')} {run.name}: {run.refused}"
    mark = paint("ok  ", "green") if run.ok else paint("FAIL", "red")
    return _columns(mark, run.name, [_cell(tensor) for tensor in run.tensors], run.digest[:8])


def _cell(tensor: TensorResult) -> str:
    if tensor.report is None or tensor.yardstick_error is None:
        return "too long for float64"
    report = tensor.report
    return " ".join(map(_short, (report.max_error, tensor.yardstick_error, report.max_bound)))


def _short(value: float) -> str:
    """Two digits: ``1.2e-3``."""
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


def _faults(tensor: TensorResult) -> list[str]:
    faults = []
    if tensor.report is not None and not tensor.report.ok:
        faults.append(str(tensor.report))
    if not tensor.same:
        faults.append("the bits changed from one run to the next")
    if tensor.alone is False:
        faults.append("one sequence and head computed alone has other bits")
    return faults


def _print_summary(results: list[CaseResult], seconds: float) -> None:
    runs = [run for result in results for run in result.runs]
    failed = sum(not run.ok for run in runs)
    refused = sum(bool(run.refused) for run in runs)
    done = len(runs) - refused
    text = (f"all {done} checks hold: errors within bounds, bits always the same" if not failed
            else f"{failed} of {done} checks FAILED; please report this with the output of "
                 f"`python -m dashcupy info`")
    more = f" ({refused} refused, see above)" if refused else ""
    print(paint(text, "red" if failed else "green") + f"{more}; {duration(seconds)}")


def _record(results: list[CaseResult], place: Place, repeats: int, seed: int,
            seconds: float) -> dict:
    return {
        "dashcupy": __version__,
        "ok": all(result.ok for result in results),
        "device": {"kind": place.kind, "title": place.title, "why": place.why},
        "info": info.collect(),
        "repeats": repeats,
        "seed": seed,
        "seconds": seconds,
        "cases": [_case_record(result) for result in results],
    }


def _case_record(result: CaseResult) -> dict:
    record = _finite(asdict(result))
    record["ok"] = result.ok
    for run, run_record in zip(result.runs, record["runs"]):
        run_record["ok"] = run.ok
        for tensor, tensor_record in zip(run.tensors, run_record["tensors"]):
            tensor_record["ok"] = tensor.ok
    return record


def _finite(value):
    """``value`` with NaN and infinities as strings: JSON has no numbers for them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _write_record(file: str, record: dict) -> None:
    text = json.dumps(record, indent=2, allow_nan=False) + "\n"
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text)
    except OSError as error:
        raise InvalidInputError(f"--json {file}: cannot be written ({error.strerror}); give a file "
                                f"in a folder that exists, or - for stdout") from error
