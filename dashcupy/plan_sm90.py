"""Launches of the Hopper forward, and the copies of both directions where no tensor map can be."""

from __future__ import annotations

from .config_sm90 import ForwardSm90Config
from .params import n_bytes
from .plan_parts import KernelPlan, Region, lay_out, pairs, shared_defines
from .problem import Problem
from .schedules.shape import Shape

_COPY_WARPS = 8
# k and v of the heads whose q tiles are handed out together: they stay in L2, of which an H200 has
# 60 MB, beside q and out of these heads. Not yet measured.
_GROUP_BYTES = 16 << 20


def forward_kernels(problem: Problem, config: ForwardSm90Config, shape: Shape, aligned: bool,
                    debug: bool) -> tuple[KernelPlan, ...]:
    """Launches of ``fwd_sm90``; with ``aligned`` False q, k, v and out pass through copies.

    Parameters
    ----------
    problem, config, shape
    aligned
        Whether tensor maps can describe q, k, v and out.
    debug
        Whether waits are bounded.
    """
    n_tile = shape.n_q * problem.batch * problem.n_q_head
    if n_tile == 0:
        return ()
    defines = shared_defines(problem, config, "forward_sm90") | {
        "DC_CONSUMERS": config.n_consumer,
        "DC_STAGES": config.stages,
        "DC_Q_STAGES": config.q_stages,
        "DC_EARLY_EXPONENTIALS": config.early_exponentials,
        "DC_FIXED_REFERENCE": int(config.fixed_reference),
        "DC_DEBUG": int(debug),
        "DC_SMEM_BYTES": config.smem_bytes,
    }
    # q tiles of the full mask take equally long: taken in turn, they need no counter.
    main = KernelPlan(config.kernel, pairs(defines), n_tile, "q tiles * batch * n_q_head",
                      32 * config.n_warp, config.smem_bytes, "forward_sm90", persistent=True,
                      counter=problem.causal)
    if aligned:
        return (main,)
    before = [copy_in(problem, name) for name in ("q", "k", "v")]
    after = copy_out(problem, "out")
    return tuple(kernel for kernel in (*before, main, after) if kernel.grid > 0)


def copy_in(problem: Problem, name: str) -> KernelPlan:
    """The launch that copies an array of the caller to the workspace."""
    return _copy(problem, name, f"{name}_copy")


def copy_out(problem: Problem, name: str) -> KernelPlan:
    """The launch that copies a result from the workspace to the array of the caller."""
    return _copy(problem, f"{name}_copy", name)


def _copy(problem: Problem, source: str, target: str) -> KernelPlan:
    length, n_head = _rows_and_heads(problem, source)
    defines = {"DC_HEAD_DIM": problem.head_dim, "DC_BF16": int(problem.dtype == "bfloat16"),
               "DC_WARPS": _COPY_WARPS, "DC_PARAMS_BYTES": n_bytes("copy")}
    n_row = problem.batch * length * n_head
    return KernelPlan("copy_rows", pairs(defines), -(-n_row // _COPY_WARPS),
                      f"rows of {source} / {_COPY_WARPS}", 32 * _COPY_WARPS, 0, "copy",
                      copies=(source, target))


def forward_workspace(problem: Problem, kernels: tuple[KernelPlan, ...]) -> tuple[Region, ...]:
    """Room for the copies."""
    return lay_out(copies(problem, kernels))


def copies(problem: Problem, kernels: tuple[KernelPlan, ...]) -> dict[str, tuple[int, str]]:
    """Bytes of each copy that these launches make, with what it is."""
    wanted = {}
    for kernel in kernels:
        for name in kernel.copies or ():
            if not name.endswith("_copy"):
                continue
            length, n_head = _rows_and_heads(problem, name)
            wanted[name] = (2 * problem.batch * length * n_head * problem.head_dim,
                            f"{problem.dtype} in C order: tensor maps need addresses and strides "
                            f"of whole 16 bytes")
    return wanted


def _rows_and_heads(problem: Problem, name: str) -> tuple[int, int]:
    if name.removesuffix("_copy") in ("k", "v", "dk", "dv"):
        return problem.kv_len, problem.n_kv_head
    return problem.q_len, problem.n_q_head


def head_group(problem: Problem) -> int:
    """q heads whose q tiles are handed out together: changes no bits, only what runs together."""
    head_bytes = 2 * 2 * max(problem.kv_len, 1) * problem.head_dim
    q_per_kv = max(problem.n_q_head // max(problem.n_kv_head, 1), 1)
    fit = max(1, _GROUP_BYTES // head_bytes) * q_per_kv
    return max(1, min(fit, problem.batch * problem.n_q_head))
