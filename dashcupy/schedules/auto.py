"""What ``schedule="auto"`` means."""

from __future__ import annotations

from .shape import Shape

# Heads with fewer kv tiles gain nothing from a team: measured on an H200 (bench/README.md).
_LEAST_TEAM_TILES = 8


def auto(shape: Shape, teams: bool = False) -> str:
    """Name of the schedule for a shape: a pure function, so that "auto" keeps its bits.

    Parameters
    ----------
    shape
    teams
        Whether the kernel is one that teams make faster: those of Hopper.

    Notes
    -----
    Without teams only launch-ordered schedules (``team_size`` 1) come into question: they cannot
    hang, however few CTAs are resident, and need no cooperative launch.

    * causal: ``descending`` starts the long kv tiles first, so that no CTA is left alone with a
      long one, and its kv tiles leave the last q tile one after another, each one step later. With
      teams ``symmetric_shift``, whose kv tiles never meet.
    * full: ``ascending``; all kv tiles are equally long, so the order of works is all the same.
      With teams ``shift``.
    """
    if teams and shape.num_active_kv_tiles() >= _LEAST_TEAM_TILES:
        return "symmetric_shift" if shape.causal else "shift"
    return "descending" if shape.causal else "ascending"
