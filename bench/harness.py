"""The run that all GPU scripts share: options, cells, checks, records, printed table."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dashcupy.errors import DashcupyError, DeviceError, InvalidInputError
from dashcupy.plan import Plan
from dashcupy.source import source_digest

from . import cells, ours, peers, records, timing

# A run that hangs ends itself.
CELL_LIMIT_S = 120


@dataclass(frozen=True)
class Variant:
    """One function to time.

    Parameters
    ----------
    peer
        ``"dashcupy"`` or one of `peers.PEERS`.
    mode
        ``"deterministic"`` or ``"default"``: what the function promises about bits.
    call
        Enqueues the work, returns its results (torch tensors).
    schedule
        As asked for; None for peers and for the forward.
    plan
        What ours will do; None for peers.
    """

    peer: str
    mode: str
    call: Callable[[], tuple]
    schedule: str | None = None
    plan: Plan | None = None

    @property
    def label(self) -> str:
        """Name in the printed table."""
        if self.peer != "dashcupy":
            return self.peer
        return f"ours[{self.schedule}]" if self.schedule else "ours"


@dataclass(frozen=True)
class Direction:
    """What a script times.

    Parameters
    ----------
    name
        ``"forward"`` or ``"backward"``.
    schedules_of
        What is asked of ours in a cell, by cell and options.
    variants_of
        What to time, by cell, options and our plans (by what was asked).
    tolerance
        Largest relative Frobenius error between our results and those of the first peer: a wrong
        kernel gets no record.
    """

    name: str
    schedules_of: Callable[[cells.Cell, argparse.Namespace], Sequence[str | None]]
    variants_of: Callable[[cells.Cell, argparse.Namespace, Mapping[str | None, Plan]],
                          list[Variant]]
    tolerance: float


def draw(cell: cells.Cell, seed: int = 0) -> tuple:
    """q, k, v and dout: randn, bfloat16, [batch, len, heads, head_dim], on the current GPU."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    return tuple(
        torch.randn((cell.batch, cell.seqlen, n_head, cell.head_dim), generator=generator,
                    device="cuda").bfloat16()
        for n_head in (cell.n_q_head, cell.n_kv_head, cell.n_kv_head, cell.n_q_head))


def peer_variants(cell: cells.Cell, names: Sequence[str],
                  make: Callable[[str], Callable[[], tuple]]) -> list[Variant]:
    """Variants of the peers that ``make`` can make; the others are left out with a line."""
    found = []
    for peer in names:
        try:
            found.append(Variant(peer, peers.mode_of(peer), make(peer)))
        except Exception as error:  # a peer that cannot run here must not stop the others
            timing.log(f"{cell.name}: skipped {peer}: {_line_of(error)}")
    return found


def run(direction: Direction, options: argparse.Namespace) -> tuple[list[dict], bool]:
    """Measure the chosen cells, write their records after each, print a table last.

    Returns
    -------
    tuple
        Records, those that ``--reuse`` found included; and whether anything of ours was wrong,
        failed or changed its bits.

    Raises
    ------
    DeviceError
        There is no GPU that PyTorch can use.
    InvalidInputError
        Names of cells, schedules or peers that do not exist, a results file of another kind, or one
        for ``--sustained``.
    """
    if options.sustained and options.json:
        raise InvalidInputError("--sustained and --json: a results file holds times of single "
                                "calls; leave out one of the two")
    device = _require_gpu()
    chosen = cells.choose(options.cells, options.quick)
    environment = timing.environment() | {"source_digest": source_digest()}
    known = records.read(options.json) if options.json else []
    names = _usable_peers(direction.name, options)
    options = argparse.Namespace(**vars(options) | {"peers": names})
    capability = _capability()
    plans = {cell: ours.plan_or_skip(cell, direction.name, capability,
                                     direction.schedules_of(cell, options)) for cell in chosen}
    kept = [r for r in known if options.reuse and _is_of(r, environment)
            and r["direction"] == direction.name]
    todo = [cell for cell in chosen if not _has_all(kept, direction.name, cell, plans[cell])]
    forwards = [plan for cell in todo for plan in
                ours.plan_or_skip(cell, "forward", capability, [None]).values()]
    ours.compile_ahead([*forwards, *(p for cell in todo for p in plans[cell].values())],
                       capability)
    lines, measured, bad = [], [], False
    timing.warm_card()
    with timing.watch_clocks() as clocks:
        for cell in todo:
            faulthandler.dump_traceback_later(CELL_LIMIT_S * (1 + options.sustained), exit=True)
            found, faults = _measure_cell(direction, cell, options, plans[cell], device)
            found = [record | environment for record in found]
            bad |= bool(faults)
            measured += found
            if options.json:
                records.write(options.json, found)
            lines.append(row(cell, found, faults))
            timing.log(lines[-1])
        faulthandler.cancel_dump_traceback_later()
        summary = clocks()
    print(f"{direction.name}, {environment['device']}, driver {environment['driver']}, source "
          f"{environment['source_digest'][:12]}; {summary}")
    print("\n".join(lines))
    return records.merge(kept, measured), bad


def _measure_cell(direction: Direction, cell: cells.Cell, options: argparse.Namespace,
                  plans: Mapping[str | None, Plan], device: int) -> tuple[list[dict], list[str]]:
    """Records of one cell, and what is wrong with ours."""
    try:
        variants, faults = _usable(direction.variants_of(cell, options, plans),
                                   direction.tolerance)
        calls = {v.label: v.call for v in variants}
        times = (timing.sustained(calls, options.sustained) if options.sustained else
                 timing.measure(calls, options.iters, options.warmup))
        found = []
        for variant in variants:
            same = timing.same_bits(variant.call)
            if not same and variant.peer == "dashcupy" and variant.mode == "deterministic":
                faults.append(f"{variant.label}: BITS CHANGE between runs")
            kernel = ours.kernel_of(variant.plan, device) if variant.plan else None
            found.append(record(direction.name, cell, variant, times[variant.label], same, kernel))
        return found, faults
    except Exception as error:  # one cell that cannot run must not stop the others
        timing.log(f"{cell.name}: {_line_of(error)}")
        return [], [f"FAILED: {type(error).__name__}"]


def record(direction: str, cell: cells.Cell, variant: Variant, found: timing.Timing, same: bool,
           kernel: dict | None) -> dict:
    """One measurement as it is kept, but for what the whole run has in common."""
    return {
        **_cell_fields(direction, cell), "peer": variant.peer,
        "schedule": variant.schedule,
        "schedule_used": variant.plan.schedule if variant.plan else None,
        "mode": variant.mode, "ms": round(found.ms, 4), "ms_spread": round(found.ms_spread, 4),
        "tflops": round(cell.flops(direction) / found.ms * 1e-9, 1), "same_bits": same,
        "host_us": round(found.host_us, 1), "kernel": kernel,
    }


def _cell_fields(direction: str, cell: cells.Cell) -> dict:
    return {"direction": direction, "head_dim": cell.head_dim, "causal": cell.causal,
            "dtype": "bfloat16", "batch": cell.batch, "seqlen": cell.seqlen,
            "kv_len": cell.seqlen, "q_heads": cell.n_q_head, "kv_heads": cell.n_kv_head}


def _is_of(record: Mapping, environment: Mapping) -> bool:
    """Whether a record is of this very code on this kind of card."""
    return all(record[name] == environment[name] for name in ("device", "source_digest"))


def _has_all(kept: Sequence[Mapping], direction: str, cell: cells.Cell,
             plans: Mapping[str | None, Plan]) -> bool:
    """Whether these records hold all of ours in a cell."""
    fields = _cell_fields(direction, cell).items()
    known = {r["schedule"] for r in kept if r["peer"] == "dashcupy" and fields <= r.items()}
    return bool(known) and set(plans) <= known


def row(cell: cells.Cell, found: Sequence[Mapping], faults: Sequence[str]) -> str:
    """A line of the printed table; the ratio is peer ms / our best ms: over 1 we are faster."""
    mine = [r for r in found if r["peer"] == "dashcupy"]
    best = min((r for r in mine if r["mode"] == "deterministic"), key=lambda r: r["ms"],
               default=None)
    parts = [f"{cell.name:<17}"]
    for r in mine:
        name = r["schedule_used"] or "ours"
        name = f"auto={name}" if r["schedule"] == "auto" else name
        parts.append(f"{name} {r['ms']:.3f} ms {r['tflops']:.0f} TF/s")
    for r in found:
        if r["peer"] != "dashcupy":
            ratio = f" x{r['ms'] / best['ms']:.2f}" if best else ""
            parts.append(f"{r['peer']} {r['ms']:.3f}{ratio}")
    return " | ".join(parts + [f"!! {fault}" for fault in faults])


def _usable(variants: list[Variant], tolerance: float) -> tuple[list[Variant], list[str]]:
    """Variants that run and agree; what is wrong with the others of ours."""
    kept, faults, truth = [], [], None
    # Peers first: their results are what ours is compared with.
    for variant in sorted(variants, key=lambda v: v.peer == "dashcupy"):
        is_ours = variant.peer == "dashcupy"
        try:
            results = variant.call()
        except Exception as error:  # one function that cannot run must not stop the others
            timing.log(f"skipped {variant.label}: {_line_of(error)}")
            faults += [f"{variant.label} FAILED: {type(error).__name__}"] if is_ours else []
            continue
        # lse is laid out differently by each, so the forward compares out alone.
        compared = results if len(results) == 3 else results[:1]
        truth = compared if truth is None else truth
        error = max(timing.relative_error(x, y) for x, y in zip(compared, truth, strict=True))
        if error <= tolerance:
            kept.append(variant)
        elif is_ours:
            faults.append(f"{variant.label} WRONG: relative error {error:.2g}")
        else:
            timing.log(f"{variant.label}: differs from the first by {error:.2g}; left out")
    return sorted(kept, key=lambda v: v.peer != "dashcupy"), faults


def parser(script: str, text: str, schedules: str | None = None) -> argparse.ArgumentParser:
    """Options that all scripts have.

    Parameters
    ----------
    script
        Its name.
    text
        What it does.
    schedules
        Default of ``--schedules``; None: no such option.
    """
    found = argparse.ArgumentParser(prog=f"python -m dashcupy bench {script}", description=text)
    add = found.add_argument
    add("--quick", action="store_true", help=f"only {', '.join(cells.QUICK)}")
    add("--cells", metavar="NAMES",
        help="names with wildcards, by commas: 'd128-causal-*,gqa4-d64-full-512' (default: the 24 "
             "of head_dim 64 and 128)")
    add("--peers", type=_peers, default="usual", metavar="NAMES",
        help=f"of {', '.join(peers.PEERS)}; or none, all, usual: {', '.join(peers.USUAL)} "
             f"(default: usual)")
    add("--triton", type=Path, metavar="FILE", help="Triton's tutorial 06-fused-attention.py")
    if schedules is not None:
        add("--schedules", default=schedules, metavar="NAMES",
            help=f"names by commas, auto, or all (default: {schedules})")
    add("--iters", type=count, default=15, help="timed calls (default 15)")
    add("--warmup", type=int, default=5, help="untimed calls (default 5)")
    add("--sustained", type=seconds, default=0.0, metavar="SECONDS",
        help="run each function so long without a pause, half of it untimed, and take the mean "
             "instead: a card at its power limit, as in training; not with --json")
    add("--json", type=Path, metavar="FILE",
        help=f"merge records into this file, e.g. bench/results/{records.RESULTS.name}")
    add("--reuse", action="store_true",
        help="leave out cells of which FILE holds all of ours, of the same code and card")
    return found


def count(text: str) -> int:
    """Type of an option that says how many: 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} (allowed: whole numbers from 1 on)")
    return int(text)


def seconds(text: str) -> float:
    """Type of an option that says how long: more than 0."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < CELL_LIMIT_S:
        raise argparse.ArgumentTypeError(f"{text} (allowed: more than 0, less than "
                                         f"{CELL_LIMIT_S})")
    return found


def script(main: Callable[[], int]) -> None:
    """End the process as the script says; an error is one line."""
    try:
        sys.exit(main())
    except DashcupyError as error:
        sys.exit(f"error: {error}")


def _peers(text: str) -> list[str]:
    try:
        return peers.choose(text)
    except InvalidInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _usable_peers(direction: str, options: argparse.Namespace) -> list[str]:
    usable = []
    for peer in options.peers:
        reason = peers.why_not(peer, direction, options.triton)
        if reason:
            timing.log(f"skipped {peer}: {reason}")
        else:
            usable.append(peer)
    return usable


def _require_gpu() -> int:
    """Number of the GPU that PyTorch uses."""
    try:
        import torch
    except ImportError as error:
        raise DeviceError(f"nothing to time without PyTorch, which makes the arrays and the "
                          f"clock: {error}") from error
    if not torch.cuda.is_available():
        raise DeviceError("no GPU that PyTorch can use: nothing to time")
    return torch.cuda.current_device()


def _capability() -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability()


def _line_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
