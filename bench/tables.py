"""The Markdown tables of the results: a short one, and all cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from . import cells, model, ours, records

SHORT_LENGTHS = (512, 2048, 4096, 16384)
# Column of a table -> peer; the forward has no fa2_det.
PEERS = {
    "backward": {"FA2, deterministic": "fa2_det", "FA2": "fa2", "cuDNN": "cudnn"},
    "forward": {"FA2": "fa2", "cuDNN": "cudnn"},
}


def compact(found: Sequence[Mapping]) -> str:
    """A row for each direction, head_dim and mask of the 24 cells, a column for some lengths."""
    first_peers = {direction: next(iter(columns.values())) for direction, columns in PEERS.items()}
    lines = table(["", "head_dim", "mask", *map(str, SHORT_LENGTHS)])
    for direction, head_dim, causal in ((direction, head_dim, causal) for direction in PEERS
                                        for head_dim in (64, 128) for causal in (True, False)):
        row = []
        for seqlen in SHORT_LENGTHS:
            of_cell = _of(found, direction, cells.Cell(head_dim, causal, seqlen).key)
            mine = fastest(of_cell)
            if mine is None:
                row.append("-")
                continue
            ratios = [_ratio(peer_of(of_cell, name), mine)
                      for name in (first_peers[direction], "cudnn")]
            row.append(f"{mine['tflops']:.0f} ({', '.join(ratios)})")
        if set(row) != {"-"}:
            lines.append(_row([direction, str(head_dim), mask(causal), *row]))
    return "\n".join(lines) if len(lines) > 2 else ""


def full(found: Sequence[Mapping]) -> str:
    """A table of all cells for each direction: medians in ms, with TFLOP/s for ours.

    ``auto`` stands for ours in the backward; where only named schedules were measured, the fastest
    deterministic one of them.
    """
    parts = [_full(direction, mine) for direction in PEERS
             if (mine := [r for r in found if r["direction"] == direction])]
    return "\n\n".join(parts)


def _full(direction: str, found: Sequence[Mapping]) -> str:
    columns = PEERS[direction] | {
        name: name for name in sorted({r["peer"] for r in found} - set(PEERS[direction].values())
                                      - {"dashcupy"})}
    is_backward = direction == "backward"
    lines = table(["head_dim", "mask", "len", "heads", "dashcupy, ms (TFLOP/s)",
                   *(["schedule"] * is_backward), *(f"{name}, ms" for name in columns),
                   f"{next(iter(columns))} / dashcupy"])
    for cell in sorted({records.cell_of(r) for r in found}):
        of_cell = _of(found, direction, cell)
        mine = fastest(of_cell)
        others = [peer_of(of_cell, peer) for peer in columns.values()]
        line = [*_cell_text(cell), f"{mine['ms']:.3f} ({mine['tflops']:.0f})" if mine else "-"]
        if is_backward:
            line.append(f"`{mine['schedule_used']}`" if mine else "-")
        line += [f"{r['ms']:.3f}" if r else "-" for r in others]
        line.append(_ratio(others[0], mine))
        lines.append(_row(line))
    return "\n".join([caption(direction.capitalize(), found), "", *lines])


def caption(title: str, found: Sequence[Mapping]) -> str:
    """One line about some records: card, versions, equal bits."""
    newest = max(found, key=lambda r: r["date"])
    versions = newest["versions"]
    promised = [r for r in found if r["peer"] == "dashcupy" and r["mode"] == "deterministic"]
    bits = "equal bits in every repeat" if all(r["same_bits"] for r in promised) else \
        "NOT equal bits in every repeat"
    dtypes = ", ".join(sorted({r["dtype"] for r in found}))
    tokens = ", ".join(f"{n:,}" for n in sorted({r["batch"] * r["seqlen"] for r in found}))
    return (f"**{title}** on {newest['device']}, {dtypes}, {tokens} tokens in all, "
            f"dashcupy: {bits}. "
            f"Driver {newest['driver']}, CUDA {newest['cuda']}, "
            f"torch {versions.get('torch', 'unknown')}, cuDNN {versions.get('cudnn', 'unknown')}, "
            f"{newest['date']}.")


def price_rows(found: Sequence[Mapping]) -> list[tuple[tuple, Mapping, Mapping]]:
    """(cell, our fastest deterministic record, ours that adds in any order) where both exist."""
    rows = []
    mine = records.by_schedule(found)
    for cell in sorted({cell for cell, _ in mine}):
        ordered = [r for (other, _), r in mine.items()
                   if other == cell and r["mode"] == "deterministic"]
        free = mine.get((cell, ours.UNORDERED))
        if free and ordered:
            rows.append((cell, min(ordered, key=lambda r: r["ms"]), free))
    return rows


def price(found: Sequence[Mapping]) -> str:
    """What determinism costs, cell by cell; empty where ``unordered`` was not measured."""
    rows = price_rows(found)
    if not rows:
        return ""
    lines = table(["head_dim", "mask", "len", "heads", "best schedule", "ms", "unordered, ms",
                   "price", "unordered: same bits", "price in FA2"])
    for cell, best, free in rows:
        of_cell = _of(found, "backward", cell)
        lines.append(_row([
            *_cell_text(cell), f"`{best['schedule_used']}`", f"{best['ms']:.3f}",
            f"{free['ms']:.3f}", f"{best['ms'] / free['ms']:.3f}",
            "yes" if free["same_bits"] else "no",
            _ratio(peer_of(of_cell, "fa2_det"), peer_of(of_cell, "fa2"))]))
    return "\n".join([price_line(found), "", *lines])


def price_line(found: Sequence[Mapping]) -> str:
    """One sentence about the price of determinism; empty where it was not measured."""
    ratios = [best["ms"] / free["ms"] for _, best, free in price_rows(found)]
    if not ratios:
        return ""
    return (f"Price of determinism (best schedule / the same kernel adding in any order): "
            f"{geometric_mean(ratios):.3f} in the geometric mean of {len(ratios)} cells, "
            f"{min(ratios):.3f} to {max(ratios):.3f}.")


def predictions(made: Mapping) -> str:
    """Fits, and measured over predicted time of every cell and schedule; ``!`` where far off."""
    lines = [f"- {fit_line(line)}" for line in made["fits"]]
    known = model.by_schedule(made)
    columns = sorted({schedule for _, schedule in known})
    lines += ["", *table(["head_dim", "mask", "len", "heads", "kernel", *columns])]
    for cell in sorted({cell for cell, _ in known}):
        row = [known.get((cell, schedule)) for schedule in columns]
        kernel = next(p["kernel"] for p in row if p)
        lines.append(_row([*_cell_text(cell), kernel, *map(_prediction, row)]))
    return "\n".join(lines)


def fit_line(fit: Mapping) -> str:
    """One sentence about a fit."""
    hop = fit["reduce_us"] + fit["latency_us"]
    told = "" if math.isclose(fit["least_hop_us"], fit["most_hop_us"], rel_tol=0.01) else (
        f" (any from {fit['least_hop_us']:.2f} to {fit['most_hop_us']:.2f} fits as well)")
    return (f"`{fit['kernel']}`, head_dim {fit['head_dim']}: {fit['fixed_ms']:.3f} ms + makespan "
            f"with compute {fit['compute_us']:.2f} us, add and hand-off {hop:.2f} us{told}, "
            f"{fit['slots']} slots; off by {100 * fit['error']:.1f} % (mean of {fit['n']} times).")


def is_wrong(prediction: Mapping) -> bool:
    """Whether a time is further from its prediction than the model may be."""
    return abs(prediction["ms"] / prediction["predicted_ms"] - 1) > model.WRONG


def _prediction(p: Mapping | None) -> str:
    if p is None:
        return "-"
    return (f"{p['ms']:.3f} / {p['predicted_ms']:.3f} = {p['ms'] / p['predicted_ms']:.2f}"
            f"{' !' * is_wrong(p)}")


def fastest(of_cell: Iterable[Mapping]) -> Mapping | None:
    """Ours of one cell and direction: ``auto``, or else the fastest deterministic schedule."""
    mine = [r for r in of_cell if r["peer"] == "dashcupy" and r["mode"] == "deterministic"]
    auto = [r for r in mine if r["schedule"] in (None, "auto")]
    return min(auto or mine, key=lambda r: r["ms"], default=None)


def peer_of(of_cell: Iterable[Mapping], peer: str) -> Mapping | None:
    """The record of a peer among those of one cell and direction."""
    return next((r for r in of_cell if r["peer"] == peer), None)


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def table(head: Sequence[str], rows: Iterable[Sequence[str]] = ()) -> list[str]:
    """The lines of a Markdown table: the first two, and these rows."""
    return [_row(head), "|" + "---|" * len(head), *map(_row, rows)]


def _row(parts: Sequence[str]) -> str:
    return "| " + " | ".join(parts) + " |"


def _of(found: Iterable[Mapping], direction: str, cell: tuple) -> list[Mapping]:
    return [r for r in found if r["direction"] == direction and records.cell_of(r) == cell]


def _ratio(other: Mapping | None, mine: Mapping | None) -> str:
    return f"{other['ms'] / mine['ms']:.2f}" if other and mine else "-"


def mask(causal: bool) -> str:
    """Name of the mask."""
    return "causal" if causal else "full"


def _cell_text(cell: tuple) -> list[str]:
    head_dim, is_full, seqlen, _, _, q_heads, kv_heads = cell
    heads = str(q_heads) if q_heads == kv_heads else f"{q_heads} on {kv_heads}"
    return [str(head_dim), mask(not is_full), str(seqlen), heads]
