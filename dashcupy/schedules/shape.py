"""Tile counts and mask of one head: all that a schedule may depend on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One head cut into tiles.

    A schedule is a function of this value alone: never of batch, heads, SM count or load. The
    same arithmetic stands in ``cuda_src/schedules/shape.cuh``.

    Parameters
    ----------
    q_len, kv_len
        Rows of q and of k, v.
    q_rows, kv_rows
        Rows of one q tile and of one kv tile (``Q_TILE`` and ``KV_TILE`` of the kernel).
    causal, offset
        With ``causal``, row i sees key j iff ``j <= i + offset``; else every row sees every key.
    """

    q_len: int
    kv_len: int
    q_rows: int
    kv_rows: int
    causal: bool = False
    offset: int = 0

    @property
    def n_q(self) -> int:
        """q tiles of the head."""
        return -(-self.q_len // self.q_rows)

    @property
    def n_kv(self) -> int:
        """kv tiles of the head."""
        return -(-self.kv_len // self.kv_rows)

    def first_q_tile(self, kv_tile: int) -> int:
        """First q tile with a row that sees a key of ``kv_tile``; ``n_q`` if there is none.

        Every later q tile sees the kv tile too.
        """
        if not self.causal:
            return 0
        first_row = max(0, kv_tile * self.kv_rows - self.offset)
        return first_row // self.q_rows if first_row < self.q_len else self.n_q

    def num_kv_tiles(self, q_tile: int) -> int:
        """kv tiles with a key that a row of ``q_tile`` sees: tiles 0 .. the result - 1."""
        if not self.causal:
            return self.n_kv
        last_key = min((q_tile + 1) * self.q_rows, self.q_len) - 1 + self.offset
        return min(self.n_kv, last_key // self.kv_rows + 1) if last_key >= 0 else 0

    def num_active_kv_tiles(self) -> int:
        """kv tiles that some row sees: tiles 0 .. the result - 1."""
        return self.num_kv_tiles(self.n_q - 1) if self.n_q else 0

    @classmethod
    def from_counts(cls, n_q: int, n_kv: int, causal: bool = False, stride: int = 1) -> Shape:
        """Whole tiles, ``stride`` q tiles to the height of a kv tile, bottom-right aligned."""
        q_rows, kv_rows = 1, stride
        return cls(n_q * q_rows, n_kv * kv_rows, q_rows, kv_rows, causal,
                   n_kv * kv_rows - n_q * q_rows if causal else 0)
