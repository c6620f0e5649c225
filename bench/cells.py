"""What is measured: the cells of the speed tables, their work in FLOPs, and how to choose some."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

HIDDEN = 2048  # heads * head_dim
TOKENS = 16384  # batch * seqlen
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK = ("d64-causal-2048", "d64-full-8192", "d128-causal-512", "d128-causal-4096",
         "d128-causal-16384", "d128-full-4096")


@dataclass(frozen=True)
class Cell:
    """One problem of the tables: self-attention, as many kv heads as q heads.

    Parameters
    ----------
    head_dim, seqlen
        Elements of a row, rows of q and of k and v.
    causal
        Causal mask or none.
    """

    head_dim: int
    causal: bool
    seqlen: int

    @property
    def name(self) -> str:
        """``d128-causal-4096``."""
        return f"d{self.head_dim}-{'causal' if self.causal else 'full'}-{self.seqlen}"

    @property
    def n_head(self) -> int:
        """Heads of q, k and v."""
        return HIDDEN // self.head_dim

    @property
    def batch(self) -> int:
        """Sequences, so that all cells have the same number of tokens."""
        return TOKENS // self.seqlen

    def flops(self, direction: str) -> float:
        """Floating-point operations that count, see `flops`."""
        return flops(direction, self.batch, self.n_head, self.seqlen, self.seqlen, self.head_dim,
                     self.causal)


def flops(direction: str, batch: int, n_q_head: int, q_len: int, kv_len: int, head_dim: int,
          causal: bool) -> float:
    """The one FLOP formula of all tables.

    Two matrix products of 2 * q_len * kv_len * head_dim in the forward, five in the backward
    (2.5 times as much); half of it with the causal mask, whatever a kernel really computes.

    Parameters
    ----------
    direction
        ``"forward"`` or ``"backward"``.

    Returns
    -------
    float
        FLOPs of one call.
    """
    factor = {"forward": 1.0, "backward": 2.5}[direction]
    return factor * 4.0 * batch * n_q_head * q_len * kv_len * head_dim * (0.5 if causal else 1.0)


ALL = tuple(Cell(head_dim, causal, seqlen)
            for head_dim in (64, 128) for causal in (True, False) for seqlen in LENGTHS)


def choose(patterns: str | None, quick: bool = False) -> list[Cell]:
    """Cells that match.

    Parameters
    ----------
    patterns
        Names with shell wildcards, separated by commas (``"d128-causal-*,d64-full-512"``);
        None takes all, or the few of ``QUICK``.
    quick
        Take ``QUICK`` when no pattern is given.

    Raises
    ------
    ValueError
        A pattern matches nothing.
    """
    if patterns is None:
        return [cell for cell in ALL if not quick or cell.name in QUICK]
    wanted = [pattern.strip() for pattern in patterns.split(",") if pattern.strip()]
    for pattern in wanted:
        if not any(fnmatchcase(cell.name, pattern) for cell in ALL):
            raise ValueError(f"no cell is called {pattern!r}; names look like {ALL[0].name!r} "
                             f"(head_dim 64, 128; causal, full; "
                             f"{', '.join(map(str, LENGTHS))})")
    return [cell for cell in ALL if any(fnmatchcase(cell.name, p) for p in wanted)]
