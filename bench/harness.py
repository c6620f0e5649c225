"""The run that ``forward.py`` and ``backward.py`` share: options, cells, checks, records, table."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench import cells, peers, records, timing

# Fresh kernels may have to be compiled inside the first cells; a run that hangs ends itself.
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
    schedule, schedule_used
        As asked for, and what ``"auto"`` came to; None for peers and for the forward.
    """

    peer: str
    mode: str
    call: Callable[[], tuple]
    schedule: str | None = None
    schedule_used: str | None = None

    @property
    def label(self) -> str:
        """Name in the printed table."""
        if self.peer != "dashcupy":
            return self.peer
        if self.schedule is None:
            return "ours"
        return f"ours[{self.schedule}]"


def draw(cell: cells.Cell, seed: int = 0) -> tuple:
    """q, k, v and dout: randn, bfloat16, [batch, len, heads, head_dim], on the current GPU."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    size = (cell.batch, cell.seqlen, cell.n_head, cell.head_dim)
    return tuple(torch.randn(size, generator=generator, device="cuda").bfloat16()
                 for _ in range(4))


def run(direction: str, variants_of: Callable[[cells.Cell, argparse.Namespace], list[Variant]],
        tolerance: float, arguments: list[str] | None = None) -> int:
    """Measure the chosen cells, write their records after each, print a table last.

    Parameters
    ----------
    direction
        ``"forward"`` or ``"backward"``.
    variants_of
        What to time in a cell.
    tolerance
        Largest relative Frobenius error between our results and those of the first peer: a wrong
        kernel gets no record.

    Returns
    -------
    int
        Exit status: 1 if anything of ours was wrong, failed or changed its bits.
    """
    options = _parser(direction).parse_args(arguments)
    chosen = cells.choose(options.cells, options.quick)
    if options.json:
        records.read(options.json)  # a file of another kind is refused now, not at the end
    environment = timing.environment()
    digest = _source_digest()
    lines, bad = [], False
    timing.warm_card()
    with timing.watch_clocks() as clocks:
        for cell in chosen:
            faulthandler.dump_traceback_later(CELL_LIMIT_S, exit=True)
            try:
                variants, faults = _usable(variants_of(cell, options), tolerance)
            except Exception as error:  # one cell that cannot run must not stop the others
                timing.log(f"{cell.name}: {type(error).__name__}: {error}")
                variants, faults = [], [f"FAILED: {type(error).__name__}"]
            bad |= bool(faults)
            times = timing.measure({v.label: v.call for v in variants}, options.iters,
                                   options.warmup)
            found = []
            for variant in variants:
                same = timing.same_bits(variant.call)
                if not same and variant.peer == "dashcupy":
                    bad = True
                    faults.append(f"{variant.label}: BITS CHANGE between runs")
                found.append(record(direction, cell, variant, times[variant.label], same)
                             | environment | {"source_digest": digest})
            if options.json:
                records.write(options.json, found)
            lines.append(row(cell, found, faults))
            timing.log(lines[-1])
        faulthandler.cancel_dump_traceback_later()
        summary = clocks()
    print(f"{direction}, {environment['device']}, driver {environment['driver']}, source "
          f"{digest[:12]}; {summary}")
    print("\n".join(lines))
    return int(bad)


def record(direction: str, cell: cells.Cell, variant: Variant, found: timing.Timing,
           same: bool) -> dict:
    """One measurement as it is kept, but for what the whole run has in common."""
    return {
        "direction": direction, "head_dim": cell.head_dim, "causal": cell.causal,
        "dtype": "bfloat16", "batch": cell.batch, "seqlen": cell.seqlen, "kv_len": cell.seqlen,
        "q_heads": cell.n_head, "kv_heads": cell.n_head, "peer": variant.peer,
        "schedule": variant.schedule, "schedule_used": variant.schedule_used,
        "mode": variant.mode, "ms": round(found.ms, 4), "ms_spread": round(found.ms_spread, 4),
        "tflops": round(cell.flops(direction) / found.ms * 1e-9, 1), "same_bits": same,
        "host_us": round(found.host_us, 1),
    }


def row(cell: cells.Cell, found: list[Mapping], faults: list[str]) -> str:
    """A line of the printed table; the ratio is peer ms / our best ms: over 1 we are faster."""
    ours = [r for r in found if r["peer"] == "dashcupy"]
    best = min(ours, key=lambda r: r["ms"], default=None)
    parts = [f"{cell.name:<17}"]
    for r in ours:
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
        ours = variant.peer == "dashcupy"
        try:
            results = variant.call()
        except Exception as error:  # one function that cannot run must not stop the others
            timing.log(f"{variant.label}: {type(error).__name__}: {error}")
            faults += [f"{variant.label} FAILED: {type(error).__name__}"] if ours else []
            continue
        # lse is laid out differently by each, so the forward compares out alone.
        compared = results if len(results) == 3 else results[:1]
        truth = compared if truth is None else truth
        error = max(timing.relative_error(x, y) for x, y in zip(compared, truth, strict=True))
        if error <= tolerance:
            kept.append(variant)
        elif ours:
            faults.append(f"{variant.label} WRONG: relative error {error:.2g}")
        else:
            timing.log(f"{variant.label}: differs from the first by {error:.2g}; left out")
    return sorted(kept, key=lambda v: v.peer != "dashcupy"), faults


def _parser(direction: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{direction}", description=f"Time the {direction} on one GPU.")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(cells.QUICK)}")
    parser.add_argument("--cells", metavar="NAMES",
                        help="names with wildcards, by commas: 'd128-causal-*,d64-full-512'")
    parser.add_argument("--peers", type=_peers, default=",".join(peers.PEERS), metavar="NAMES",
                        help=f"of {', '.join(peers.PEERS)}, or none (default: all)")
    if direction == "backward":
        parser.add_argument("--schedules", default="auto", metavar="NAMES",
                            help="names by commas, auto, or all (default: auto)")
    parser.add_argument("--iters", type=int, default=15, help="timed calls (default 15)")
    parser.add_argument("--warmup", type=int, default=5, help="untimed calls (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE",
                        help=f"merge records into this file, e.g. bench/results/"
                             f"{records.RESULTS.name}")
    return parser


def _peers(text: str) -> list[str]:
    names = [] if text == "none" else [name for name in text.split(",") if name]
    unknown = set(names) - set(peers.PEERS)
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{', '.join(sorted(unknown))} (allowed: none, {', '.join(peers.PEERS)})")
    return names


def _source_digest() -> str:
    from dashcupy.source import source_digest

    return source_digest()


def script(direction: str, variants_of: Callable, tolerance: float) -> None:
    """Entry of a script: refuses with a reason where there is nothing to time."""
    import torch

    if not torch.cuda.is_available() and not {"-h", "--help"} & set(sys.argv):
        sys.exit("no GPU that torch can use: nothing to time")
    sys.exit(run(direction, variants_of, tolerance))
