"""Pictures of schedules: a table of steps as text, and a Gantt chart of simulated runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from .errors import InvalidInputError, UnsupportedError
from .schedules import Schedule, Shape
from .simulate import Costs, Simulation, Step

SUFFIXES = (".svg", ".png")
COLOURS = {"compute": "#4c78a8", "compute, odd heads": "#9ecae9", "add": "#f2a93b",
           "hand-off": "#fbe3b5", "stall": "#d62728"}
MAX_LANES = 40  # with more workers there is no room for gaps, numbers and a second lane
MAX_PANEL_INCHES = 4.0


def step_table(schedule: Schedule, shape: Shape, max_works: int = 32, max_steps: int = 32) -> str:
    """Table of one head: a row for each work, a column for each step, cells ``q tile.ticket``.

    ``|`` marks where a work goes on to its next kv tile. The header of each CUDA schedule holds
    such a table.
    """
    rows = []
    for work in range(min(schedule.num_work(shape), max_works)):
        kv_tiles = [schedule.kv_tile(shape, work, part)
                    for part in range(schedule.work_size(shape, work))]
        rows.append((work, ",".join(map(str, kv_tiles)), _cells(schedule, shape, kv_tiles)))
    n_step = max((len(cells) for _, _, cells in rows), default=0)
    shown = min(n_step, max_steps)
    width = max((len(cell) for _, _, cells in rows for cell in cells[:shown]), default=1)
    kv_width = max([len("kv")] + [len(kv) for _, kv, _ in rows])
    lines = [f"{schedule.NAME}: {'causal' if shape.causal else 'full'} mask, {shape.n_q} q tiles, "
             f"{shape.n_kv} kv tiles; cells are q tile.ticket",
             _line("work", "kv", map(str, range(shown)), kv_width, width)]
    lines += [_line(work, kv, cells[:shown], kv_width, width) for work, kv, cells in rows]
    if schedule.num_work(shape) > max_works or n_step > shown:
        lines.append(f"... ({len(rows)} of {schedule.num_work(shape)} works, {shown} of "
                     f"{n_step} steps)")
    return "\n".join(line.rstrip() for line in lines)


def _cells(schedule: Schedule, shape: Shape, kv_tiles: list[int]) -> list[str]:
    cells = []
    for part, kv_tile in enumerate(kv_tiles):
        for step in range(schedule.num_steps(shape, kv_tile)):
            q_tile = schedule.q_tile(shape, kv_tile, step)
            mark = "|" if part and not step else " "
            cells.append(f"{mark}{q_tile}.{schedule.ticket(shape, kv_tile, q_tile)}")
    return cells


def _line(work, kv, cells, kv_width: int, width: int) -> str:
    return f"{work:>4}  {kv:>{kv_width}}  " + " ".join(f"{cell:>{width}}" for cell in cells)


def gantt(results: Mapping[str, Simulation], costs: Costs, path: str | Path,
          title: str = "") -> None:
    """Draw simulated runs below one another, on one time axis and in the same colours.

    Parameters
    ----------
    results
        Simulations by name, all with the same ``costs``.
    path
        File to write; the suffix says how: ``.svg`` or ``.png``.

    Raises
    ------
    InvalidInputError
        Another suffix, no result, or a file that cannot be written.
    UnsupportedError
        matplotlib is not installed.
    """
    check_path(path)
    if not results:
        raise InvalidInputError("there is nothing to draw: give at least one simulation")
    matplotlib = require_matplotlib()
    n_worker = max(len(result.busy) for result in results.values())
    lanes = max(0.9, min(0.3 * n_worker, MAX_PANEL_INCHES))
    figure = matplotlib.figure.Figure(figsize=(12, (lanes + 0.55) * len(results) + 1.0),
                                      layout="constrained")
    panels = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    end = max(_last_time(result, costs) for result in results.values()) or 1.0
    for axes, (name, result) in zip(panels, results.items(), strict=True):
        _draw_run(axes, name, result, costs, end)
    panels[-1].set_xlabel(f"time (compute of one step {costs.compute:g}, add {costs.reduce:g}, "
                          f"hand-off {costs.latency:g})")
    hidden = {"hand-off"} if not costs.latency else set()
    if costs.slots and n_worker > MAX_LANES:
        hidden = {"add", "hand-off"}
    handles = [matplotlib.patches.Patch(color=colour, label=label)
               for label, colour in COLOURS.items() if label not in hidden]
    handles.append(matplotlib.lines.Line2D([], [], color="black", ls="--", label="work bound"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False,
                  title=title or None)
    save(figure, path)


def check_path(path: str | Path) -> None:
    """Refuse a file whose suffix does not say how to draw.

    Raises
    ------
    InvalidInputError
    """
    if Path(path).suffix not in SUFFIXES:
        raise InvalidInputError(f"cannot draw to {path}: the suffix must be one of "
                                f"{', '.join(SUFFIXES)}")


def require_matplotlib() -> ModuleType:
    """Import matplotlib, or say what to install.

    Raises
    ------
    UnsupportedError
        It is not installed.
    """
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise UnsupportedError("drawing needs matplotlib, which is not installed; "
                               "pip install 'dashcupy[plot]'") from None
    return matplotlib


def save(figure, path: str | Path, description: str | None = None) -> None:
    """Write a matplotlib figure; the same one gives the same file: a fixed salt and no date.

    Parameters
    ----------
    figure
    path
        ``.svg`` or ``.png``.
    description
        Text that an SVG carries along.

    Raises
    ------
    InvalidInputError
        The file cannot be written.
    """
    metadata = None
    if Path(path).suffix == ".svg":
        metadata = {"Date": None, "Creator": "dashcupy", "Description": description}
    try:
        with require_matplotlib().rc_context({"svg.hashsalt": "dashcupy"}):
            figure.savefig(path, dpi=110, metadata=metadata)
    except OSError as error:
        raise InvalidInputError(f"cannot draw to {path} ({error.strerror}): give a file in a "
                                f"folder that exists and can be written") from error


def _last_time(result: Simulation, costs: Costs) -> float:
    if math.isfinite(result.makespan):
        return result.makespan
    return max((step.reduce_end + costs.latency for step in result.steps), default=0.0)


def _draw_run(axes, name: str, result: Simulation, costs: Costs, end: float) -> None:
    """One panel, a lane for each worker; with slots the adder has a lane of its own below."""
    n_worker = len(result.busy)
    many = n_worker > MAX_LANES
    height = 1.0 if many else 0.5 if costs.slots else 0.84
    top = -0.5 if many else -0.42
    add_top, add_height = (top + height, 0.32) if costs.slots else (top, height)
    for (kind, worker), spans in _bars(result, costs, adder=not (many and costs.slots)).items():
        below = kind in ("add", "hand-off")
        axes.broken_barh(spans, (worker + (add_top if below else top),
                                 add_height if below else height),
                         facecolor=COLOURS[kind], edgecolor="white",
                         zorder=1 if kind == "hand-off" else 2,  # the next add may hide it
                         linewidth=0.0 if many or costs.compute < end / 100 else 0.5)
    if not many and costs.compute > end / 45:
        for step in result.steps:
            axes.text(step.compute_start + costs.compute / 2, step.worker + top + height / 2,
                      str(step.q_tile), ha="center", va="center_baseline", fontsize=7,
                      color="black" if step.head % 2 else "white")
    axes.axvline(result.work_bound, color="black", ls="--", lw=1)
    axes.set_xlim(0, end * 1.01)
    axes.set_ylim(n_worker - 0.5, -0.5)
    axes.set_ylabel("worker")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    if result.deadlock:
        said = "hangs"
    else:
        whole = (result.makespan * n_worker) or 1.0
        said = (f"makespan {result.makespan:g}, work bound {result.work_bound:g} "
                f"({result.efficiency:.1%}); stall {sum(result.stall) / whole:.1%}, "
                f"idle {sum(result.idle) / whole:.1%}")
    axes.set_title(f"{name}: {said}", loc="left", fontsize=10)


def _bars(result: Simulation, costs: Costs,
          adder: bool) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """(start, length) of all bars, by colour and worker."""
    bars: dict[tuple[str, int], list[tuple[float, float]]] = {}

    def bar(kind: str, worker: int, start: float, stop: float) -> None:
        if stop > start:
            bars.setdefault((kind, worker), []).append((start, stop - start))

    last: dict[int, Step] = {}
    for step in result.steps:
        computed = step.compute_start + costs.compute
        kind = "compute, odd heads" if step.head % 2 else "compute"
        bar(kind, step.worker, step.compute_start, computed)
        stall_end = step.compute_end if costs.slots else step.reduce_start
        bar("stall", step.worker, computed, stall_end)
        if adder:
            bar("add", step.worker, step.reduce_start, step.reduce_end)
            if costs.ordered:
                bar("hand-off", step.worker, step.reduce_end, step.reduce_end + costs.latency)
        # With slots a worker computes on, but takes its next work only when its last add begins.
        previous = last.get(step.worker, step)
        if costs.slots and (previous.head, previous.work) != (step.head, step.work):
            bar("stall", step.worker, previous.compute_end, previous.reduce_start)
        last[step.worker] = step
    for step in last.values() if costs.slots else ():
        bar("stall", step.worker, step.compute_end, step.reduce_start)
    return bars
