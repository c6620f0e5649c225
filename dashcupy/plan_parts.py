"""What plans are made of: launches, parts of the workspace, the config block that kernels share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .config import Config
from .params import n_bytes
from .problem import Problem

_ALIGNMENT = 256  # bytes, of every region of the workspace


@dataclass(frozen=True)
class KernelPlan:
    """One launch.

    Parameters
    ----------
    kernel
        Stem of its ``.cu``.
    defines
        Config block, as sorted (name, value) pairs.
    grid, grid_text
        CTAs, and how they are counted. For a ``persistent`` kernel: pieces of work, of which
        as many CTAs, or clusters of them, as are resident take one after another.
    threads, smem_bytes
        Threads and dynamic shared memory of a CTA.
    params, maps
        Which struct it takes, and which struct of tensor maps as a second one (None: no second):
        keys of ``params.FIELDS``.
    persistent, cooperative
        Whether the grid is cut to the resident CTAs; whether they must run at the same time.
    cluster
        CTAs that do a piece of work together: a cluster.
    early
        Whether it may start before the kernel before it has ended, whose results it waits for by
        itself.
    counter
        Whether the CTAs take their work from a counter of the launch's own (``counters.py``).
    copies
        For ``copy_rows``: what it reads and writes, by the names of ``params.ARRAYS`` and
        ``params.WORKSPACE``.
    """

    kernel: str
    defines: tuple[tuple[str, int | str], ...]
    grid: int
    grid_text: str
    threads: int
    smem_bytes: int
    params: str
    maps: str | None = None
    persistent: bool = False
    cluster: int = 1
    cooperative: bool = False
    early: bool = False
    counter: bool = False
    copies: tuple[str, str] | None = None


@dataclass(frozen=True)
class Region:
    """A named part of the workspace: bytes [offset, offset + n_bytes)."""

    name: str
    offset: int
    n_bytes: int
    text: str


def lay_out(wanted: Mapping[str, tuple[int, str]]) -> tuple[Region, ...]:
    """Regions one after another, from (bytes, text) by name."""
    regions, end = [], 0
    for name, (size, text) in wanted.items():
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        regions.append(Region(name, offset, size, text))
        end = offset + size
    return tuple(regions)


def shared_defines(problem: Problem, config: Config, params: str) -> dict[str, int | str]:
    """The part of the config block that all kernels have."""
    return {
        "DC_HEAD_DIM": problem.head_dim,
        "DC_HEAD_DIM_PAD": config.head_dim_pad,
        "DC_Q_TILE": config.q_tile,
        "DC_KV_TILE": config.kv_tile,
        "DC_CAUSAL": int(problem.causal),
        "DC_BF16": int(problem.dtype == "bfloat16"),
        "DC_PARAMS_BYTES": n_bytes(params),
    }


def pairs(defines: Mapping[str, int | str]) -> tuple[tuple[str, int | str], ...]:
    """A config block in one order, whatever order it was written in."""
    return tuple(sorted(defines.items()))
