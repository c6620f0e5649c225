"""Time the forward and that of the peers: ``python -m bench.forward --help``."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping

from dashcupy.plan import Plan

from . import cells, harness, peers


def variants(cell: cells.Cell, options: argparse.Namespace,
             plans: Mapping[str | None, Plan]) -> list[harness.Variant]:
    """Ours and the peers, on the same q, k and v."""
    import dashcupy

    q, k, v, _ = harness.draw(cell)
    call = functools.partial(dashcupy.attention, q, k, v, causal=cell.causal, return_lse=True)
    found = [harness.Variant("dashcupy", "deterministic", call, plan=plan)
             for plan in plans.values()]
    return found + harness.peer_variants(
        cell, options.peers,
        lambda peer: peers.forward(peer, q, k, v, cell.causal, options.triton))


# bfloat16 results of right kernels differ by 2e-3 to 4e-3 here.
FORWARD = harness.Direction("forward", lambda cell, options: [None], variants, 1e-2)


def main(arguments: list[str] | None = None) -> int:
    """Entry of the script; returns its exit status."""
    options = harness.parser("forward", "Time the forward on one GPU.").parse_args(arguments)
    _, bad = harness.run(FORWARD, options)
    return int(bad)


if __name__ == "__main__":
    harness.script(main)
