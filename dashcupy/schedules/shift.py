"""Every kv tile starts at its own q tile and goes round; full mask only.

The kv tiles of a head start spread evenly over the q tiles, so that (with no fewer q tiles than
kv tiles) no two are on the same q tile at the same step and nothing queues. They wait for one
another in a ring, so a whole team must be resident. A head with more kv tiles than ``MAX_TEAM``
is cut into chunks, one team after another.
"""

from __future__ import annotations

from .order import balanced_chunk
from .shape import Shape

NAME = "shift"
MASKS = ("full",)
DETERMINISTIC = True
DESCRIPTION = "cyclic, kv tiles start spread over the q tiles; no two on one q tile at a step"


def _team(shape: Shape, kv_tile: int) -> tuple[int, int]:
    """First kv tile and number of kv tiles of the team of ``kv_tile``."""
    size = chunk_size(shape)
    first = kv_tile // size * size
    return first, min(size, shape.n_kv - first)


def num_steps(shape: Shape, kv_tile: int) -> int:
    return shape.n_q


def q_tile(shape: Shape, kv_tile: int, step: int) -> int:
    first, size = _team(shape, kv_tile)
    start = (kv_tile - first) * shape.n_q // size
    row = start + step
    return row - shape.n_q if row >= shape.n_q else row


def ticket(shape: Shape, kv_tile: int, q_tile: int) -> int:
    first, size = _team(shape, kv_tile)
    # The last member that starts at or before the q tile comes first, then the one before it, ...
    leader = ((q_tile + 1) * size - 1) // shape.n_q
    turn = leader - (kv_tile - first)
    return first + (turn + size if turn < 0 else turn)


def num_contributors(shape: Shape, q_tile: int) -> int:
    return shape.n_kv


def num_work(shape: Shape) -> int:
    return shape.n_kv


def work_size(shape: Shape, work: int) -> int:
    return 1


def kv_tile(shape: Shape, work: int, part: int) -> int:
    return work


def team_size(shape: Shape) -> int:
    return chunk_size(shape)


def chunk_size(shape: Shape) -> int:
    return balanced_chunk(num_work(shape))
