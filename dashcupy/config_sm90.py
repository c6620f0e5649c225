"""Tiles, stages and warpgroups of the Hopper kernels (compute capability 9.0)."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem

TARGET = (9, 0)
MAX_HEAD_DIM = 256
WARPGROUP_ROWS = 64
_PANEL_COLUMNS = 64
_SMEM_ALIGNMENT = 1024

# The backward: two main loops of the same tiles, by columns of a tile: (kernel, warps, stages of q
# and of dout, reason).
BACKWARD_Q_TILE, BACKWARD_KV_TILE = 64, 128
BACKWARD_LOOPS = {
    64: ("bwd_sm90_d64", 16, 4, "two warpgroups take the steps in turn, a third holds dk and dv of "
                                "all keys in registers"),
    128: ("bwd_sm90", 12, 2, "two warpgroups hold dk and dv of 64 keys each in registers"),
}
BACKWARD_KERNELS = tuple(loop[0] for loop in BACKWARD_LOOPS.values())
# Scales for which lse / scale, and what hides a key, stay inside float32 (tile/row_values.cuh).
_ROW_VALUE_SCALES = (2.0**-20, 2.0**20)
_BATCH_STEPS, _N_BATCH = 8, 4
_BATCHES_BYTES = _N_BATCH * (16 * _BATCH_STEPS + 4 * 12)
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
    slots, barriers = 4 * 16, 8 * (4 * stages + 2 * q_stages + 2 * n_open)
    flags = 4 * (2 * n_open + 1)
    total = tiles + saved_rows + slots + barriers + flags
    return -(-total // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT


def serves_backward(problem: Problem) -> bool:
    """Whether a Hopper backward can do a problem of a dtype that GPUs can do.

    That of head_dim 128 takes lse and delta as operands of a product, which limits the scale; that
    of head_dim up to 64 pads columns with zeros as it loads.
    """
    least, most = _ROW_VALUE_SCALES
    return problem.head_dim <= 64 or (problem.head_dim == 128 and least <= problem.scale <= most)


def backward_smem_bytes(pad: int) -> int:
    """Shared memory of a Hopper backward: SharedStorage in its layout."""
    q_tile, kv_tile, stages = BACKWARD_Q_TILE, BACKWARD_KV_TILE, BACKWARD_LOOPS[pad][2]
    q_bytes, kv_bytes, score_bytes = 2 * q_tile * pad, 2 * kv_tile * pad, 2 * q_tile * kv_tile
    if pad == 64:
        # k and v twice; q, dout, lse and delta; P and dS of two warpgroups; dk and dv.
        tiles = (4 * kv_bytes + stages * (2 * q_bytes + 2 * 4 * q_tile) + 4 * score_bytes
                 + 2 * kv_bytes)
        barriers = 2 * stages + 2 * 2 + 4 * 2 + 2 * _N_BATCH + 1
    else:
        # k and v; q and dout, dS, the part of dq, row values.
        tiles = 2 * kv_bytes + stages * (2 * q_bytes + score_bytes + 4 * q_tile * pad
                                         + q_tile * ROW_VALUE_BYTES)
        barriers = 6 * stages + 3 + 2 * _N_BATCH + 1
    total = tiles + _BATCHES_BYTES + 8 * barriers
    return -(-total // _SMEM_ALIGNMENT) * _SMEM_ALIGNMENT
