"""The picture of compared runs: both loss curves, and how far apart they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dashcupy import draw as drawing

from .. import plots
from .compare import Comparison

COLOURS = ("#4c78a8", "#d62728", "#f2a93b", "#54a24b", "#b279a2")
# Below it the axis is linear, so that 0, which is what equal bits give, has a place. Neighbouring
# float32 numbers near a loss of 1 are this far apart.
_LINEAR_BELOW = 1e-7


def draw(comparisons: Sequence[Comparison], path: str | Path, description: str) -> None:
    """Draw pairs of runs over one another.

    Parameters
    ----------
    comparisons
        Pairs, each in a colour of its own.
    path
        File to write: ``.svg`` or ``.png``.
    description
        What an SVG says of its data.

    Raises
    ------
    InvalidInputError, UnsupportedError
        Another suffix, a file that cannot be written; no matplotlib.
    """
    drawing.check_path(path)
    matplotlib = drawing.require_matplotlib()
    figure = matplotlib.figure.Figure(figsize=(9, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for number, found in enumerate(comparisons):
        colour = COLOURS[number % len(COLOURS)]
        first, second = found.losses
        # The second run lies over the first: where they part, both are seen.
        above.plot(found.steps, first, color=colour, lw=2.6, alpha=0.4)
        above.plot(found.steps, second, color=colour, lw=1, ls="--")
        apart = [abs(x - y) for x, y in zip(first, second, strict=True)]
        # Pairs that all lie at 0 are seen, too: what is drawn later is thinner.
        below.plot(found.steps, apart, color=colour, lw=1.2 + 2 * (len(comparisons) - 1 - number),
                   label=f"{_pair(found)}: {_verdict(found, apart)}", solid_capstyle="butt")
    above.set_title("each pair of runs: the first pale, the second dashed", fontsize=10)
    above.set_ylabel("loss, nats per byte")
    below.set_ylabel("|difference of the losses|")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    below.set_yscale("symlog", linthresh=_LINEAR_BELOW)
    below.set_ylim(bottom=-_LINEAR_BELOW / 2)  # a line at 0 is not hidden by the frame
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False)
    plots.save(figure, path, description)


def _pair(found: Comparison) -> str:
    first, second = found.labels
    return f"{first}, two runs" if first == second else f"{first} and {second}"


def _verdict(found: Comparison, apart: Sequence[float]) -> str:
    if found.equal:
        return "0 at every step, all bits equal"
    return f"differ at {sum(x > 0 for x in apart)} of {len(apart)} steps"
