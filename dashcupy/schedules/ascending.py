"""Every kv tile visits its q tiles from first to last; kv tiles add in ascending order.

The plain order, and the baseline. With the full mask all kv tiles start on q tile 0. Those of a
head that start together queue for it once: each runs one turn later than the one before it.
"""

from __future__ import annotations

from .shape import Shape

NAME = "ascending"
MASKS = ("full", "causal")
DETERMINISTIC = True
DESCRIPTION = "q tiles first to last, kv tiles add in ascending order"


def num_steps(shape: Shape, kv_tile: int) -> int:
    return shape.n_q - shape.first_q_tile(kv_tile)


def q_tile(shape: Shape, kv_tile: int, step: int) -> int:
    return shape.first_q_tile(kv_tile) + step


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
