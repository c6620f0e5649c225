"""All that a call will do, decided before any GPU is touched: kernels, grid, workspace, bits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from . import plan_sm90, schedules
from .backward_table import BACKWARD_TABLE
from .config import Config, Target, choose_config, uses_tensor_maps, workers
from .config_sm90 import BACKWARD_KERNELS, ForwardSm90Config
from .errors import UnsupportedError
from .plan_backward import backward_kernels, backward_workspace
from .plan_parts import KernelPlan, Region, pairs, shared_defines
from .problem import Problem
from .schedules.shape import Shape

# Goes up whenever the bits of a result change for any input and schedule. Part of every
# fingerprint, as the schedule is: what "auto" means may change without it.
NUMERICS_VERSION = 4

DIRECTIONS = ("forward", "backward")
_INT_MAX = 2**31 - 1
# Every CTA takes one number from the work counter that stands for no work, the last of all.
_MAX_WORKS = 2**31 - 2**16
# Lengths stay far enough below 2**31 that tile and mask arithmetic in 32 bits cannot overflow.
_MAX_LEN = 2**30


@dataclass(frozen=True)
class Plan:
    """What a call does and what its bits depend on; made by `make_plan`, printed by `explain`.

    Parameters
    ----------
    direction
        ``"forward"`` or ``"backward"``.
    problem, target, config
        What is asked, where it runs, and how it is cut into tiles.
    requested_schedule, schedule
        The argument, and the schedule it stands for; both None for the forward.
    aligned
        Whether the kernels may read 16 bytes at a time (bits do not depend on it).
    debug
        Whether waits are bounded and reported.
    kernels
        Launches, in order; empty on the CPU and where there is nothing to compute.
    workspace, workspace_bytes
        Parts and size of the scratch memory; linear in the lengths.
    cleared
        Regions that the host sets to zero before the launch.
    team_size
        CTAs, or clusters of them, that wait for one another and so must be resident together; 1:
        none.
    fingerprint
        Names all that the bits depend on, but for the values and for the NVRTC that compiles the
        kernels: equal fingerprints promise equal bits under one NVRTC version. Across versions
        nothing is promised; with 12.9 and 13.5 the machine code is the same with and without
        ``-fmad=false``, so neither chooses where to fuse, and bits are in practice equal. That of
        the schedule ``"unordered"`` promises nothing, and says so.
    """

    direction: str
    problem: Problem
    target: Target
    config: Config
    requested_schedule: str | None
    schedule: str | None
    aligned: bool
    debug: bool
    kernels: tuple[KernelPlan, ...]
    workspace: tuple[Region, ...]
    workspace_bytes: int
    cleared: tuple[str, ...]
    team_size: int
    fingerprint: str

    def region(self, name: str) -> Region:
        """The part of the workspace with that name."""
        return next(region for region in self.workspace if region.name == name)

    @property
    def shape(self) -> Shape:
        """Tile counts and mask of one head."""
        return _shape(self.problem, self.config)

    def explain(self) -> str:
        """Every value on the way from the arguments to the launch, with the reasons."""
        rows = [("what", _problem_text(self)), ("mask", _mask_text(self.problem)),
                ("scale", f"{self.problem.scale:.9g} on q k^T"),
                ("target", _target_text(self.target)), *_config_rows(self)]
        if self.schedule:
            rows += [("schedule", _schedule_text(self)), ("team", _team_text(self))]
        if any(kernel.persistent for kernel in self.kernels):
            rows.append(("heads", _head_group_text(self)))
        for kernel in self.kernels:
            rows += _kernel_rows(kernel)
        if not self.kernels and self.target != "cpu":
            rows.append(("launch", "nothing: no result has an element"))
        rows.append(("workspace", f"{self.workspace_bytes} bytes"))
        rows += [("", f"{region.name}: {region.n_bytes} bytes at {region.offset}, {region.text}")
                 for region in self.workspace]
        rows.append(("bits", self.fingerprint))
        return "\n".join(f"{title:<10} {text}" for title, text in rows)


@functools.lru_cache(maxsize=1024)
def make_plan(problem: Problem, direction: str, target: Target, schedule: str = "auto",
              aligned: bool = True, debug: bool = False) -> Plan:
    """Decide everything; a pure function that needs no GPU.

    Parameters
    ----------
    problem
    direction
        ``"forward"`` or ``"backward"``.
    target
        ``"cpu"``, or a compute capability (major, minor).
    schedule
        A name, or ``"auto"``; the forward has no use for it.
    aligned, debug
        See `Plan`.

    Raises
    ------
    InvalidInputError
        Unknown schedule, or one that is not defined for the mask.
    UnsupportedError
        No kernel serves the problem on this target, or it has too many tiles.
    """
    config = choose_config(problem, direction, target)
    shape = _shape(problem, config)
    # A wrong name is refused for the forward too.
    chosen = schedules.resolve(schedule, shape, config.kernel, problem.q_per_kv)
    chosen = chosen if direction == "backward" else None
    _check_order(chosen, config)
    name = chosen.NAME if chosen else None
    kernels: tuple[KernelPlan, ...] = ()
    workspace: tuple[Region, ...] = ()
    team_size = chosen.team_size(shape) if chosen else 1
    if target != "cpu":
        _check_sizes(problem, shape, chosen)
        if direction == "backward":
            kernels = backward_kernels(problem, config, shape, chosen, aligned, debug)
            workspace = backward_workspace(problem, config, shape, kernels, debug)
        else:
            kernels = _forward_kernels(problem, config, shape, aligned, debug)
            workspace = plan_sm90.forward_workspace(problem, kernels)
    end = workspace[-1].offset + workspace[-1].n_bytes if workspace else 0
    return Plan(direction, problem, target, config, schedule if chosen else None, name, aligned,
                debug, kernels, workspace, end, _cleared(kernels, debug), team_size,
                _fingerprint(problem, direction, target, config, name))


def _shape(problem: Problem, config: Config) -> Shape:
    return Shape(problem.q_len, problem.kv_len, config.q_tile, config.kv_tile, problem.causal,
                 problem.mask_offset)


def _check_sizes(problem: Problem, shape: Shape, schedule: schedules.Schedule | None) -> None:
    counts = {
        "q_len": (problem.q_len, _MAX_LEN),
        "kv_len": (problem.kv_len, _MAX_LEN),
        "q tiles * batch * n_q_head": (shape.n_q * problem.batch * problem.n_q_head, _INT_MAX),
    }
    if schedule is not None:
        counts["works * batch * n_kv_head"] = (
            schedules.total_work(schedule, shape, problem.batch * problem.n_kv_head), _MAX_WORKS)
    for name, (count, most) in counts.items():
        if count > most:
            raise UnsupportedError(f"{name} = {count} is more than the kernels can count "
                                   f"({most}); split the batch or the heads over several calls")


def _check_order(schedule: schedules.Schedule | None, config: Config) -> None:
    if schedule is None or schedule.DETERMINISTIC or config.kernel in BACKWARD_KERNELS:
        return
    where = "is computed on the CPU" if config.kernel == "cpu" else "runs in the portable kernel"
    raise UnsupportedError(
        f"schedule={schedule.NAME!r} runs on the Hopper backwards only (compute capability 9.0), "
        f"and this problem {where}; use 'auto', or one of {', '.join(schedules.names())}")


def _forward_kernels(problem: Problem, config: Config, shape: Shape, aligned: bool,
                     debug: bool) -> tuple[KernelPlan, ...]:
    if isinstance(config, ForwardSm90Config):
        return plan_sm90.forward_kernels(problem, config, shape, aligned, debug)
    n_tile = shape.n_q * problem.batch * problem.n_q_head
    if n_tile == 0:
        return ()
    defines = shared_defines(problem, config, "forward") | {
        "DC_ALIGNED": int(aligned),
        "DC_WARPS": config.n_warp,
        "DC_STAGES": config.stages,
        "DC_Q_REGISTERS": int(config.q_registers),
        "DC_MIN_CTAS": config.min_ctas,
        "DC_SMEM_BYTES": config.smem_bytes,
    }
    return (KernelPlan(config.kernel, pairs(defines), n_tile, "q tiles * batch * n_q_head",
                       32 * config.n_warp, config.smem_bytes, "forward"),)


def _cleared(kernels: tuple[KernelPlan, ...], debug: bool) -> tuple[str, ...]:
    names = [kernel.kernel for kernel in kernels]
    if not any(kernel.params == "backward" and kernel.persistent for kernel in kernels):
        return ()
    # bwd_preprocess sets the counter to zero, but has no CTA when there is no row of q.
    counter = () if "bwd_preprocess" in names else ("work_counter",)
    return counter + (("report",) if debug else ())


def _fingerprint(problem: Problem, direction: str, target: Target, config: Config,
                 schedule: str | None) -> str:
    place = "numpy" if target == "cpu" else "cc{}.{}".format(*target)
    parts = [f"v{NUMERICS_VERSION}", direction, problem.dtype, f"d{problem.head_dim}",
             f"q{problem.q_len}", f"k{problem.kv_len}", problem.mask,
             f"scale={float(problem.scale).hex()}", *([schedule] if schedule else []),
             f"{config.kernel}[{config.q_tile}x{config.kv_tile}]", place]
    if schedule and not schedules.get(schedule).DETERMINISTIC:
        parts.append("not-deterministic")
    return ":".join(parts)


def _problem_text(plan: Plan) -> str:
    p = plan.problem
    return (f"{plan.direction}, {p.dtype}, batch {p.batch}, {p.q_len} rows of q, {p.kv_len} keys, "
            f"{p.n_q_head} q heads on {p.n_kv_head} kv heads, head_dim {p.head_dim}")


def _mask_text(problem: Problem) -> str:
    if not problem.causal:
        return "full: every row sees every key"
    return f"{problem.mask}: row i sees key j iff j <= i + {problem.mask_offset}"


def _target_text(target: Target) -> str:
    if target == "cpu":
        return "cpu (NumPy); equal bits need the same NumPy, BLAS and processor"
    return "compute capability {}.{}".format(*target)


def _config_rows(plan: Plan) -> list[tuple[str, str]]:
    config, shape = plan.config, plan.shape
    text = (f"{config.kernel}, q tile {config.q_tile} rows ({shape.n_q} of them a head), kv tile "
            f"{config.kv_tile} rows ({shape.n_kv})")
    if plan.target != "cpu":
        stages = ", ".join(f"{name} {getattr(config, name)}" for name in
                           ("stages", "q_registers", "min_ctas", "q_stages", "do_stages",
                            "early_exponentials", "fixed_reference") if hasattr(config, name))
        text += (f", head_dim padded to {config.head_dim_pad}, {config.n_warp} warps, {stages}, "
                 f"{_loads_text(plan)}")
    return [("config", text), ("", f"because {config.reason}")]


def _loads_text(plan: Plan) -> str:
    if not uses_tensor_maps(plan.problem, plan.direction, plan.target):
        return f"{'16-byte' if plan.aligned else '2-byte'} loads"
    return "loads by tensor map" + (
        "" if plan.aligned else " of copies: an address or a stride is no multiple of 16 bytes")


def _schedule_text(plan: Plan) -> str:
    description = schedules.get(plan.schedule).DESCRIPTION
    asked = "" if plan.requested_schedule == plan.schedule else (
        f" (for {plan.requested_schedule!r}: a function of the problem, never of a timing)")
    return f"{plan.schedule}{asked}: {description}"


def _team_text(plan: Plan) -> str:
    if plan.target == "cpu":
        return "one worker: nobody waits"
    if plan.team_size == 1:
        return "1: a CTA waits only for works that started before its own, so nothing can hang"
    return (f"{plan.team_size} {workers(plan.config.cluster)} wait for one another: launched "
            f"cooperatively, and refused on a GPU where fewer are resident together")


def _head_group_text(plan: Plan) -> str:
    problem = plan.problem
    if plan.direction == "forward":
        return (f"q tiles of {plan_sm90.head_group(problem)} of the "
                f"{problem.batch * problem.n_q_head} q heads are handed out together: their keys "
                f"stay in L2; changes no bits")
    schedule, n_group = schedules.get(plan.schedule), head_group(plan)
    n_head, chunk = problem.batch * problem.n_kv_head, schedule.chunk_size(plan.shape)
    last = max(schedule.num_work(plan.shape) - 1, 0) // chunk * chunk
    n_late = schedules.heads_in_turn(schedule, plan.shape, n_head, n_group, last)
    late = f", {n_late} where works are short" if n_late != n_group else ""
    return (f"{n_group} of the {n_head} kv heads take turns as works are handed out{late}: enough "
            f"that few CTAs queue for one dq tile, and few enough that their rows stay in L2; "
            f"changes no bits")


def _kernel_rows(kernel: KernelPlan) -> list[tuple[str, str]]:
    grid = (f"min({kernel.grid} works, resident {workers(kernel.cluster)})"
            if kernel.persistent else f"{kernel.grid} CTAs")
    kind = ", cooperative" if kernel.cooperative else ""
    kind += ", starts before the kernel before it ends" if kernel.early else ""
    defines = " ".join(f"{name}={value}" for name, value in kernel.defines)
    return [("kernel", f"{kernel.kernel}: grid {grid} ({kernel.grid_text}), {kernel.threads} "
                       f"threads, {kernel.smem_bytes} bytes of dynamic shared memory{kind}"),
            ("", defines)]


def head_group(plan: Plan) -> int:
    """kv heads that take turns as works are handed out: changes no bits, only which run together.

    Many heads at a time shorten the queue for each dq tile; few keep q, dout and dq_accum of the
    heads in flight inside L2: how many of each is a fact of the kernel (`backward_table`). A team
    has its head alone, and late chunks have more (`schedules.heads_in_turn`).
    """
    problem, schedule = plan.problem, schedules.get(plan.schedule)
    facts, kv_len = BACKWARD_TABLE[plan.config.kernel], max(problem.kv_len, 1)
    if schedule.chunk_size(plan.shape) < schedule.num_work(plan.shape):
        wanted = facts.chunk_rows // kv_len
    else:
        wanted = max(facts.group_heads[problem.causal], facts.group_rows // kv_len)
    n_head = problem.batch * problem.n_kv_head
    group = max(1, min(n_head, wanted, facts.most_rows // kv_len))
    return schedules.heads_in_turn(schedule, plan.shape, n_head, group)


def scale_log2(problem: Problem) -> float:
    """Factor that takes scores to base 2: scale * log2(e)."""
    return problem.scale * math.log2(math.e)
