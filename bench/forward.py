"""Time the forward against FlashAttention-2 and cuDNN: ``python -m bench.forward --help``."""

from __future__ import annotations

import argparse

from bench import cells, harness, peers

# bfloat16 results of right kernels differ by 2e-3 to 4e-3 here.
TOLERANCE = 1e-2


def variants(cell: cells.Cell, options: argparse.Namespace) -> list[harness.Variant]:
    """Ours and the peers, on the same q, k and v."""
    import dashcupy

    q, k, v, _ = harness.draw(cell)
    found = [harness.Variant("dashcupy", "deterministic", lambda: dashcupy.attention(
        q, k, v, causal=cell.causal, return_lse=True))]
    for peer in options.peers:
        if peer != "fa2_det":  # no other forward than that of fa2
            found.append(harness.Variant(peer, peers.mode_of(peer),
                                         peers.forward(peer, q, k, v, cell.causal)))
    return found


if __name__ == "__main__":
    harness.script("forward", variants, TOLERANCE)
