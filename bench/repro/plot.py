"""The picture of compared runs: both loss curves, and how far apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dashcupy.draw import new_figure, save_figure

from .compare import Comparison

COLOURS = ("#4c78a8", "#d62728", "#f2a93b", "#54a24b", "#b279a2")
# Below it the axis is linear, so that 0, which is what equal bits give, has a place. Neighbouring
# float32 numbers near a loss of 1 are this far apart.
_LINEAR_BELOW = 1e-7


def draw(comparisons: Sequence[Comparison], path: str | Path) -> None:
    """Draw pairs of runs over one another.

    Parameters
    ----------
    comparisons
        Pairs, each in a colour of its own.
    path
        File to write: ``.svg`` or ``.png``.

    Raises
    ------
    InvalidInputError, UnsupportedError
        As for `dashcupy.draw.new_figure` and `dashcupy.draw.save_figure`.
    """
    figure = new_figure(path, 9, 6.5)
    above, below = figure.subplots(2, 1, sharex=True)
    for number, found in enumerate(comparisons):
        colour = COLOURS[number % len(COLOURS)]
        first, second = found.losses
        # The second run lies over the first: where they part, both colours are seen.
        above.plot(found.steps, first, color=colour, lw=2.6, alpha=0.4,
                   label=f"{found.label}, run 1")
        above.plot(found.steps, second, color=colour, lw=1, ls="--", label=f"{found.label}, run 2")
        apart = [abs(x - y) for x, y in zip(first, second, strict=True)]
        below.plot(found.steps, apart, color=colour, lw=1.2, label=_verdict(found, apart))
    above.set_ylabel("loss, nats per byte")
    below.set_ylabel("|loss of run 1 - loss of run 2|")
    below.set_xlabel("step")
    below.set_yscale("symlog", linthresh=_LINEAR_BELOW)
    below.set_ylim(bottom=-_LINEAR_BELOW / 4)  # a line at 0 is not hidden by the frame
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    save_figure(figure, path)


def _verdict(found: Comparison, apart: Sequence[float]) -> str:
    if found.equal:
        return f"{found.label}: 0 at every step, all bits equal"
    return f"{found.label}: differs at {sum(x > 0 for x in apart)} of {len(apart)} steps"
