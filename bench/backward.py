"""Time the whole backward, all its launches: ``python -m bench.backward --help``."""

from __future__ import annotations

import argparse
import functools

from bench import cells, harness, peers, timing

# bfloat16 gradients of right kernels differ by 3e-3 to 5e-3 here.
TOLERANCE = 2e-2


def variants(cell: cells.Cell, options: argparse.Namespace) -> list[harness.Variant]:
    """Ours by schedule, and the peers, on the same q, k, v and dout."""
    import dashcupy

    q, k, v, dout = harness.draw(cell)
    out, lse = dashcupy.attention(q, k, v, causal=cell.causal, return_lse=True)
    found = []
    for name in _schedules(options.schedules, cell.causal):
        plan = dashcupy.attention_plan(q, k, v, causal=cell.causal, schedule=name)
        call = functools.partial(dashcupy.attention_backward, dout, q, k, v, out, lse,
                                 causal=cell.causal, schedule=name)
        timing.log(f"{cell.name}: ours[{name}] runs {plan.config.kernel}")
        found.append(harness.Variant("dashcupy", "deterministic", call, name, plan.schedule))
    for peer in options.peers:
        try:
            call = peers.backward(peer, dout, q, k, v, cell.causal)
        except RuntimeError as error:  # a peer that cannot run here must not stop the others
            timing.log(f"{peer}: {error}")
            continue
        found.append(harness.Variant(peer, peers.mode_of(peer), call))
    return found


def _schedules(text: str, causal: bool) -> list[str]:
    from dashcupy import schedules

    mask = "causal" if causal else "full"
    able = [name for name in schedules.names() if schedules.supports(name, mask)]
    if text == "all":
        return ["auto", *able]
    # A name that this mask cannot use is meant for the cells of the other mask.
    wanted = [name for name in text.split(",") if name]
    return [name for name in wanted if name == "auto" or schedules.get(name).NAME in able]


if __name__ == "__main__":
    harness.script("backward", variants, TOLERANCE)
