"""No order: parts of dq are added as they come, which changes bits from run to run.

It exists to measure what an order costs. Every kv tile goes round its q tiles backwards, each from
another start, so that few add into the same dq at a time. ``auto`` never means it, and ``names``
leaves it out. Nobody waits for its tickets.
"""

from __future__ import annotations

from .shape import Shape

NAME = "unordered"
MASKS = ("full", "causal")
DETERMINISTIC = False
DESCRIPTION = "no order: atomic adds, not deterministic, to measure the price of an order"
_STEPS_APART = 2


def num_steps(shape: Shape, kv_tile: int) -> int:
    return shape.n_q - shape.first_q_tile(kv_tile)


def q_tile(shape: Shape, kv_tile: int, step: int) -> int:
    return shape.n_q - 1 - (step + _STEPS_APART * kv_tile) % num_steps(shape, kv_tile)


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
