"""What `python -m dashcupy check` tries: lengths around the tiles, inputs that are hard."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..config import Target, choose_config
from ..config_sm90 import TARGET as HOPPER
from ..problem import Problem
from .inputs import INPUTS

# Another scale than the default of own shapes: a function that ignores it gives wrong values.
_OTHER_SCALE = 0.5


@dataclass(frozen=True)
class Case:
    """One set of inputs.

    Parameters
    ----------
    title
        What it is there for.
    inputs
        A key of `INPUTS`.
    problem
        Sizes, dtype, mask and scale.
    """

    title: str
    inputs: str
    problem: Problem

    @property
    def n_score(self) -> int:
        """Elements of q k^T, of all heads: a measure of the work."""
        p = self.problem
        return p.batch * p.n_q_head * p.q_len * p.kv_len


def default_cases(target: Target, quick: bool = False) -> list[Case]:
    """Cases whose lengths sit around the tiles of a target; few and chosen.

    Parameters
    ----------
    target
        ``"cpu"`` or a compute capability: tiles follow from it, and lengths from the tiles.
    quick
        Only the first case of each kind of inputs.
    """
    cases = []
    for quick_too, masks, title, inputs, sizes in _table(target):
        if quick and not quick_too:
            continue
        cases += [Case(title, inputs, replace(sizes, mask=mask)) for mask in masks]
    return cases


def _table(target: Target) -> list[tuple[bool, tuple[str, ...], str, str, Problem]]:
    both = ("full", "causal")

    def sized(q, kv, heads, head_dim, dtype, batch=1):
        """A problem of q and kv tiles (and rows more) of this target."""
        problem = Problem(batch, 1, 1, *heads, head_dim, dtype, "full", 1 / math.sqrt(head_dim))
        q_rows, kv_rows = _tiles(problem, target)
        return replace(problem, q_len=q[0] * q_rows + q[1], kv_len=kv[0] * kv_rows + kv[1])

    table = [
        (True, both, "tails, groups of heads, two sequences", "normal",
         sized((2, 1), (2, 1), (4, 2), 64, "bfloat16", batch=2)),
        (True, both, "partly filled last tiles", "deep",
         sized((1, 64), (1, 64), (2, 2), 64, "bfloat16")),
        (True, both, "nearly one-hot rows", "one_hot",
         sized((1, 1), (2, 0), (2, 1), 128, "float16")),
        (False, ("causal", "causal_top_left"), "more rows than keys: rows that see none", "normal",
         sized((4, 1), (1, 1), (3, 1), 96, "float16")),
    ]
    if target == "cpu":
        return table + [
            (False, both, "many tiles", "normal", sized((4, 0), (4, 0), (2, 2), 64, "float16")),
            (False, both, "single precision", "normal",
             sized((1, 1), (2, 1), (2, 1), 64, "float32")),
        ]
    if target == HOPPER:
        table += [
            (False, both, "wide heads", "normal",
             sized((2, 1), (3, 1), (4, 2), 192, "float16", batch=2)),
            (False, both, "the widest heads", "deep",
             sized((2, 1), (3, 1), (2, 1), 256, "bfloat16")),
        ]
    return table + [
        (False, both, "more kv tiles than CTAs that wait for one another", "normal",
         sized((9, 0), (130, 0), (2, 2), 64, "float16")),
        (False, both, "more works than a GPU has SMs", "normal",
         sized((8, 1), (8, 1), (32, 8), 128, "bfloat16", batch=8)),
    ]


def _tiles(problem: Problem, target: Target) -> tuple[int, int]:
    configs = [choose_config(problem, direction, target) for direction in ("forward", "backward")]
    return (max(config.q_tile for config in configs), max(config.kv_tile for config in configs))


def own_cases(problem: Problem, other_scale: bool = True) -> list[Case]:
    """Every kind of inputs for one problem of the user's; by default another scale as well."""
    cases = [Case(f"own shape, {inputs} inputs", inputs, problem) for inputs in INPUTS]
    if other_scale:
        cases.append(Case("own shape, half the scale", "normal",
                          replace(problem, scale=_OTHER_SCALE * problem.scale)))
    return cases
