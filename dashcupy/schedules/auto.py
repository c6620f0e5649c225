"""What ``schedule="auto"`` means."""

from __future__ import annotations

from ..backward_table import BACKWARD_TABLE, BackwardKernel
from . import shift, symmetric_shift
from .order import MAX_TEAM
from .shape import Shape


def auto(shape: Shape, kernel: str = "", q_per_kv: int = 1) -> str:
    """Name of the schedule for a shape: a pure function, so that "auto" keeps its bits.

    Parameters
    ----------
    shape
    kernel
        Which kernel runs it: those of Hopper have preferences of their own, the CPU has none.
    q_per_kv
        q heads that share a kv head.

    Notes
    -----
    Launch-ordered schedules (``team_size`` 1) cannot hang, however few CTAs are resident, and need
    no cooperative launch.

    * causal: ``descending`` starts the long kv tiles first, so that no CTA is left alone with a
      long one, and its kv tiles leave the last q tile one after another, each one step later.
      Where that queue costs more than what is left at the end, ``shortest_first``, and in heads of
      many kv tiles ``longest_first``, which has neither: facts of the kernel (`backward_table`).
    * full: ``ascending``; all kv tiles are equally long, so the order of works is all the same.
    * ``shift`` and ``symmetric_shift`` need a team, and some kernels gain from one: which, and for
      how many kv tiles, is a fact of the kernel, too. But not from one of more than 16 works of
      which no number fills `MAX_TEAM` places, less 2 at most: SMs would idle. Nor from one with few
      q tiles, on which its kv tiles meet.
    * With q heads that share kv heads a kv tile is so long that what its q heads need no longer
      stays in L2, unless the CTAs walk over it together, as in ``descending`` and ``ascending``.
    """
    facts = BACKWARD_TABLE.get(kernel, BackwardKernel())
    if q_per_kv > 1 and facts.groups[shape.causal]:
        return facts.groups[shape.causal]
    n_active, team = shape.num_active_kv_tiles(), symmetric_shift if shape.causal else shift
    size = team.team_size(shape)
    gains = (n_active in facts.team_tiles[shape.causal] and shape.n_q >= 2 * size - 1
             and (size <= 16 or MAX_TEAM % size <= 2))
    if gains:
        return team.NAME
    if shape.causal and n_active in facts.longest_tiles:
        return "longest_first"
    return facts.causal if shape.causal else "ascending"
