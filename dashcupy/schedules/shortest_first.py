"""Every kv tile visits its q tiles from first to last; kv tiles add in descending order.

With the causal mask kv tile i starts on its own diagonal, so no two kv tiles of a head are on the
same q tile at the same step: nothing queues. The price is that the long kv tiles start last. What
FlashAttention-3 and -4 call SPT, shortest processing time first.
"""

from __future__ import annotations

from .shape import Shape

NAME = "shortest_first"
MASKS = ("full", "causal")
DETERMINISTIC = True
DESCRIPTION = "q tiles first to last, kv tiles add in descending order, short works first"


def num_steps(shape: Shape, kv_tile: int) -> int:
    return shape.n_q - shape.first_q_tile(kv_tile)


def q_tile(shape: Shape, kv_tile: int, step: int) -> int:
    return shape.first_q_tile(kv_tile) + step


def ticket(shape: Shape, kv_tile: int, q_tile: int) -> int:
    return num_contributors(shape, q_tile) - 1 - kv_tile


def num_contributors(shape: Shape, q_tile: int) -> int:
    return shape.num_kv_tiles(q_tile)


def num_work(shape: Shape) -> int:
    return shape.n_kv


def work_size(shape: Shape, work: int) -> int:
    return 1


def kv_tile(shape: Shape, work: int, part: int) -> int:
    return shape.n_kv - 1 - work


def team_size(shape: Shape) -> int:
    return 1


def chunk_size(shape: Shape) -> int:
    return max(1, num_work(shape))
