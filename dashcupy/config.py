"""Tiles, stages and warps: chosen from the problem and the compute capability, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from . import config_sm90, cpu
from .config_sm90 import ForwardSm90Config
from .errors import UnsupportedError
from .problem import Problem

Target = str | tuple[int, int]  # "cpu", or the (major, minor) of a compute capability

GPU_DTYPES = ("float16", "bfloat16")
MAX_HEAD_DIM = 128
# Shared memory that a CTA may ask for, by compute capability. Tiles follow from it, and bits from
# the tiles: so it is this table that counts, never what one GPU model reports.
SMEM_BYTES = {
    (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10,
    (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 1): 227 << 10, (10, 3): 227 << 10,
    (11, 0): 227 << 10, (12, 0): 99 << 10, (12, 1): 99 << 10,
}
# What every GPU from 8.0 on has, and so the choice for a capability that is not in the table.
_LEAST_SMEM_BYTES = 99 << 10
# STEP_RING of bwd_sm80: 128 steps of 32 bytes.
_STEP_RING_BYTES = 4096

# By head_dim_pad and shared memory of a CTA: (q_tile, kv_tile, warps, stages of k and of v, whether
# q stays in registers, CTAs that must fit an SM, reason).
_FORWARD_TILES = {
    (32, 99): (128, 64, 4, 2, False, 3, "3 CTAs an SM hide the softmax"),
    (32, 163): (128, 64, 4, 2, False, 3, "3 CTAs an SM hide the softmax"),
    (32, 227): (128, 64, 4, 2, False, 3, "3 CTAs an SM hide the softmax"),
    (64, 99): (128, 64, 4, 1, True, 2, "two stages would leave one CTA an SM"),
    (64, 163): (128, 64, 4, 2, True, 2, "a third CTA would not fit"),
    (64, 227): (128, 128, 4, 2, False, 2, "half the barriers of a kv tile of 64"),
    (96, 99): (128, 64, 8, 2, True, 1, "one CTA an SM fits: 8 warps of 16 rows in it"),
    (96, 163): (128, 64, 4, 2, False, 2, "2 CTAs an SM, one barrier a kv tile"),
    (96, 227): (128, 64, 4, 2, False, 2, "2 CTAs an SM, one barrier a kv tile"),
    (128, 99): (128, 64, 8, 1, True, 1, "one CTA an SM fits: 8 warps of 16 rows in it"),
    (128, 163): (128, 64, 4, 1, False, 2, "two stages would leave one CTA an SM"),
    (128, 227): (128, 64, 4, 2, False, 2, "2 CTAs an SM, one barrier a kv tile"),
}
# (q_tile, kv_tile, stages of q, stages of dout). Large tiles come before stages: a q tile that is
# read by half as many kv tiles halves the traffic of dq, a stage only hides a load.
_BACKWARD_TILES = {
    64: ((128, 128, 2, 2), (128, 128, 2, 1), (128, 128, 1, 1),
         (64, 128, 2, 2), (64, 128, 2, 1), (64, 128, 1, 1)),
    128: ((64, 128, 2, 2), (64, 128, 2, 1), (64, 128, 1, 1),
          (64, 64, 2, 2), (64, 64, 2, 1), (64, 64, 1, 1)),
}


@dataclass(frozen=True)
class ForwardConfig:
    """How the forward is cut.

    Parameters
    ----------
    kernel
        ``"fwd_sm80"``, or ``"cpu"`` for the NumPy backend.
    q_tile, kv_tile
        Rows of a tile.
    n_warp
        Warps of a CTA; 0 on the CPU.
    head_dim_pad
        Columns of a tile; those from ``head_dim`` on are zeros.
    stages
        Tiles of k, and of v, in flight; 0 on the CPU.
    q_registers
        Whether q stays in registers, instead of being read again for every kv tile.
    min_ctas
        CTAs for which the compiler must leave registers on an SM.
    smem_bytes
        Dynamic shared memory of a CTA.
    reason
        Why these.
    """

    kernel: str
    q_tile: int
    kv_tile: int
    n_warp: int
    head_dim_pad: int
    stages: int
    q_registers: bool
    min_ctas: int
    smem_bytes: int
    reason: str


@dataclass(frozen=True)
class BackwardConfig:
    """How the backward is cut; fields as in `ForwardConfig`.

    Parameters
    ----------
    kernel
        ``"bwd_sm80"``, ``"bwd_sm90"``, ``"bwd_sm90_d64"``, ``"bwd_sm90_d192"``,
        ``"bwd_sm90_d256"``, or ``"cpu"`` for the NumPy backend.
    q_stages, do_stages
        Tiles of q, and of dout, in flight; 0 on the CPU.
    dq_slots
        Parts of dq in shared memory: `config_sm90.BackwardLoop`; 0 elsewhere.
    cluster
        CTAs that share a kv tile, each with an equal part of its rows.
    """

    kernel: str
    q_tile: int
    kv_tile: int
    n_warp: int
    head_dim_pad: int
    q_stages: int
    do_stages: int
    smem_bytes: int
    reason: str
    dq_slots: int = 0
    cluster: int = 1


Config = ForwardConfig | ForwardSm90Config | BackwardConfig


def choose_config(problem: Problem, direction: str, target: Target) -> Config:
    """Tiles and stages for a problem.

    Bits depend on the tiles, so this looks at dtype, head_dim, lengths, mask, scale and compute
    capability only: never at batch, heads, strides, SM count or GPU model.

    Parameters
    ----------
    problem
    direction
        ``"forward"`` or ``"backward"``.
    target
        ``"cpu"``, or the compute capability (major, minor).

    Raises
    ------
    UnsupportedError
        The GPU kernels do not serve this dtype, head_dim or compute capability.
    """
    if target == "cpu":
        return _cpu_config(problem, direction)
    require_gpu_problem(problem, target)
    limit = SMEM_BYTES.get(target, _LEAST_SMEM_BYTES)
    text = _smem_text(target, limit)
    if uses_tensor_maps(problem, direction, target):
        return (config_sm90.forward_config(problem, text)
                if direction == "forward" else _backward_sm90_config(problem.head_dim, text))
    pad = head_dim_pad(problem.head_dim)
    choose = {"forward": _forward_config, "backward": _backward_config}[direction]
    return choose(pad, limit, text)


def uses_tensor_maps(problem: Problem, direction: str, target: Target) -> bool:
    """Whether the kernel uses the copy engine, which takes no strides of 0 or less."""
    return target == config_sm90.TARGET and (
        direction == "forward"
        or config_sm90.serves_backward(problem.head_dim, problem.scale))


def max_head_dim(target: tuple[int, int]) -> int:
    """Largest head_dim that the kernels serve."""
    return config_sm90.MAX_HEAD_DIM if target == config_sm90.TARGET else MAX_HEAD_DIM


def require_gpu_problem(problem: Problem, target: tuple[int, int]) -> None:
    """Refuse what the GPU kernels cannot do.

    Raises
    ------
    UnsupportedError
        With what to do instead.
    """
    pad_to = -(-problem.head_dim // 8) * 8
    most = max_head_dim(target)
    checks = (
        (target >= (8, 0),
         "this GPU has compute capability {}.{}; the kernels need 8.0 (Ampere) or newer: give "
         "NumPy arrays to compute on the CPU".format(*target)),
        (problem.dtype in GPU_DTYPES,
         f"dtype {problem.dtype} is not supported on a GPU (allowed: {', '.join(GPU_DTYPES)}); "
         f"cast q, k and v, or give NumPy arrays to compute on the CPU"),
        (problem.head_dim <= most,
         f"head_dim={problem.head_dim} is not supported on this GPU (allowed: multiples of 8 up to "
         f"{most}); give NumPy arrays to compute on the CPU"),
        (problem.head_dim % 8 == 0,
         f"head_dim={problem.head_dim} is not supported on a GPU (allowed: multiples of 8 up to "
         f"{most}); pad q, k and v with zeros to {pad_to}, give the scale that belongs to "
         f"{problem.head_dim}, and cut the results"),
    )
    for good, message in checks:
        if not good:
            raise UnsupportedError(message)


def workers(cluster: int) -> str:
    """What does a piece of work, for messages: CTAs, or clusters of so many."""
    return "CTAs" if cluster == 1 else f"clusters of {cluster} CTAs"


def head_dim_pad(head_dim: int) -> int:
    """Columns of a tile in shared memory: a multiple of 32."""
    return -(-head_dim // 32) * 32


def row_bytes(columns: int) -> int:
    """Bytes of one row of a tile in shared memory; a row ends in 16 bytes of padding."""
    return 2 * (columns + 8)


def forward_smem_bytes(q_tile: int, kv_tile: int, pad: int, stages: int) -> int:
    """Shared memory of fwd_sm80: q, k and v in ``stages`` stages, and what the CTA does."""
    return (q_tile + 2 * stages * kv_tile) * row_bytes(pad) + 32


def backward_smem_bytes(q_tile: int, kv_tile: int, pad: int, q_stages: int, do_stages: int) -> int:
    """Shared memory of bwd_sm80: k, v, q, dout, p, dS, lse and delta, steps, what the CTA does."""
    tiles = (2 * kv_tile + (q_stages + do_stages) * q_tile) * row_bytes(pad)
    scores = 2 * q_tile * row_bytes(kv_tile)
    row_values = 2 * 2 * q_tile * 4
    return tiles + scores + row_values + _STEP_RING_BYTES + 32


def _cpu_config(problem: Problem, direction: str) -> Config:
    q_tile, kv_tile = cpu.choose_tiles(problem)
    shared = dict(kernel="cpu", q_tile=q_tile, kv_tile=kv_tile, n_warp=0,
                  head_dim_pad=problem.head_dim, smem_bytes=0, reason="the NumPy backend's tiles")
    if direction == "forward":
        return ForwardConfig(**shared, stages=0, q_registers=False, min_ctas=0)
    return BackwardConfig(**shared, q_stages=0, do_stages=0)


def _smem_text(target: tuple[int, int], limit: int) -> str:
    text = "compute capability {}.{}".format(*target)
    return (f"{text} gives a CTA {limit >> 10} KiB of shared memory" if target in SMEM_BYTES else
            f"{text} is not in the table: no more than {limit >> 10} KiB of shared memory is used")


def _reason(smem_text: str, group: int) -> str:
    return f"{smem_text}; first of the list for head_dim up to {group} that fits"


def _forward_config(pad: int, limit: int, smem_text: str) -> ForwardConfig:
    q_tile, kv_tile, n_warp, stages, q_registers, min_ctas, reason = _FORWARD_TILES[
        pad, limit >> 10]
    return ForwardConfig("fwd_sm80", q_tile, kv_tile, n_warp, pad, stages, q_registers, min_ctas,
                         forward_smem_bytes(q_tile, kv_tile, pad, stages),
                         f"{smem_text}; {reason}")


def _backward_config(pad: int, limit: int, smem_text: str) -> BackwardConfig:
    group = 64 if pad <= 64 else 128
    for q_tile, kv_tile, q_stages, do_stages in _BACKWARD_TILES[group]:
        smem_bytes = backward_smem_bytes(q_tile, kv_tile, pad, q_stages, do_stages)
        if smem_bytes <= limit:
            return BackwardConfig("bwd_sm80", q_tile, kv_tile, 8, pad, q_stages, do_stages,
                                  smem_bytes, _reason(smem_text, group))
    raise AssertionError("the last entry of every list fits the smallest GPU")


def _backward_sm90_config(head_dim: int, smem_text: str) -> BackwardConfig:
    loop = config_sm90.backward_loop(head_dim)
    return BackwardConfig(loop.kernel, loop.q_tile, loop.kv_tile, loop.n_warp, loop.head_dim_pad,
                          loop.q_stages, loop.do_stages, loop.smem_bytes,
                          f"{smem_text}; {loop.reason}", loop.dq_slots, loop.cluster)
