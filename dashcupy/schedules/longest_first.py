"""kv tiles in three blocks, the longest first; inside a block as in ``shortest_first``.

Causal mask only. In ``shortest_first`` nothing queues, for each kv tile starts on its own diagonal,
but the long kv tiles are left at the end, and CTAs idle then; here short ones are left. The next
block of a head has to follow its kv tiles at a distance, so the CTAs do the same block of other
heads in between (``chunk_size``), and a head all alone waits.
"""

from __future__ import annotations

from .shape import Shape

NAME = "longest_first"
MASKS = ("causal",)
DETERMINISTIC = True
DESCRIPTION = "three blocks of kv tiles, long ones first; inside a block as shortest_first"

_N_BLOCK = 3


def _block_size(shape: Shape) -> int:
    return max(1, -(-shape.num_active_kv_tiles() // _N_BLOCK))


def num_steps(shape: Shape, kv_tile: int) -> int:
    return shape.n_q - shape.first_q_tile(kv_tile)


def q_tile(shape: Shape, kv_tile: int, step: int) -> int:
    return shape.first_q_tile(kv_tile) + step


def num_contributors(shape: Shape, q_tile: int) -> int:
    return shape.num_kv_tiles(q_tile)


def _turn_block(shape: Shape, i: int, count: int) -> int:
    """Number ``i`` of ``count``, counted from the other end of its block."""
    size = _block_size(shape)
    first = i // size * size
    return first + min(first + size, count) - 1 - i


def ticket(shape: Shape, kv_tile: int, q_tile: int) -> int:
    return _turn_block(shape, kv_tile, num_contributors(shape, q_tile))


def num_work(shape: Shape) -> int:
    return shape.n_kv


def work_size(shape: Shape, work: int) -> int:
    return 1


def kv_tile(shape: Shape, work: int, part: int) -> int:
    return _turn_block(shape, work, num_work(shape))


def team_size(shape: Shape) -> int:
    return 1


def chunk_size(shape: Shape) -> int:
    return _block_size(shape)
