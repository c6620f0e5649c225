"""Tiles, stages and warpgroups of the Hopper kernels (compute capability 9.0)."""

from __future__ import annotations

from dataclasses import dataclass

from .backward_table import BACKWARD_TABLE
from .problem import Problem

TARGET = (9, 0)
MAX_HEAD_DIM = 256
WARPGROUP_ROWS = 64
_PANEL_COLUMNS = 64
_SMEM_ALIGNMENT = 1024

# Scales for which lse / scale, and what hides a key, stay inside float32 (tile/row_values.cuh).
BACKWARD_SCALES = (2.0**-20, 2.0**20)
_BATCH_STEPS, _N_BATCH = 8, 4
_BATCHES_BYTES = _N_BATCH * (16 * _BATCH_STEPS + 4 * 11)
ROW_VALUE_BYTES = 16

# By columns of a tile: (kv_tile, consumer warpgroups, stages of k and of v, stages of q,
# exponentials that run before P v of the tile before is waited for, reason).
_FORWARD_TILES = {
    64: (128, 3, 4, 2, 0, "three warpgroups take turns at the tensor cores: exponentials are the "
                          "limit"),
    96: (128, 2, 2, 2, 32, "as head_dim 128"),
    128: (128, 2, 2, 2, 32, "two warpgroups take turns at the tensor cores; q twice, so that the "
                            "next q tile overlaps the last"),
    192: (96, 2, 2, 1, 0, "two stages fit beside one q tile; larger kv tiles are not tried yet"),
    256: (80, 2, 2, 1, 0, "the largest kv tile of which two stages fit"),
}
# With the causal mask the first q tiles of a sequence are done too soon to hide how the next one
# comes: where two warpgroups leave room, q has a stage more.
_CAUSAL_Q_STAGES = {96: 3, 128: 3}
# The same by columns for causal masks over few keys, where the diagonal is a large part.
_SHORT_KV_LEN = 1024
_SHORT_CAUSAL_TILES = {
    64: (128, 2, 4, 3, 0, f"causal and at most {_SHORT_KV_LEN} keys: q tiles of 128 rows leave "
                          f"less beyond the diagonal than those of three warpgroups"),
}


@dataclass(frozen=True)
class _Storage:
    """What SharedStorage of a backward holds beside q, dout, dq and batches.

    Parameters
    ----------
    kv_tiles
        Of the size of k, k and v among them.
    score_tiles
        Of the size of P or dS.
    row_value_bytes
        What a q row has of lse and delta.
    barriers
        Beside those that all have, with the stages of its loop.
    more_q_tiles
        Of the size of q, beside the stages.
    more_bytes
        Whatever else.
    """

    kv_tiles: float
    score_tiles: int
    row_value_bytes: int
    barriers: int
    more_q_tiles: float = 0
    more_bytes: int = 0


_LSE_AND_DELTA_BYTES, _STEPS_LEFT_BYTES = 2 * 4, 4 * _N_BATCH
_STORAGES = {
    # k and v twice, dk and dv; P and dS of two warpgroups.
    "bwd_sm90_d64": _Storage(6, 4, _LSE_AND_DELTA_BYTES, 24, more_bytes=_STEPS_LEFT_BYTES),
    # dS twice.
    "bwd_sm90": _Storage(2, 2, ROW_VALUE_BYTES, 14),
    # P and dS twice.
    "bwd_sm90_d192": _Storage(2, 4, _LSE_AND_DELTA_BYTES, 21, more_bytes=_STEPS_LEFT_BYTES),
    # Half of k of the other CTA; P twice, dS and that of the other CTA; a third half of dout; the
    # work.
    "bwd_sm90_d256": _Storage(2.5, 4, _LSE_AND_DELTA_BYTES, 25, more_q_tiles=0.5,
                              more_bytes=_STEPS_LEFT_BYTES + 4),
}


@dataclass(frozen=True)
class BackwardLoop:
    """A main loop of the backward, for head_dims of up to ``head_dim_pad``.

    Parameters
    ----------
    kernel
        ``"bwd_sm90_d64"``, ``"bwd_sm90"``, ``"bwd_sm90_d192"`` or ``"bwd_sm90_d256"``.
    head_dim_pad
        Columns in the products; those from ``head_dim`` on are zeros.
    q_tile, kv_tile
        Rows of a tile.
    n_warp
        Warps of a CTA.
    q_stages, do_stages
        Tiles of q, and of dout, in shared memory.
    dq_slots
        q tiles of dq in shared memory; those that add from registers have none.
    result_rows
        Keys whose dk and dv a warpgroup stores at once.
    reason
        Why these.
    cluster
        CTAs that share a kv tile, each with an equal part of its rows.
    """

    kernel: str
    head_dim_pad: int
    q_tile: int
    kv_tile: int
    n_warp: int
    q_stages: int
    do_stages: int
    dq_slots: int
    result_rows: int
    reason: str
    cluster: int = 1

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA: SharedStorage of its layout."""
        row_bytes = 2 * _PANEL_COLUMNS * -(-self.head_dim_pad // _PANEL_COLUMNS)
        n_key = self.kv_tile // self.cluster
        q_bytes, kv_bytes = self.q_tile * row_bytes, n_key * row_bytes
        score_bytes = 2 * self.q_tile * n_key
        storage = _STORAGES[self.kernel]
        q_tiles = self.q_stages + self.do_stages + storage.more_q_tiles
        tiles = storage.kv_tiles * kv_bytes + q_tiles * q_bytes + storage.score_tiles * score_bytes
        dq_bytes = self.dq_slots * 4 * self.q_tile * self.head_dim_pad
        value_bytes = self.q_stages * self.q_tile * storage.row_value_bytes
        barriers = storage.barriers + 3 * _N_BATCH + 1  # of batches; turns_came
        total = (int(tiles) + dq_bytes + value_bytes + storage.more_bytes + _BATCHES_BYTES +
                 8 * barriers)
        return -(-total // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT


_BACKWARD_LOOPS = (
    BackwardLoop("bwd_sm90_d64", 64, 64, 128, 16, 4, 4, 0, 128,
                 "two warpgroups take the steps in turn, a third holds dk and dv of all keys in "
                 "registers"),
    *(BackwardLoop("bwd_sm90", pad, 64, 128, 12, 2, 2, 2, 64,
                   "two warpgroups hold dk and dv of 64 keys each in registers")
      for pad in (96, 128)),
    BackwardLoop("bwd_sm90_d192", 192, 64, 96, 16, 2, 2, 0, 96,
                 "one warpgroup makes the scores, two hold dk and dv of all keys in registers"),
    BackwardLoop("bwd_sm90_d256", 256, 64, 128, 16, 2, 1, 0, 64,
                 "two CTAs share a kv tile; in each one warpgroup makes the scores, two hold dk "
                 "and dv of 64 keys in registers", cluster=2),
)
BACKWARD_KERNELS = tuple(dict.fromkeys(loop.kernel for loop in _BACKWARD_LOOPS))


@dataclass(frozen=True)
class ForwardSm90Config:
    """How the Hopper forward is cut.

    Parameters
    ----------
    kernel
        ``"fwd_sm90"``.
    q_tile, kv_tile
        Rows of a tile.
    n_consumer
        Warpgroups that compute, 64 rows of the q tile each; one more loads and stores.
    head_dim_pad
        Columns in the products; those from ``head_dim`` on are zeros.
    stages, q_stages
        Tiles of k, and of v, and of q, in shared memory.
    early_exponentials
        Exponentials of a thread that run before the last product of P and v is waited for.
    fixed_reference
        Whether a row's maximum is followed in its first kv tiles only (and the q tile done again
        where that leaves the range of float32). Not for float16, whose range is 2^16.
    smem_bytes
        Dynamic shared memory of a CTA.
    reason
        Why these.
    """

    kernel: str
    q_tile: int
    kv_tile: int
    n_consumer: int
    head_dim_pad: int
    stages: int
    q_stages: int
    early_exponentials: int
    fixed_reference: bool
    smem_bytes: int
    reason: str

    @property
    def n_warp(self) -> int:
        """Warps of a CTA."""
        return 4 * (1 + self.n_consumer)


def forward_config(problem: Problem, smem_text: str) -> ForwardSm90Config:
    """The config of a forward that ``fwd_sm90`` serves: head_dim a multiple of 8 up to 256."""
    pad = next(columns for columns in _FORWARD_TILES if problem.head_dim <= columns)
    tiles = _FORWARD_TILES[pad]
    if problem.causal and problem.kv_len <= _SHORT_KV_LEN:
        tiles = _SHORT_CAUSAL_TILES.get(pad, tiles)
    kv_tile, n_consumer, stages, q_stages, early, reason = tiles
    if problem.causal:
        q_stages = _CAUSAL_Q_STAGES.get(pad, q_stages)
    return ForwardSm90Config(
        "fwd_sm90", WARPGROUP_ROWS * n_consumer, kv_tile, n_consumer, pad, stages, q_stages, early,
        problem.dtype == "bfloat16", forward_smem_bytes(kv_tile, n_consumer, pad, stages, q_stages),
        f"{smem_text}; {reason}")


def forward_smem_bytes(kv_tile: int, n_consumer: int, pad: int, stages: int,
                       q_stages: int) -> int:
    """Shared memory of fwd_sm90: SharedStorage in fwd_sm90_layout.cuh."""
    row_bytes = -(-pad // _PANEL_COLUMNS) * _PANEL_COLUMNS * 2
    tiles = (q_stages * n_consumer * WARPGROUP_ROWS + 2 * stages * kv_tile) * row_bytes
    saved_rows = 16 if q_stages == 1 else n_consumer * (128 * 8 + WARPGROUP_ROWS * 4)
    n_open = max(q_stages, 2)
    slots, barriers = 5 * 16, 8 * (4 * stages + 2 * q_stages + 2 * n_open + 2)
    flags = 4 * (2 * n_open + 2)
    total = tiles + saved_rows + slots + barriers + flags
    return -(-total // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT


def serves_backward(head_dim: int, scale: float) -> bool:
    """Whether a Hopper backward can do a problem of a dtype that GPUs can do.

    Those that take lse and delta as operands of a product are limited to some scales.
    """
    if head_dim > MAX_HEAD_DIM:
        return False
    least, most = BACKWARD_SCALES
    return (not BACKWARD_TABLE[backward_loop(head_dim).kernel].row_values
            or least <= scale <= most)


def backward_loop(head_dim: int) -> BackwardLoop:
    """The main loop of a backward that `serves_backward`."""
    return next(loop for loop in _BACKWARD_LOOPS if head_dim <= loop.head_dim_pad)
