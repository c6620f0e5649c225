"""The Markdown tables of the results: a short one, and all cells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from . import cells, model, ours, records

SHORT_LENGTHS = (512, 2048, 4096, 16384)
DIRECTIONS = ("backward", "forward")
_STANDARD = frozenset(cell.key for cell in cells.ALL)  # the 24 of head_dim 64 and 128
# Peers by their names in tables; others go by their own.
PEERS = {"fa2_det": "FA2, deterministic", "fa2": "FA2", "cudnn": "cuDNN",
         "fa3_det": "FA3, deterministic", "fa3": "FA3", "fa4_det": "FA4, deterministic",
         "fa4": "FA4"}


def compact(found: Sequence[Mapping]) -> str:
    """A row for each direction, head_dim and mask of the 24 cells, a column for some lengths.

    In brackets how many times as fast ours is as the fastest peer of the cell, and, backward, as
    the fastest deterministic one.
    """
    lines = table(["", "head_dim", "mask", *map(str, SHORT_LENGTHS)])
    for direction, head_dim, causal in ((direction, head_dim, causal) for direction in DIRECTIONS
                                        for head_dim in (64, 128) for causal in (True, False)):
        row = []
        for seqlen in SHORT_LENGTHS:
            of_cell = _of(found, direction, cells.Cell(head_dim, causal, seqlen).key)
            mine = fastest(of_cell)
            if mine is None:
                row.append("-")
                continue
            ratios = [_ratio(fastest_peer(of_cell, only), mine) for only in _modes(direction)]
            row.append(f"{mine['tflops']:.0f} ({', '.join(ratios)})")
        if set(row) != {"-"}:
            lines.append(_row([direction, str(head_dim), mask(causal), *row]))
    return "\n".join(lines) if len(lines) > 2 else ""


def full(found: Sequence[Mapping]) -> str:
    """A table of all cells for each direction: medians in ms, with TFLOP/s for ours.

    ``auto`` stands for ours in the backward; where only named schedules were measured, the fastest
    deterministic one of them.
    """
    parts = [_full(direction, mine) for direction in DIRECTIONS
             if (mine := [r for r in found if r["direction"] == direction])]
    return "\n\n".join(parts)


def _full(direction: str, found: Sequence[Mapping]) -> str:
    measured = {r["peer"] for r in found} - {"dashcupy"}
    columns = [*(name for name in PEERS if name in measured), *sorted(measured - set(PEERS))]
    is_backward = direction == "backward"
    lines = table(["head_dim", "mask", "len", "heads", "dashcupy, ms (TFLOP/s)",
                   *(["schedule"] * is_backward),
                   *(f"{PEERS.get(name, name)}, ms" for name in columns),
                   "fastest other / dashcupy"])
    for cell in sorted({records.cell_of(r) for r in found}):
        of_cell = _of(found, direction, cell)
        mine = fastest(of_cell)
        others = [peer_of(of_cell, peer) for peer in columns]
        line = [*_cell_text(cell), f"{mine['ms']:.3f} ({mine['tflops']:.0f})" if mine else "-"]
        if is_backward:
            line.append(f"`{mine['schedule_used']}`" if mine else "-")
        line += [f"{r['ms']:.3f}" if r else "-" for r in others]
        line.append(_ratio(fastest_peer(of_cell), mine))
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
    parts = []
    for name, of_name in (("the 24 cells", True), ("others", False)):
        ratios = [best["ms"] / free["ms"] for cell, best, free in price_rows(found)
                  if (cell in _STANDARD) == of_name]
        if ratios:
            parts.append(f"{geometric_mean(ratios):.3f} in the geometric mean of {len(ratios)} of "
                         f"{name}, {min(ratios):.3f} to {max(ratios):.3f}")
    return (f"Price of determinism (best schedule / the same kernel adding in any order): "
            f"{'; '.join(parts)}.") if parts else ""


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


def fastest_peer(of_cell: Iterable[Mapping], only_deterministic: bool = False) -> Mapping | None:
    """The fastest record that is not ours among those of one cell and direction."""
    others = [r for r in of_cell if r["peer"] != "dashcupy"
              and (r["mode"] == "deterministic" or not only_deterministic)]
    return min(others, key=lambda r: r["ms"], default=None)


def standard(found: Iterable[Mapping]) -> list[Mapping]:
    """Those of the 24 cells of head_dim 64 and 128."""
    return [r for r in found if records.cell_of(r) in _STANDARD]


def families(found: Iterable[Mapping]) -> list[str]:
    """Names of the peers that were measured, without their modes."""
    measured = {r["peer"].removesuffix("_det") for r in found} - {"dashcupy"}
    return [PEERS.get(name, name) for name in sorted(measured)]


def standing(found: Sequence[Mapping]) -> str:
    """A sentence for each direction: ours beside the fastest others in the cells that have them."""
    lines = []
    for direction in DIRECTIONS:
        of_cells = [_of(found, direction, cell) for cell in sorted(_STANDARD)]
        text = []
        for only in _modes(direction):
            ratios = [other["ms"] / mine["ms"] for of_cell in of_cells
                      if (mine := fastest(of_cell)) and (other := fastest_peer(of_cell, only))]
            if ratios:
                name = "as the fastest deterministic one" if only else "as the fastest other kernel"
                text.append(
                    f"{name} {min(ratios):.2f} to {max(ratios):.2f} times as fast, "
                    f"{geometric_mean(ratios):.2f} in the geometric mean of {len(ratios)} cells")
        if text:
            lines.append(f"{direction.capitalize()}: {'; '.join(text)}.")
    return "\n".join(lines)


def _modes(direction: str) -> tuple[bool, ...]:
    """Whether only deterministic peers count; in the forward, where all are, there is one way."""
    return (False, True) if direction == "backward" else (False,)


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
