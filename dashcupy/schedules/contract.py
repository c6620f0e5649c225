"""What a schedule must define; ``cuda_src/schedules/contract.cuh`` declares the same functions."""

from __future__ import annotations

from typing import Protocol

from .shape import Shape


class Schedule(Protocol):
    """One schedule, as a module of pure integer functions of the shape.

    A *kv tile* visits its q tiles one after another, and adds a part to the dq of each. The
    *ticket* is its turn in that sum. A *work* is what a CTA takes at once: one kv tile, or a few
    that it does in turn.
    """

    NAME: str
    MASKS: tuple[str, ...]  # of "full" and "causal"; causal covers both alignments
    DETERMINISTIC: bool  # whether tickets are waited for; only "unordered" does not
    DESCRIPTION: str  # one line

    def num_steps(self, shape: Shape, kv_tile: int) -> int:
        """q tiles that this kv tile visits, of one q head."""

    def q_tile(self, shape: Shape, kv_tile: int, step: int) -> int:
        """The q tile at a step, 0 <= step < num_steps."""

    def ticket(self, shape: Shape, kv_tile: int, q_tile: int) -> int:
        """Turn of this kv tile in the sum of dq of that q tile: 0 .. num_contributors - 1."""

    def num_contributors(self, shape: Shape, q_tile: int) -> int:
        """kv tiles that add into the dq of this q tile."""

    def num_work(self, shape: Shape) -> int:
        """Works of one head."""

    def work_size(self, shape: Shape, work: int) -> int:
        """kv tiles in this work."""

    def kv_tile(self, shape: Shape, work: int, part: int) -> int:
        """The kv tile at a part of this work, 0 <= part < work_size."""

    def team_size(self, shape: Shape) -> int:
        """Works in a row, of one head, that wait for one another: all must be resident.

        1 = a work waits only for works of its head with a lower number.
        """

    def chunk_size(self, shape: Shape) -> int:
        """Works in a row of one head, at least ``team_size``, that come before later ones of any.

        All works of a head, unless it is a team, or gains if other heads come in between (see
        ``order``).
        """
