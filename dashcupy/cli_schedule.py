"""``python -m dashcupy schedule``: show a schedule, simulate it, compare all of them."""

from __future__ import annotations

import argparse
from dataclasses import replace

from . import draw, schedules
from .errors import InvalidInputError
from .problem import MASKS
from .schedules import Shape
from .simulate import ASSIGNMENTS, WRITERS, Costs, Simulation, simulate

# Steps that are simulated in half a minute, and SMs: each is a Python object.
MAX_STEPS = 4_000_000

DESCRIPTION = """\
Show the order of a tile schedule, and how long it takes in a model of the GPU. Times are in
units of --compute, the time of one step. NAME may be 'all': every schedule of the mask.
"""


def add_parser(subparsers) -> argparse.ArgumentParser:
    """Add the command ``schedule`` to the subparsers of a command line."""
    parser = subparsers.add_parser(
        "schedule", help="show and simulate the order of the backward", description=DESCRIPTION)
    add = parser.add_argument
    add("name", metavar="NAME", help=f"{', '.join(schedules.names())}, auto or all")
    add("--kv", type=int, default=8, help="kv tiles (default: 8)")
    add("--q", type=int, help="q tiles (default: kv tiles x stride)")
    add("--stride", type=int, default=1, help="q tiles to the height of a kv tile (default: 1)")
    add("--heads", type=int, default=1, help="kv heads of the whole batch (default: 1)")
    add("--head-group", type=int,
        help="kv heads that take turns as works are handed out, but for late chunks, where more "
             "may, and teams, which have their head alone (default: all)")
    add("--q-per-kv", type=int, default=1, help="q heads to a kv head (default: 1)")
    add("--mask", choices=MASKS, default="full", help="default: full")
    add("--sms", type=int,
        help="CTAs that run at the same time (default: works of a head; for 'all', kv tiles)")
    add("--compute", type=float, default=1.0, help="compute time of a step (default: 1)")
    add("--reduce", type=float, default=0.25, help="time of an add into dq (default: 0.25)")
    add("--latency", type=float, default=0.0, help="hand-off to the next in line (default: 0)")
    add("--slots", type=int, default=0,
        help="buffers of a CTA for parts of dq; 0: compute waits for the add (default: 0)")
    add("--writer", choices=WRITERS, default="serial",
        help="whether a CTA's next add waits for the hand-off of the last (default: serial)")
    add("--assignment", choices=ASSIGNMENTS, default="counter",
        help="how CTAs get their works (default: counter)")
    add("--plot", metavar="FILE", help="draw the run to FILE.svg or FILE.png")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status, 1 if a schedule hangs."""
    _require_sizes(args)
    shape, costs = _shape(args), _costs(args)
    _require_feasible(args, shape)
    if args.plot is not None:
        draw.check_path(args.plot)
    if args.name == "all":
        chosen = [name for name in schedules.names() if schedules.supports(name, args.mask)]
    else:
        chosen = [schedules.resolve(args.name, shape).NAME]
    n_sm, assumed = _sms(args, shape, chosen)

    results = {name: simulate(name, shape, args.heads, n_sm, costs, assignment=args.assignment,
                              q_per_kv=args.q_per_kv, head_group=args.head_group)
               for name in chosen}
    if len(chosen) == 1:
        print(draw.step_table(schedules.get(chosen[0]), shape), end="\n\n")
    print(_heads(args) + " on " + _plural(n_sm, "SM") + assumed)
    print(summary(results))
    if len(chosen) == 1 and not results[chosen[0]].deadlock:
        print("\n" + per_worker(results[chosen[0]]))
    if args.plot is not None:
        draw.gantt(results, costs, args.plot, title=_title(args, shape, n_sm))
        print(f"\ndrawn to {args.plot}")
    return 1 if any(result.deadlock for result in results.values()) else 0


def _require_sizes(args: argparse.Namespace) -> None:
    """Refuse by the names of the options; what computes has other names for them."""
    for option in ("kv", "q", "stride", "heads", "q-per-kv", "sms"):
        value = getattr(args, option.replace("-", "_"))
        if value is not None and value < 1:
            raise InvalidInputError(f"--{option} {value}: must be at least 1")
    if args.head_group is not None and not 1 <= args.head_group <= args.heads:
        raise InvalidInputError(f"--head-group {args.head_group}: must be 1 to {args.heads}, the "
                                f"heads that there are (--heads)")


def _costs(args: argparse.Namespace) -> Costs:
    try:
        return Costs(args.compute, args.reduce, args.latency, args.slots, args.writer)
    except InvalidInputError as error:  # it begins with the name, which is that of the option
        raise InvalidInputError(f"--{error}") from error


def _shape(args: argparse.Namespace) -> Shape:
    n_q = args.kv * args.stride if args.q is None else args.q
    shape = Shape.from_counts(n_q, args.kv, args.mask != "full", args.stride)
    return replace(shape, offset=0) if args.mask == "causal_top_left" else shape


def _sms(args: argparse.Namespace, shape: Shape, chosen: list[str]) -> tuple[int, str]:
    """How many SMs, and what is assumed if it is not said."""
    if args.sms is not None:
        return args.sms, ""
    # All on as many, to compare them: symmetric_shift has half as many works as kv tiles.
    of, n_sm = ("kv tile", shape.n_kv) if args.name == "all" else (
        "work", schedules.get(chosen[0]).num_work(shape))
    return n_sm, f" (as --sms is not given: one for each {of} of a head)"


def _require_feasible(args: argparse.Namespace, shape: Shape) -> None:
    n_step = shape.n_q * shape.n_kv * args.heads * args.q_per_kv
    if n_step > MAX_STEPS:
        raise InvalidInputError(
            f"{shape.n_q} q tiles x {shape.n_kv} kv tiles x {_plural(args.heads, 'head')} x "
            f"{args.q_per_kv} q heads each = {n_step} steps: at most {MAX_STEPS} are simulated; "
            f"give fewer (--kv, --q, --heads, --q-per-kv)")
    if args.sms is not None and args.sms > MAX_STEPS:
        raise InvalidInputError(f"--sms {args.sms}: at most {MAX_STEPS}")


def summary(results: dict[str, Simulation]) -> str:
    """Table with one line for each simulation; shares are of all workers' time."""
    lines = [f"{'schedule':<16} {'makespan':>9} {'bound':>9} {'bound/makespan':>14} "
             f"{'stall':>7} {'idle':>7}"]
    for name, result in results.items():
        if result.deadlock:
            lines.append(f"{name:<16} hangs: {result.deadlock}")
            continue
        whole = result.makespan * len(result.busy) or 1.0
        lines.append(f"{name:<16} {result.makespan:>9.2f} {result.work_bound:>9.2f} "
                     f"{result.efficiency:>14.3f} {sum(result.stall) / whole:>7.1%} "
                     f"{sum(result.idle) / whole:>7.1%}")
    return "\n".join(lines)


def per_worker(result: Simulation, max_workers: int = 16) -> str:
    """Table of the time that each worker was busy, stalled and idle."""
    lines = [f"{'SM':>4} {'busy':>9} {'stall':>9} {'idle':>9}"]
    rows = list(zip(result.busy, result.stall, result.idle, strict=True))
    lines += [f"{index:>4} {busy:>9.2f} {stall:>9.2f} {idle:>9.2f}"
              for index, (busy, stall, idle) in enumerate(rows[:max_workers])]
    if len(rows) > max_workers:
        lines.append(f" ... ({max_workers} of {len(rows)} SMs)")
    return "\n".join(lines)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _heads(args: argparse.Namespace) -> str:
    group = "" if args.head_group is None else f", {args.head_group} at a time,"
    return _plural(args.heads, "head") + group


def _title(args: argparse.Namespace, shape: Shape, n_sm: int) -> str:
    return (f"{args.mask} mask, {shape.n_q} q tiles x {shape.n_kv} kv tiles, "
            f"{_heads(args)} on {_plural(n_sm, 'SM')}")
