"""Every kv tile visits its q tiles from last to first; kv tiles add in ascending order.

For the causal mask: works start with the long kv tiles of all heads, which keeps the CTAs equally
busy. All kv tiles start on the last q tile; those of a head that start together queue for it once.
"""

from __future__ import annotations

from .shape import Shape

NAME = "descending"
MASKS = ("full", "causal")
DETERMINISTIC = True
DESCRIPTION = "q tiles last to first, kv tiles add in ascending order"


def num_steps(shape: Shape, kv_tile: int) -> int:
    return shape.n_q - shape.first_q_tile(kv_tile)


def q_tile(shape: Shape, kv_tile: int, step: int) -> int:
    return shape.n_q - 1 - step


def ticket(shape: Shape, kv_tile: int, q_tile: int) -> int:
    return kv_tile


def num_contributors(shape: Shape, q_tile: int) -> int:
    return shape.num_kv_tiles(q_tile)


def num_work(shape: Shape) -> int:
    return shape.n_kv


def work_size(shape: Shape, work: int) -> int:
    return 1


def kv_tile(shape: Shape, work: int, part: int) -> int:
    return work


def team_size(shape: Shape) -> int:
    return 1


def chunk_size(shape: Shape) -> int:
    return max(1, num_work(shape))
