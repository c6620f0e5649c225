"""Time the whole backward, all its launches: ``python -m bench.backward --help``."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping

from dashcupy.plan import Plan

from . import cells, harness, ours, peers


def variants(cell: cells.Cell, options: argparse.Namespace,
             plans: Mapping[str | None, Plan]) -> list[harness.Variant]:
    """Ours by schedule, and the peers, on the same q, k, v and dout."""
    import dashcupy

    q, k, v, dout = harness.draw(cell)
    out, lse = dashcupy.attention(q, k, v, causal=cell.causal, return_lse=True)
    found = []
    for name, plan in plans.items():
        mode = "deterministic" if ours.is_deterministic(name) else "default"
        call = functools.partial(dashcupy.attention_backward, dout, q, k, v, out, lse,
                                 causal=cell.causal, schedule=name)
        found.append(harness.Variant("dashcupy", mode, call, name, plan))
    return found + harness.peer_variants(
        cell, options.peers,
        lambda peer: peers.backward(peer, dout, q, k, v, cell.causal, options.triton))


# bfloat16 gradients of right kernels differ by 3e-3 to 5e-3 here.
BACKWARD = harness.Direction(
    "backward", lambda cell, options: ours.chosen_schedules(options.schedules, cell.causal),
    variants, 2e-2)


def main(arguments: list[str] | None = None) -> int:
    """Entry of the script; returns its exit status."""
    options = harness.parser("backward", "Time the backward on one GPU.",
                             schedules="auto").parse_args(arguments)
    _, bad = harness.run(BACKWARD, options)
    return int(bad)


if __name__ == "__main__":
    harness.script(main)
