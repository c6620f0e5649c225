"""Random problems and random mistakes, drawn by hypothesis, for CPU and GPU alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from dashcupy import schedules

_LEAST_ROWS = 48
# The draws depend on this number alone; another one gives other problems.
SEED = int(os.environ.get("DASHCUPY_FUZZ_SEED", "1"))
# hypothesis (from 6.132 on, by a name of its own) also draws numbers that it finds in the source of
# whatever this process has imported so far: a failure among all tests would not come back alone.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = providers.Constants


def keeper(config) -> Callable[[object], None]:
    """Puts the problem in hand where one finds it after a hang, which ends the process."""
    print(f"DASHCUPY_FUZZ_SEED={SEED}")
    cache = getattr(config, "cache", None)  # none under -p no:cacheprovider
    return lambda problem: cache.set("dashcupy/fuzz", repr(problem)) if cache else None


@dataclass(frozen=True)
class RandomProblem:
    """One problem; inputs are normal numbers times ``factor``, laid out as ``layouts`` says."""

    batch: int
    q_len: int
    kv_len: int
    n_q_head: int
    n_kv_head: int
    head_dim: int
    dtype: str
    mask: str
    schedule: str
    scale: float | None
    factor: float
    layouts: tuple[str, str, str, str]  # of q, k, v, dout
    seed: int


def lengths(tiles: Sequence[int], most: int) -> st.SearchStrategy[int]:
    """Often at the edge of a tile, where kernels go wrong; 0 and 1 among them."""
    edges = {0, 1, *(n * tile + d for tile in tiles for n in (1, 2, 3) for d in (-1, 0, 1))}
    return st.sampled_from(sorted(x for x in edges if x <= most)) | st.integers(0, most)


@st.composite
def problems(draw, kinds: Sequence[tuple[int, str]], tiles: Sequence[int], most: int,
             layouts: Sequence[str],
             orders: Sequence[str] = (*schedules.names(), "auto")) -> RandomProblem:
    """Legal problems: (head_dim, dtype) out of ``kinds``, lengths up to ``most`` rows.

    Errors are judged by those of the plain formula, which say little when they come from a few
    rows, or from rows that a single key takes: so short problems come in batches, and large inputs
    without a large scale.
    """
    head_dim, dtype = draw(st.sampled_from(kinds))
    mask = draw(st.sampled_from(("full", "causal", "causal_top_left")))
    n_kv_head = draw(st.integers(1, 3))
    length = lengths(tiles, most)
    q_len = draw(length)
    kv_len = draw(st.just(q_len) | length)
    n_q_head = n_kv_head * draw(st.integers(1, 4))
    n_row = max(1, min(q_len, kv_len)) * n_q_head
    scale = draw(st.none() | st.sampled_from((0.03, 0.25, 1.0)))
    return RandomProblem(
        batch=draw(st.sampled_from((1, 1, 2, 3, 0))) * -(-_LEAST_ROWS // n_row), q_len=q_len,
        kv_len=kv_len, n_q_head=n_q_head, n_kv_head=n_kv_head, head_dim=head_dim, dtype=dtype,
        mask=mask,
        schedule=draw(st.sampled_from([name for name in orders if name == "auto"
                                       or schedules.supports(name, mask)])),
        scale=scale, factor=draw(st.sampled_from((1.0, 0.1) if scale else (1.0, 0.1, 3.0))),
        layouts=tuple(draw(st.sampled_from(layouts)) for _ in range(4)),
        seed=draw(st.integers(0, 2**31 - 1)))
