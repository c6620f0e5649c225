"""The experiment of the DASH paper, its figures beside ours: ``python -m bench.paper --help``.

Its 24 configurations with its three orders: the baseline (``ascending``), ``descending``, and
``shift`` or, with the causal mask, ``symmetric_shift``. What is said about them is worked out from
the records, and so are the verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from . import backward, cells, harness, model, paper_figures, records, report, tables

SCHEDULES = ("ascending", "descending", "shift", "symmetric_shift")
EQUAL = 0.01  # geometric means this close are called equal
# Of the paper's model: an add takes this part of the compute of a step, a hand-off no time.
DAG_REDUCE = 0.25
_KV_TILE = 128  # rows; the paper's SM has one kv tile of each head


@dataclass(frozen=True)
class Row:
    """TFLOP/s, or speed relative to the baseline, of one configuration by schedule.

    Parameters
    ----------
    cell
    theirs, ours
        TFLOP/s; ours is empty where nothing was measured.
    dag
        Speed over the baseline in the paper's model.
    simulated
        TFLOP/s by the simulator of this GPU; empty without a model.
    """

    cell: cells.Cell
    theirs: Mapping[str, float]
    ours: Mapping[str, float]
    dag: Mapping[str, float]
    simulated: Mapping[str, float]


def rows(found: Sequence[Mapping], made: Mapping | None) -> list[Row]:
    """All 24 configurations, from records and, if there is one, a model (`model.predict`)."""
    measured = {key: r["ms"] for key, r in records.by_schedule(found).items()}
    predicted = {key: p["predicted_ms"] for key, p in model.by_schedule(made).items()} if made \
        else {}
    return [Row(cell, paper_figures.tflops(cell.head_dim, cell.causal, cell.seqlen),
                _tflops(cell, measured), dag_speed(cell), _tflops(cell, predicted))
            for cell in cells.ALL]


def _tflops(cell: cells.Cell, times: Mapping[tuple[tuple, str], float]) -> dict[str, float]:
    flops = cell.flops("backward")
    return {schedule: flops / times[cell.key, schedule] * 1e-9
            for schedule in SCHEDULES if (cell.key, schedule) in times}


def dag_speed(cell: cells.Cell, n_head: int | None = None) -> dict[str, float]:
    """Speed over the baseline in the paper's model, by its closed forms for an even count of heads.

    As many SMs as a head has kv tiles, heads one after another; a step takes compute + add, the
    hand-off no time. The causal baseline gives kv tile i of every head to SM i.
    """
    m = n_head or cell.batch * cell.n_q_head
    n, step = cell.seqlen // _KV_TILE, 1 + DAG_REDUCE
    skew = (n - 1) * DAG_REDUCE
    base = m * n * step + skew
    if not cell.causal:
        return {"ascending": 1.0, "descending": 1.0, "shift": base / (m * n * step)}
    bound = m * (n + 1) * step / 2
    return {"ascending": 1.0, "descending": base / (bound + skew), "symmetric_shift": base / bound}


@dataclass(frozen=True)
class Claim:
    """Some schedules are faster than some others, in some of the 24 configurations.

    Parameters
    ----------
    text
    faster, slower
        Schedules; where a configuration has several of them, the fastest counts.
    holds_in
        Configurations that it is about.
    """

    text: str
    faster: Sequence[str]
    slower: Sequence[str]
    holds_in: Callable[[cells.Cell], bool]

    def ratios(self, speeds: Iterable[tuple[cells.Cell, Mapping[str, float]]]) -> list[float]:
        """Speed of the faster over the slower, where both are known."""
        found = []
        for cell, speed in speeds:
            pairs = [[speed[name] for name in names if name in speed]
                     for names in (self.faster, self.slower)]
            if self.holds_in(cell) and all(pairs):
                found.append(max(pairs[0]) / max(pairs[1]))
        return found


_SHIFTS = ("shift", "symmetric_shift")
CLAIMS = (
    Claim("full mask: shift is faster than the baseline", ("shift",), ("ascending",),
          lambda cell: not cell.causal),
    Claim("full mask, 16,384: shift is slower than the baseline", ("ascending",), ("shift",),
          lambda cell: not cell.causal and cell.seqlen == 16384),
    Claim("causal mask: descending is faster than the baseline", ("descending",), ("ascending",),
          lambda cell: cell.causal),
    Claim("causal mask: symmetric shift is faster than the baseline", ("symmetric_shift",),
          ("ascending",), lambda cell: cell.causal),
    Claim("causal mask, head_dim 128: descending is faster than symmetric shift",
          ("descending",), ("symmetric_shift",), lambda cell: cell.causal and cell.head_dim == 128),
    Claim("the best order is faster than the baseline", (*_SHIFTS, "descending", "ascending"),
          ("ascending",), lambda cell: True),
)


def verdict(theirs: Sequence[float], mine: Sequence[float]) -> str:
    """Whether two sets of ratios say the same."""
    if not mine:
        return "not measured"
    said, seen = (_side(tables.geometric_mean(ratios)) for ratios in (theirs, mine))
    if said == seen:
        return "holds"
    return {0: "no difference here", 1: "faster here", -1: "slower here"}[seen]


def _side(ratio: float) -> int:
    return (ratio > 1 + EQUAL) - (ratio < 1 - EQUAL)


def claims_text(found: Sequence[Row]) -> str:
    """What the paper reports, what its model says, and what holds here: ratios of speeds."""
    lines = tables.table(["reported", "the authors, H800", "paper's model",
                          "simulator of this GPU", "measured here", "verdict"])
    for claim in CLAIMS:
        # Where some cells are measured, the others say nothing that could be compared.
        compared = [row for row in found if claim.ratios([(row.cell, row.ours)])] or found
        kinds = [claim.ratios((row.cell, getattr(row, name)) for row in compared)
                 for name in ("theirs", "dag", "simulated", "ours")]
        lines.append("| " + " | ".join([claim.text, *map(_range, kinds),
                                        verdict(kinds[0], kinds[3])]) + " |")
    return "\n".join(lines)


def _range(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    return (f"{tables.geometric_mean(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f}; "
            f"{len(ratios)} cell{'s' * (len(ratios) > 1)})")


def cost_text(found: Sequence[Mapping]) -> str:
    """What determinism takes of the throughput, and whether bits stay, from records."""
    theirs = (f"Determinism takes up to {paper_figures.LARGEST_COST:.1%} of FlashAttention-3's "
              f"throughput, says the paper")
    costs = [1 - free["ms"] / best["ms"] for _, best, free in tables.price_rows(found)]
    here = (f"here up to {max(costs):.1%} of ours with the best order ({len(costs)} cells)"
            if costs else "here not measured (no times of a kernel that adds in any order)")
    repeats = [r["same_bits"] for r in records.by_schedule(found).values()
               if r["mode"] == "deterministic"]
    return (f"{theirs}; {here}. Equal bits in every repeat: {sum(repeats)} of {len(repeats)} "
            f"deterministic measurements.")


def table(found: Sequence[Row]) -> str:
    """All configurations: TFLOP/s of the baseline, and speed of the orders over it."""
    lines = tables.table([
        "head_dim", "mask", "len", "baseline: authors", "here",
        "descending / baseline: authors", "model", "simulator", "here",
        "(symmetric) shift / baseline: authors", "model", "simulator", "here"])
    for row in found:
        cells_of_row = [f"{row.theirs['ascending']:.0f}",
                        f"{row.ours['ascending']:.0f}" if "ascending" in row.ours else "-"]
        for names in (("descending",), _SHIFTS):
            claim = Claim("", names, ("ascending",), lambda cell: True)
            for kind in (row.theirs, row.dag, row.simulated, row.ours):
                ratio = claim.ratios([(row.cell, kind)])
                cells_of_row.append(f"{ratio[0]:.2f}" if ratio else "-")
        cell = row.cell
        lines.append("| " + " | ".join([str(cell.head_dim), "causal" if cell.causal else "full",
                                        str(cell.seqlen), *cells_of_row]) + " |")
    return "\n".join(lines)


def text(found: Sequence[Mapping], made: Mapping | None) -> str:
    """The whole comparison in Markdown."""
    compared = rows(found, made)
    return "\n\n".join([
        f"Ratios of speeds: geometric mean (least to most). Authors: FlashAttention-3 on an H800, "
        f"the better of their two kernels of an order. Paper's model: add = {DAG_REDUCE:g} "
        f"compute, no hand-off time, one SM for each kv tile of a head, and in the causal "
        f"baseline always the same. Means within {EQUAL:.0%} count as equal.",
        claims_text(compared), cost_text(found), table(compared)])


def main(arguments: list[str] | None = None) -> int:
    """Entry of the script; returns its exit status."""
    parser = harness.parser("paper", "Repeat the experiment of the DASH paper (arXiv 2601.21824).",
                            schedules=",".join(SCHEDULES))
    report.add_options(parser)
    parser.add_argument("--plot", metavar="FILE", help="draw the figure to FILE.svg or FILE.png")
    options = parser.parse_args(arguments)
    options.reuse = True
    found, made, bad = report.measure_or_read(backward.BACKWARD, options)
    print(text(found, made))
    if options.plot:
        from . import plots
        plots.save(plots.paper(rows(found, made), records.device_of(found)), options.plot)
    return int(bad)


if __name__ == "__main__":
    harness.script(main)
