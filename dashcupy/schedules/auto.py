"""What ``schedule="auto"`` means."""

from __future__ import annotations

from .shape import Shape


def auto(shape: Shape) -> str:
    """Name of the schedule for a shape: a pure function, so that "auto" keeps its bits.

    Only launch-ordered schedules (``team_size`` 1) stand here: they cannot hang, however few
    CTAs are resident, and need no cooperative launch.

    * causal: ``descending`` starts the long kv tiles first, so that no CTA is left alone with a
      long one, and its kv tiles leave the last q tile one after another, each one step later.
    * full: ``ascending``; all kv tiles are equally long, so the order of works is all the same.
    """
    return "descending" if shape.causal else "ascending"
