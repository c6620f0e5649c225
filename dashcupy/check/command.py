"""Arguments, course and exit status of ``python -m dashcupy check``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import sys
import time
from dataclasses import asdict

from .. import schedules
from ..config import GPU_DTYPES
from ..errors import InvalidInputError
from ..problem import DTYPES, Problem, mask_from_causal
from ..terminal import Progress, duration
from . import expect, process, record, text
from .alignment import ALIGNMENTS, find_alignment
from .bits import TESTS
from .cases import Case, default_cases, own_cases
from .device import DEVICES, choose_place
from .estimate import estimate_seconds, require_memory
from .function import CONVENTION, LAYOUTS, load_subject
from .run import REPEATED, CaseResult, Settings, n_steps, run_case
from .subject import Dashcupy, Subject

DESCRIPTION = """\
Run the forward, and the backward with each schedule, on inputs that are hard in different ways.
Every result is compared with float64, and its bits with those of other calls that must give the
same. Exit status: 0 if all hold, 1 if not, 2 for an error."""
_FUNCTIONS = f"""\
A function of somebody else's is
{CONVENTION}.
Arrays are [batch, len, heads, head_dim], causal is a bool, scale a float; is_causal, softmax_scale
and sm_scale are known too. With lengths that differ, --causal alone finds out how the function
aligns its mask. torch:sdpa, torch:math, torch:flash, torch:efficient and torch:cudnn
stand for torch's scaled_dot_product_attention."""
_BITS = "\n".join(f"  {test:<8} {what}" for test, what in TESTS.items())
REPEATS = {"cpu": 3, "gpu": 20}
QUICK_REPEATS = {"cpu": 2, "gpu": 5}
_OWN_SHAPE = ("batch", "len", "kv_len", "heads", "kv_heads", "head_dim", "dtype", "causal", "scale")
_DEFAULTS = {"batch": 1, "len": 512, "heads": 2, "head_dim": 64, "dtype": GPU_DTYPES[1],
             "causal": False, "scale": None}
# For functions of others, about which nothing is known: a tail, two sequences.
_DEFAULTS_OF_FUNCTIONS = _DEFAULTS | {"batch": 2, "len": 300}
# Of what a second process computes.
_PASSED_ON = (*_OWN_SHAPE, "device", "schedule", "seed", "function", "layout")
_PASSED_ON_FLAGS = ("quick", "forward_only")
_LONG_SECONDS = 120.0
_MAX_SEED = 2**64 - 1


def add_parser(commands) -> None:
    """Add the command ``check`` to the subparsers of a command line."""
    parser = commands.add_parser(
        "check", help="are the results right, and their bits always the same, on this machine",
        formatter_class=argparse.RawDescriptionHelpFormatter, description=DESCRIPTION,
        epilog=f"comparisons of bits:\n{_BITS}\n\n{_FUNCTIONS}")
    add = parser.add_argument
    add("--device", choices=DEVICES, default="auto", help="default: the GPU if there is one")
    add("--schedule", metavar="NAME",
        help=f"only this one of {', '.join(schedules.names())} and auto (default: all)")
    add("--quick", action="store_true", help="fewer cases, fewer repeats")
    add("--repeats", type=int, metavar="N",
        help=f"times that each result is computed (default: {REPEATS['cpu']} on the CPU, "
             f"{REPEATS['gpu']} on a GPU)")
    add("--stress", action="store_true",
        help="repeat it also beside other work that keeps the device busy")
    add("--bits", metavar="NAMES", help="only these comparisons of bits, see below; none for none "
        "(default: all but load)")
    add("--seed", type=int, default=0, metavar="N", help="of the inputs (default: 0)")
    add("--json", metavar="FILE", help="write a record for machines; - for stdout, with no table")
    add("--expect", metavar="FILE",
        help="also compare the bits with the record of another machine, made with --json")
    add("--digests-only", action="store_true", help=argparse.SUPPRESS)  # for a second process
    own = parser.add_argument_group(
        "own shape", "any of these replaces the cases by one problem of your own").add_argument
    own("--batch", type=int, metavar="N", help="sequences (default: 1)")
    own("--len", type=int, metavar="N", help="rows of q (default: 512)")
    own("--kv-len", type=int, metavar="N", help="rows of k and v (default: those of q)")
    own("--heads", type=int, metavar="N", help="q heads (default: 2)")
    own("--kv-heads", type=int, metavar="N", help="heads of k and v (default: those of q)")
    own("--head-dim", type=int, metavar="N", help="columns of a head (default: 64)")
    own("--dtype", choices=DTYPES, help="default: bfloat16")
    own("--causal", nargs="?", const=True, choices=ALIGNMENTS,
        help="causal mask, aligned bottom_right (default; of --function, as it does) or top_left; "
             "without it, full")
    own("--scale", type=float, metavar="X", help="factor on q k^T (default: 1/sqrt(head_dim))")
    other = parser.add_argument_group("somebody else's attention").add_argument
    other("--function", metavar="MODULE:NAME", help="check this instead of dashcupy, see below")
    other("--layout", choices=LAYOUTS,
          help="axes of its arrays: b batch, s length, h heads, d head_dim (default: bshd)")
    other("--forward-only", action="store_true", help="it has no gradients")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    start = time.perf_counter()
    expected = record.read_record(args.expect) if args.expect is not None else None
    if args.json is not None:
        record.require_writable(args.json)
    show = args.json != "-" and not args.digests_only
    # With the record on stdout, whatever a function of the user's prints goes elsewhere.
    with contextlib.redirect_stdout(sys.stderr) if args.json == "-" else contextlib.nullcontext():
        subject = (load_subject(args.function, args.device, args.layout or LAYOUTS[0],
                                args.forward_only)
                   if args.function is not None else Dashcupy(choose_place(args.device)))
        work, settings = _work(args, subject), _settings(args, subject)
        if not args.digests_only and _given(args):
            _tell_size(subject, work, settings)
        try:
            if args.causal is True:
                args = _aligned(args, subject, work[0][0].problem)
                work = _work(args, subject)
            results = _run_all(args, subject, work, settings, show)
        except MemoryError as error:
            raise InvalidInputError(
                f"not enough memory ({error}): give a smaller --batch, --len, --kv-len or --heads, "
                f"or one --schedule") from error
    seconds = time.perf_counter() - start
    made = record.make_record(subject, results, settings, seconds)
    comparison = expect.compare_records(made, expected, args.expect) if expected else None
    if comparison:
        made["expect"] = asdict(comparison) | {"ok": comparison.ok}
    if show:
        text.print_summary(subject, results, settings, seconds)
        if comparison:
            text.print_comparison(comparison)
    if args.json is not None:
        record.write_record(args.json, made)
    return 0 if made["ok"] and (comparison is None or comparison.ok) else 1


def _run_all(args: argparse.Namespace, subject: Subject, work: list[tuple[Case, list[str]]],
             settings: Settings, show: bool) -> list[CaseResult]:
    if show:
        text.print_head(subject, settings)
    results = []
    steps = [n_steps(names, settings) for _, names in work]
    with Progress(sum(steps), work=sum(n * case.n_score for n, (case, _) in zip(steps, work))
                  ) as progress:
        second = None
        for case, names in work:
            progress.start(case.title)
            result = run_case(subject, case, names, settings, functools.partial(
                progress.step, case.n_score))
            if process.TEST in settings.tests:
                if second is None:  # not before: what is wrong here is better told by this process
                    progress.start("second process")
                    second = process.run_process(_arguments(args))
                result = process.with_process(result, second)
            results.append(result)
            progress.clear()
            if show:
                text.print_case(result)
    return results


def _work(args: argparse.Namespace, subject: Subject) -> list[tuple[Case, list[str]]]:
    """Cases, each with the names of its backwards."""
    cases = _cases(args, subject)
    work = [(case, subject.backwards(case.problem, args.schedule)) for case in cases]
    work = [(case, names) for case, names in work if names or args.forward_only]
    if not work:
        raise InvalidInputError(
            f"schedule={args.schedule!r} is defined for none of the masks to check (allowed here: "
            f"{', '.join(subject.backwards(cases[0].problem, None))})")
    for case, names in work:
        require_memory(case, len(names))
    return work


def _cases(args: argparse.Namespace, subject: Subject) -> list[Case]:
    given = _given(args)
    if args.function is None and (args.forward_only or args.layout):
        raise InvalidInputError("--forward-only and --layout go with --function")
    if not given and args.function is None:
        return default_cases(subject.place.target, args.quick)
    sizes = (_DEFAULTS_OF_FUNCTIONS if args.function is not None else _DEFAULTS) | given
    sizes = {"kv_len": sizes["len"], "kv_heads": sizes["heads"]} | sizes
    for name, value in given.items():
        if type(value) is int and value < 1:
            raise InvalidInputError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    scale = sizes["scale"]
    if scale is not None and not subject.takes_scale:
        raise InvalidInputError(f"--scale {scale}: {args.function} has no argument for it")
    return own_cases(Problem(
        sizes["batch"], sizes["len"], sizes["kv_len"], sizes["heads"], sizes["kv_heads"],
        sizes["head_dim"], sizes["dtype"], mask_from_causal(sizes["causal"]),
        1 / math.sqrt(sizes["head_dim"]) if scale is None else scale),
        other_scale=scale is None and subject.takes_scale)


def _aligned(args: argparse.Namespace, subject: Subject, problem: Problem) -> argparse.Namespace:
    """``args`` with the alignment of a causal mask that was asked for without one."""
    found = ALIGNMENTS[0]
    if args.function is not None and problem.q_len != problem.kv_len:
        found, why = find_alignment(subject, problem)
        print(f"note: {why}; checked as --causal {found}", file=sys.stderr, flush=True)
    return argparse.Namespace(**vars(args) | {"causal": found})


def _given(args: argparse.Namespace) -> dict[str, object]:
    """What is said about an own shape."""
    return {name: getattr(args, name) for name in _OWN_SHAPE if getattr(args, name) is not None}


def _settings(args: argparse.Namespace, subject: Subject) -> Settings:
    kind = subject.place.kind
    repeats = args.repeats
    if repeats is None:
        repeats = (QUICK_REPEATS if args.quick else REPEATS)[kind]
    if repeats < 1:
        raise InvalidInputError(f"--repeats {repeats}: must be at least 1")
    if not 0 <= args.seed <= _MAX_SEED:
        raise InvalidInputError(f"--seed {args.seed}: must be from 0 to 2**64 - 1")
    tests = () if args.digests_only else _tests(args, kind)
    if repeats == 1:
        if args.stress:
            raise InvalidInputError("--stress compares calls: give --repeats 2 or more")
        tests = tuple(test for test in tests if test not in REPEATED)
    required = args.schedule is not None or args.function is not None
    return Settings(repeats, tests, args.seed, not args.digests_only, required)


def _tests(args: argparse.Namespace, kind: str) -> tuple[str, ...]:
    """Comparisons of bits to make, in the order of ``TESTS``."""
    if args.bits is None:
        wanted = {test for test in TESTS if test != "load" and (test != "graph" or kind == "gpu")}
    else:
        wanted = {name.strip() for name in args.bits.split(",")}
        wanted = set() if wanted == {"none"} else wanted
        unknown = wanted - set(TESTS)
        if unknown:
            raise InvalidInputError(
                f"--bits {args.bits!r}: {', '.join(map(repr, sorted(unknown)))} is not known "
                f"(allowed: none alone, or some of {', '.join(TESTS)}, with commas between)")
    if args.stress:
        wanted.add("load")
    return tuple(test for test in TESTS if test in wanted)


def _tell_size(subject: Subject, work: list[tuple[Case, list[str]]], settings: Settings) -> None:
    """Warn of a check on the CPU that takes long."""
    if subject.place.kind != "cpu":
        return
    seconds = estimate_seconds(subject, work, settings)
    if seconds > _LONG_SECONDS:
        print(f"warning: this will take about {duration(seconds)} on the CPU (Ctrl-C ends it); a "
              f"shorter --len, fewer --repeats or one --schedule take less", file=sys.stderr,
              flush=True)


def _arguments(args: argparse.Namespace) -> list[str]:
    """What a second process needs to compute the same."""
    arguments = [f"--{name.replace('_', '-')}" for name in _PASSED_ON_FLAGS if getattr(args, name)]
    for name in _PASSED_ON:
        value = getattr(args, name)
        if value is not None:
            arguments.append(f"--{name.replace('_', '-')}={value}")
    return arguments
