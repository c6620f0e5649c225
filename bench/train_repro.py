"""Train a decoder and show that the run repeats to the bit: ``python -m bench.train_repro``."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from dashcupy import schedules
from dashcupy.errors import DashcupyError, InvalidInputError, UnsupportedError

try:
    from . import harness, plots
    from .repro import data, plot, record, summary
    from .repro.attention import KINDS
    from .repro.compare import compare
    from .repro.model import HEAD_DIMS, MLPS, SIZES
    from .repro.parallel import MODES
    from .repro.run import train
except UnsupportedError as error:  # no PyTorch
    if __name__ != "__main__":
        raise  # for the command line of the package
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(2)

DESCRIPTION = """\
Train a decoder on bytes of text and keep a record: losses, digests of gradients and weights, step
times. --compare says whether two records are equal to the bit, or which step and tensor differ
first. Exit status: 0 done or equal, 1 different, 2 refused. Under torchrun: give --parallel.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(prog="python -m dashcupy bench train_repro",
                                    description=DESCRIPTION,
                                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--size", choices=SIZES, default="base",
        help="; ".join(f"{name}: width {size.width}, {size.n_layer} layers"
                       for name, size in SIZES.items()) + " (default: base, 125 M parameters)")
    add("--head-dim", type=int, choices=HEAD_DIMS, default=128, help="default: 128")
    add("--kv-heads", type=harness.count, metavar="N",
        help="kv heads of a layer (default: as many as q heads)")
    add("--mlp", choices=MLPS, default="swiglu", help="default: swiglu")
    add("--seqlen", type=harness.count, default=2048, help="default: 2048")
    add("--batch", type=harness.count, default=8,
        help="sequences of a step, over all processes (default: 8)")
    add("--steps", type=harness.count, default=300, help="default: 300")
    add("--seed", type=_seed, default=0, help="of weights and batches (default: 0)")
    add("--lr", type=_rate, default=6e-4, help="highest learning rate (default: 6e-4)")
    add("--attention", choices=KINDS, default="dashcupy",
        help="ours, or through PyTorch what it picks, FlashAttention-2, cuDNN (default: dashcupy)")
    add("--schedule", default="auto", metavar="NAME",
        help=f"of our backward: auto, {', '.join(_causal_schedules())}, or unordered, which is not "
             f"deterministic (default: auto)")
    add("--text", type=Path, metavar="PATH",
        help=f"a file, or a folder with {', '.join(data.SUFFIXES)} files (default: the Python "
             f"files of this interpreter's standard library)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto",
        help="default: a GPU if there is one")
    add("--parallel", choices=MODES, default="none", help="under torchrun (default: none)")
    add("--json", type=Path, metavar="FILE", help="where the record goes")
    add("--hash-every", type=_count_or_never, default=50, metavar="N",
        help="digests of all gradients at every Nth step and the last; 0: never (default: 50)")
    add("--checkpoint-every", type=harness.count, metavar="N", help="default: never")
    add("--checkpoint-dir", type=Path, default=Path(), metavar="FOLDER",
        help="gets NAME-stepN.pt, NAME from --json (default: the current folder)")
    add("--resume", type=Path, metavar="FILE", help="go on from a checkpoint")
    add("--compare", type=Path, nargs=2, action="append", metavar=("A", "B"),
        help="compare two records instead of training; may be given again")
    add("--plot", type=Path, metavar="FILE",
        help="with --compare: draw the losses and their differences to FILE.svg or FILE.png")
    add("--summary", type=Path, metavar="FILE",
        help="with --compare: write there what the runs were and where they part, in short")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        Exit status: 0 done or equal, 1 different, 2 refused.
    """
    options = parser().parse_args(arguments)
    try:
        if options.compare:
            return _compare(options)
        _check(options)
        train(options)
    except DashcupyError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(options: argparse.Namespace) -> int:
    found = [compare(a, b) for a, b in options.compare]
    print("\n".join(comparison.report() for comparison in found))
    if options.plot or options.summary:
        made = summary.summarise(found)
    if options.summary:
        record.write_json(options.summary, made)
        print(f"in short in {options.summary}")
    if options.plot:
        plot.draw(found, options.plot, plots.digest([made], None))
        print(f"drawn to {options.plot}")
    return int(not all(comparison.equal for comparison in found))


def _check(options: argparse.Namespace) -> None:
    if options.plot or options.summary:
        raise InvalidInputError("--plot and --summary show what --compare compares; "
                                "give --compare A B")
    if options.attention != "dashcupy" and options.schedule != "auto":
        raise InvalidInputError(f"--schedule {options.schedule} orders dashcupy's backward; leave "
                                f"it out with --attention {options.attention}")
    schedules.resolve(options.schedule, schedules.Shape.from_counts(1, 1, True))


def _causal_schedules() -> list[str]:
    return [name for name in schedules.names() if schedules.supports(name, "causal")]


def _count_or_never(text: str) -> int:
    return 0 if text == "0" else harness.count(text)


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{value} (allowed: a finite number > 0)")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{value} (allowed: 0 to 2^63 - 1)")
    return value


if __name__ == "__main__":
    sys.exit(main())
