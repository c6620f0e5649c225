"""What ``schedule="auto"`` means."""

from __future__ import annotations

from .shape import Shape

# Heads with fewer kv tiles gain nothing from a team: measured on an H200 (bench/README.md).
_LEAST_TEAM_TILES = 8
# The most kv tiles of a wide head, with the full mask, for which a team is still the fastest.
_MOST_WIDE_TEAM_TILES = 128


def auto(shape: Shape, kernel: str = "") -> str:
    """Name of the schedule for a shape: a pure function, so that "auto" keeps its bits.

    Parameters
    ----------
    shape
    kernel
        Which kernel runs it: those of Hopper have preferences of their own.

    Notes
    -----
    Launch-ordered schedules (``team_size`` 1) cannot hang, however few CTAs are resident, and need
    no cooperative launch.

    * causal: ``descending`` starts the long kv tiles first, so that no CTA is left alone with a
      long one, and its kv tiles leave the last q tile one after another, each one step later.
    * full: ``ascending``; all kv tiles are equally long, so the order of works is all the same.
    * ``bwd_sm90``: teams, ``symmetric_shift`` and ``shift``, whose kv tiles never meet, where a
      head has kv tiles enough.
    * ``bwd_sm90_wide``: teams too, but for long heads with the full mask: q, dout and dq_accum of
      two do not fit L2, and CTAs that walk over the q tiles together read each but once.
    * ``bwd_sm90_d64``, causal: ``shortest_first``. Its steps are half as long, so that a turn takes
      almost two of them; the kv tiles of ``shortest_first`` begin two q tiles apart.
    """
    n_kv = shape.num_active_kv_tiles()
    if kernel == "bwd_sm90" and n_kv >= _LEAST_TEAM_TILES:
        return "symmetric_shift" if shape.causal else "shift"
    if kernel == "bwd_sm90_wide" and n_kv >= _LEAST_TEAM_TILES:
        if shape.causal:
            return "symmetric_shift"
        return "shift" if n_kv <= _MOST_WIDE_TEAM_TILES else "ascending"
    if kernel == "bwd_sm90_d64" and shape.causal:
        return "shortest_first"
    return "descending" if shape.causal else "ascending"
