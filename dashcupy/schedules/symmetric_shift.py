"""A CTA does a long kv tile, then the short one that evens it out; causal mask only.

Work k is the pair of kv tiles k (long) and n - 1 - k (short), n being the kv tiles that any row
sees; an odd one in the middle stays alone. A team of works

1. goes round the q tiles that all its long tiles see, as ``shift`` does,
2. then does what is left of the long tiles, each from its diagonal on,
3. then the short tiles, from the last q tile back to the diagonal.

In all three no two members are on the same q tile at the same step (whole tiles). kv tiles that
no row sees come last, as works of their own with no step: their gradients are zero.
"""

from __future__ import annotations

from typing import NamedTuple

from .order import balanced_chunk
from .shape import Shape

NAME = "symmetric_shift"
MASKS = ("causal",)
DETERMINISTIC = True
DESCRIPTION = "pairs of a long and a short kv tile: cyclic, then the diagonal, then the short tile"


class _Team(NamedTuple):
    first: int  # pairs of the head in earlier teams
    size: int  # pairs in this team
    member: int  # which of them
    rect_begin: int  # first q tile that all long tiles of the team see
    rect_size: int  # q tiles from there on


def _num_pairs(shape: Shape) -> int:
    return (shape.num_active_kv_tiles() + 1) // 2


def _is_long(shape: Shape, kv_tile: int) -> bool:
    return kv_tile < _num_pairs(shape)


def _team(shape: Shape, kv_tile: int) -> _Team:
    n_active = shape.num_active_kv_tiles()
    pair = kv_tile if _is_long(shape, kv_tile) else n_active - 1 - kv_tile
    chunk = chunk_size(shape)
    first = pair // chunk * chunk
    size = min(chunk, _num_pairs(shape) - first)
    rect_begin = shape.first_q_tile(first + size - 1)
    return _Team(first, size, pair - first, rect_begin, shape.n_q - rect_begin)


def num_steps(shape: Shape, kv_tile: int) -> int:
    return shape.n_q - shape.first_q_tile(kv_tile)


def q_tile(shape: Shape, kv_tile: int, step: int) -> int:
    if not _is_long(shape, kv_tile):
        return shape.n_q - 1 - step
    team = _team(shape, kv_tile)
    if step >= team.rect_size:
        return shape.first_q_tile(kv_tile) + step - team.rect_size
    row = team.member * team.rect_size // team.size + step
    return team.rect_begin + (row - team.rect_size if row >= team.rect_size else row)


def ticket(shape: Shape, kv_tile: int, q_tile: int) -> int:
    team = _team(shape, kv_tile)
    n_active = shape.num_active_kv_tiles()
    n_kv = num_contributors(shape, q_tile)
    n_long = min(team.size, n_kv - team.first)
    before = min(team.first, n_kv) + max(0, n_kv - (n_active - team.first))  # by earlier teams
    if not _is_long(shape, kv_tile):
        # The last pair of an odd number has no short tile.
        n_short = team.size - (2 * (team.first + team.size) > n_active)
        return before + n_long + n_short - 1 - team.member
    if q_tile < team.rect_begin:
        return before + n_long - 1 - team.member
    leader = ((q_tile - team.rect_begin + 1) * team.size - 1) // team.rect_size
    turn = leader - team.member
    return before + (turn + team.size if turn < 0 else turn)


def num_contributors(shape: Shape, q_tile: int) -> int:
    return shape.num_kv_tiles(q_tile)


def num_work(shape: Shape) -> int:
    return _num_pairs(shape) + shape.n_kv - shape.num_active_kv_tiles()


def work_size(shape: Shape, work: int) -> int:
    return 2 if 2 * work + 1 < shape.num_active_kv_tiles() else 1


def kv_tile(shape: Shape, work: int, part: int) -> int:
    n_active, n_pair = shape.num_active_kv_tiles(), _num_pairs(shape)
    if work >= n_pair:
        return n_active + work - n_pair
    return n_active - 1 - work if part else work


def team_size(shape: Shape) -> int:
    return chunk_size(shape)


def chunk_size(shape: Shape) -> int:
    return balanced_chunk(_num_pairs(shape))
