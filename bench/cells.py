"""What is measured: the cells of the speed tables, their work in FLOPs, and how to choose some."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product

from dashcupy.errors import InvalidInputError
from dashcupy.problem import Problem

HIDDEN = 2048  # q heads * head_dim, at most
TOKENS = 16384  # batch * seqlen; one longer sequence has more
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LONG = (32768, 65536)
QUICK = ("d64-causal-2048", "d64-full-8192", "d128-causal-512", "d128-causal-4096",
         "d128-causal-16384", "d128-full-4096")


@dataclass(frozen=True)
class Cell:
    """One problem of the tables: self-attention in bfloat16.

    Parameters
    ----------
    head_dim, seqlen
        Elements of a row, rows of q and of k and v.
    causal
        Causal mask or none.
    q_per_kv
        q heads that share a kv head.
    """

    head_dim: int
    causal: bool
    seqlen: int
    q_per_kv: int = 1

    @property
    def name(self) -> str:
        """``d128-causal-4096``; ``long-`` and ``gqa4-`` come before it."""
        before = f"gqa{self.q_per_kv}-" if self.q_per_kv > 1 else ""
        before += "long-" if self.seqlen > TOKENS else ""
        return f"{before}d{self.head_dim}-{'causal' if self.causal else 'full'}-{self.seqlen}"

    @property
    def n_q_head(self) -> int:
        """Heads of q."""
        return HIDDEN // self.head_dim // self.q_per_kv * self.q_per_kv

    @property
    def n_kv_head(self) -> int:
        """Heads of k and v."""
        return self.n_q_head // self.q_per_kv

    @property
    def batch(self) -> int:
        """Sequences, so that all cells but the long ones have the same number of tokens."""
        return max(1, TOKENS // self.seqlen)

    @property
    def key(self) -> tuple:
        """The cell as `records.cell_of` has it."""
        return (self.head_dim, not self.causal, self.seqlen, self.seqlen, self.batch,
                self.n_q_head, self.n_kv_head)

    @property
    def problem(self) -> Problem:
        """The same as dashcupy sees it."""
        return Problem(self.batch, self.seqlen, self.seqlen, self.n_q_head, self.n_kv_head,
                       self.head_dim, "bfloat16", "causal" if self.causal else "full",
                       self.head_dim**-0.5)

    def flops(self, direction: str) -> float:
        """Floating-point operations that count, see `flops`."""
        return flops(direction, self.batch, self.n_q_head, self.seqlen, self.seqlen, self.head_dim,
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


# Those of the tables, and of the DASH paper.
ALL = tuple(Cell(*cell) for cell in product((64, 128), (True, False), LENGTHS))
# Measured when they are asked for by name.
EXTRA = (
    *(Cell(*cell) for cell in product((96, 192, 256), (True, False), LENGTHS)),
    *(Cell(*cell) for cell in product((64, 96, 128, 192, 256), (True, False), LONG)),
    *(Cell(*cell, 4) for cell in product((64, 128, 256), (True, False), (*LENGTHS, *LONG))),
)


def choose(patterns: str | None, quick: bool = False) -> list[Cell]:
    """Cells that match.

    Parameters
    ----------
    patterns
        Names with shell wildcards, separated by commas (``"d128-causal-*,gqa4-d64-full-512"``);
        None takes ``ALL``, or the few of ``QUICK``.
    quick
        Take ``QUICK`` when no pattern is given.

    Raises
    ------
    InvalidInputError
        A pattern matches nothing.
    """
    if patterns is None:
        return [cell for cell in ALL if not quick or cell.name in QUICK]
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    known = (*ALL, *EXTRA)
    for pattern in wanted:
        if not any(fnmatchcase(cell.name, pattern) for cell in known):
            raise InvalidInputError(
                f"no cell is called {pattern!r}; names look like d64-causal-512 (head_dim 64, 128, "
                f"96, 192, 256; causal, full; {', '.join(map(str, LENGTHS))}), "
                f"long-d128-full-{LONG[0]} ({', '.join(map(str, LONG))}) and gqa4-d128-causal-4096")
    return [cell for cell in known if any(fnmatchcase(cell.name, p) for p in wanted)]
