"""Pictures of the results: speed over length, price of determinism, simulated against measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dashcupy import draw

from . import cells, model, paper_figures, records, tables

# Peers and schedules keep their colours in all pictures.
_PEERS = {"dashcupy": ("#1f4e9c", "dashcupy, deterministic"),
          "fa2_det": ("#d1495b", "FlashAttention-2, deterministic"),
          "fa2": ("#e9a23b", "FlashAttention-2"), "cudnn": ("#6a994e", "cuDNN"),
          "fa3_det": ("#7b2d8b", "FlashAttention-3, deterministic"),
          "fa3": ("#b57edc", "FlashAttention-3"),
          "fa4_det": ("#5c4033", "FlashAttention-4, deterministic"),
          "fa4": ("#a9876b", "FlashAttention-4")}
_SCHEDULES = {"ascending": "#8d99ae", "descending": "#1f4e9c", "shortest_first": "#6a994e",
              "longest_first": "#7b2d8b", "shift": "#e07a1f", "symmetric_shift": "#d1495b",
              "unordered": "#222222"}
_PANELS = tuple((head_dim, causal) for head_dim in (64, 128) for causal in (True, False))


def speed(found: Sequence[Mapping], direction: str):
    """TFLOP/s over length, a panel for each head_dim and mask of the 24 cells."""
    figure, panels = _figure(1, 4, 3.3)
    for axes, (head_dim, causal) in zip(panels[0], _PANELS):
        mine = [r for r in found if r["direction"] == direction and r["head_dim"] == head_dim
                and r["causal"] == causal and r["q_heads"] == r["kv_heads"]]
        for peer, (colour, label) in _PEERS.items():
            points = {}
            for cell in sorted({records.cell_of(r) for r in mine}):
                of_cell = [r for r in mine if records.cell_of(r) == cell]
                shown = (tables.fastest(of_cell) if peer == "dashcupy"
                         else tables.peer_of(of_cell, peer))
                if shown:
                    points[shown["seqlen"]] = shown["tflops"]
            is_ours = peer == "dashcupy"
            _line(axes, points, colour, label, lw=2.4 if is_ours else 1.4,
                  zorder=3 if is_ours else 2, ls="--" if peer.endswith("_det") else "-")
        _length_axis(axes, mine, f"head_dim {head_dim}, {tables.mask(causal)}")
    panels[0][0].set_ylim(bottom=0)
    panels[0][0].set_ylabel("TFLOP/s")
    _legend(figure, panels, f"{direction.capitalize()}, {_what(found)}")
    return figure


def price(found: Sequence[Mapping]):
    """Time with a fixed order over time without; None if ``unordered`` was not measured."""
    rows = tables.price_rows(found)
    if not rows:
        return None
    figure, panels = _figure(1, 4, 3.3)
    for axes, (head_dim, causal) in zip(panels[0], _PANELS):
        mine = {cell: best["ms"] / free["ms"] for cell, best, free in rows
                if cell[:2] == (head_dim, not causal)}
        pairs = {cell[2]: ratio for cell, ratio in mine.items() if cell[5] == cell[6]}
        _line(axes, pairs, _PEERS["dashcupy"][0], "dashcupy, best schedule", lw=2.4)
        for family in ("fa2", "fa3", "fa4"):
            times = {(r["peer"], r["seqlen"]): r["ms"] for r in found
                     if r["direction"] == "backward" and records.cell_of(r) in mine}
            ratios = {seqlen: times[f"{family}_det", seqlen] / ms
                      for (peer, seqlen), ms in times.items()
                      if peer == family and (f"{family}_det", seqlen) in times}
            _line(axes, ratios, _PEERS[family][0], _PEERS[family][1])
        axes.axhline(1.0, color="black", lw=0.8)
        _length_axis(axes, found, f"head_dim {head_dim}, {tables.mask(causal)}")
    panels[0][0].set_ylabel("time deterministic / not")
    _legend(figure, panels, f"Price of determinism, backward, {_what(found)}")
    return figure


def simulated(found: Sequence[Mapping], made: Mapping):
    """Measured over predicted time of each schedule, by length; a band where they agree."""
    figure, panels = _figure(1, 4, 3.3)
    known = model.by_schedule(made)
    for axes, (head_dim, causal) in zip(panels[0], _PANELS):
        mine = {(cell[2], schedule): p for (cell, schedule), p in known.items()
                if cell[:2] == (head_dim, not causal) and cell[5] == cell[6]}
        for schedule, colour in _SCHEDULES.items():
            _line(axes, {seqlen: p["ms"] / p["predicted_ms"]
                         for (seqlen, name), p in sorted(mine.items()) if name == schedule},
                  colour, schedule)
        kernels = ", ".join(sorted({p["kernel"] for p in mine.values()}))
        axes.axhspan(1 - model.WRONG, 1 + model.WRONG, color="#e8eef7", zorder=0)
        axes.axhline(1.0, color="black", lw=0.8)
        _length_axis(axes, found, f"head_dim {head_dim}, {tables.mask(causal)}: {kernels}")
    panels[0][0].set_ylabel("time measured / simulated")
    _legend(figure, panels, f"Backward against the fitted simulator, {_what(found)}")
    return figure


def paper(rows: Sequence, device: str):
    """The paper's figure, theirs above and ours below: TFLOP/s of its orders in bars.

    Parameters
    ----------
    rows
        `paper.rows`.
    device
        Ours.
    """
    figure, panels = _figure(2, 4, 5.4)
    orders = (("ascending", "baseline (ascending)"), ("descending", "descending"),
              ("shift", "shift (full mask)"), ("symmetric_shift", "symmetric shift (causal)"))
    for line, (kind, name) in zip(panels, (("theirs", f"FlashAttention-3, "
                                                      f"{paper_figures.DEVICE}"),
                                           ("ours", f"dashcupy, {device}"))):
        for axes, (head_dim, causal) in zip(line, _PANELS):
            mine = [row for row in rows if (row.cell.head_dim, row.cell.causal)
                    == (head_dim, causal)]
            names = [name for name, _ in orders
                     if name != ("shift" if causal else "symmetric_shift")]
            for i, (schedule, label) in enumerate(
                    order for order in orders if order[0] in names):
                heights = [getattr(row, kind).get(schedule, 0.0) for row in mine]
                axes.bar([x + 0.27 * (i - 1) for x in range(len(mine))], heights, 0.27,
                         color=_SCHEDULES[schedule], label=label)
            axes.set_xticks(range(len(mine)), [_short(row.cell.seqlen) for row in mine])
            axes.set_title(f"head_dim {head_dim}, {tables.mask(causal)}", fontsize=9)
        line[0].set_ylabel(f"{name}\nTFLOP/s", fontsize=8)
    for axes in panels[1]:
        axes.set_xlabel("length")
    _legend(figure, panels, "The orders of the DASH paper, backward, bfloat16, "
                            f"{cells.TOKENS:,} tokens")
    return figure


def draw_all(found: Sequence[Mapping], made: Mapping | None, rows: Sequence,
             folder: Path, stem: str) -> list[Path]:
    """Write all pictures that these records allow as SVG; returns their paths.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    folder.mkdir(exist_ok=True)
    pictures = {direction: speed(found, direction)
                for direction in sorted({r["direction"] for r in found})}
    pictures["price"] = price(found)
    pictures["simulated"] = simulated(found, made) if made and made["predictions"] else None
    pictures["paper"] = (paper(rows, records.device_of(found))
                         if any(row.ours for row in rows) else None)
    paths = []
    for name, figure in pictures.items():
        if figure is not None:
            paths.append(folder / f"{stem}_{name}.svg")
            save(figure, paths[-1], digest(found, made))
    return paths


def digest(found: Iterable[Mapping], made: Mapping | None) -> str:
    """What an SVG says of its data: it tells whether the picture shows these records."""
    data = json.dumps([list(found), made], sort_keys=True).encode()
    return f"records sha256 {hashlib.sha256(data).hexdigest()}"


def save(figure, path: str | Path, description: str | None = None) -> None:
    """Write a figure; text stays text, which keeps an SVG small."""
    draw.check_path(path)
    with draw.require_matplotlib().rc_context({"svg.fonttype": "none"}):
        draw.save(figure, path, description)


def _figure(n_row: int, n_column: int, inches: float):
    matplotlib = draw.require_matplotlib()
    figure = matplotlib.figure.Figure(figsize=(11, inches), layout="constrained")
    return figure, figure.subplots(n_row, n_column, sharey=True, squeeze=False)


def _line(axes, points: Mapping[int, float], colour: str, label: str, lw: float = 1.4,
          **style) -> None:
    if points:
        axes.plot(list(points), list(points.values()), color=colour, label=label, marker="o",
                  markersize=3, lw=lw, **style)


def _length_axis(axes, found: Iterable[Mapping], title: str) -> None:
    lengths = sorted({r["seqlen"] for r in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_short(length) for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("length")
    axes.set_title(title, fontsize=9)
    axes.grid(axis="y", lw=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure, panels, title: str) -> None:
    known = {}
    for axes in panels.flat:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            known.setdefault(label, handle)
    figure.legend(known.values(), known, loc="outside lower center", ncols=min(len(known), 6) or 1,
                  frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 else str(length)


def _what(found: Sequence[Mapping]) -> str:
    longer = " or one sequence" * any(r["seqlen"] > cells.TOKENS for r in found)
    return f"{records.device_of(found)}, bfloat16, {cells.TOKENS:,} tokens{longer}"
