"""Launches and workspace of the backward, of both kernel families."""

from __future__ import annotations

from . import config_sm90, plan_sm90, schedules
from .backward_table import BACKWARD_TABLE
from .config import BackwardConfig
from .plan_parts import KernelPlan, Region, lay_out, pairs, shared_defines
from .problem import Problem
from .schedules.shape import Shape

PREPROCESS_THREADS = POSTPROCESS_THREADS = 256
SEMAPHORE_STRIDE = 8  # u32s of one dq_semaphore: 32 bytes, so that no two share a sector
REPORT_WORDS = 8
_TILES = "q tiles * batch * n_q_head"


def backward_kernels(problem: Problem, config: BackwardConfig, shape: Shape,
                     schedule: schedules.Schedule, aligned: bool,
                     debug: bool) -> tuple[KernelPlan, ...]:
    """Launches of the backward, in order; empty where no result has an element.

    Parameters
    ----------
    problem, config, shape, schedule
    aligned
        Whether 16 bytes of an array may be read or written at a time, or boxes by tensor maps;
        without it the Hopper kernels use copies of q, k, v, dout, dk and dv.
    debug
        Whether waits are bounded and reported.
    """
    is_sm90 = config.kernel in config_sm90.BACKWARD_KERNELS
    facts = BACKWARD_TABLE[config.kernel]
    shared = shared_defines(problem, config, "backward") | {
        "DC_ALIGNED": int(aligned), "DC_SEMAPHORE_STRIDE": SEMAPHORE_STRIDE}
    if is_sm90:
        shared |= {"DC_ROW_VALUES": int(facts.row_values), "DC_CLUSTER": config.cluster,
                   "DC_UNORDERED": int(not schedule.DETERMINISTIC)}
    n_tile = shape.n_q * problem.batch * problem.n_q_head
    n_work = schedules.total_work(schedule, shape, problem.batch * problem.n_kv_head)
    kernels: list[KernelPlan] = []
    if is_sm90 and n_tile > 0 and n_work > 0 and not aligned:
        kernels += [plan_sm90.copy_in(problem, name) for name in ("q", "k", "v", "dout")]
    if n_tile > 0:
        kernels.append(KernelPlan("bwd_preprocess", pairs(shared), n_tile, _TILES,
                                  PREPROCESS_THREADS, 0, "backward"))
    if n_work == 0:
        return tuple(kernels)
    defines = shared | {
        "DC_SCHEDULE": f"schedules/{schedule.NAME}.cuh",
        "DC_DEBUG": int(debug),
        "DC_SMEM_BYTES": config.smem_bytes,
    } | {name: getattr(config, field) for name, field in facts.defines}
    kernels.append(KernelPlan(
        config.kernel, pairs(defines), n_work, "works of a head * batch * n_kv_head",
        32 * config.n_warp, config.smem_bytes, "backward",
        maps="backward_maps" if is_sm90 else None, persistent=True, cluster=config.cluster,
        cooperative=schedule.team_size(shape) > 1, early=is_sm90 and n_tile > 0))
    if is_sm90 and n_tile > 0:
        kernels.append(KernelPlan(
            "bwd_postprocess", pairs(shared | {"DC_DEBUG": int(debug)}), n_tile, _TILES,
            POSTPROCESS_THREADS, 0, "backward", early=True))
    if is_sm90 and not aligned:
        kernels += [plan_sm90.copy_out(problem, name) for name in ("dk", "dv")]
    return tuple(kernels)


def backward_workspace(problem: Problem, config: BackwardConfig, shape: Shape,
                       kernels: tuple[KernelPlan, ...], debug: bool) -> tuple[Region, ...]:
    """Scratch memory of these launches."""
    n_tile = problem.batch * problem.n_q_head * shape.n_q
    n_row = n_tile * config.q_tile
    rows = "[batch, n_q_head, padded q_len]"
    if BACKWARD_TABLE[config.kernel].row_values:
        wanted = {"lse_log2": (config_sm90.ROW_VALUE_BYTES * n_row,
                               f"bfloat16 {rows}[8]: -lse / scale and -delta in three parts each")}
    else:
        wanted = {"lse_log2": (4 * n_row, f"float32 {rows}: lse * log2(e)"),
                  "delta": (4 * n_row, f"float32 {rows}: row sums of out * dout, less dlse")}
    wanted |= {
        "dq_accum": (4 * n_row * config.head_dim_pad,
                     "float32 [batch, n_q_head, q tiles, tile]: the sum of dq so far"),
        "dq_semaphore": (4 * n_tile * SEMAPHORE_STRIDE,
                         "uint32, one sector a q tile: whose turn it is"),
        "work_counter": (4, "uint32: the next piece of work"),
    }
    if debug:
        wanted["report"] = (4 * REPORT_WORDS, "uint32: who gave up waiting")
    return lay_out(wanted | plan_sm90.copies(problem, kernels))
