"""What of ours is measured: schedules, plans, and kernels compiled before the clock runs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from dashcupy import modules, nvrtc, schedules
from dashcupy.errors import DashcupyError, UnsupportedError
from dashcupy.launch import resident_workers
from dashcupy.plan import Plan, head_group, make_plan

from . import cells, timing

UNORDERED = "unordered"  # adds without tickets: what determinism is compared with


def is_deterministic(schedule: str | None) -> bool:
    """Whether a schedule (``auto`` and None included) promises equal bits."""
    return schedule in (None, "auto") or schedules.get(schedule).DETERMINISTIC


def chosen_schedules(text: str, causal: bool) -> list[str]:
    """Schedules by names with commas, as far as they are defined for the mask.

    ``all`` takes ``auto`` and ``unordered``, too.
    A name that this mask cannot use is meant for the cells of the other mask.

    Raises
    ------
    InvalidInputError
        A name is unknown.
    """
    mask = "causal" if causal else "full"
    wanted = [name.strip() for name in text.split(",")]
    if text == "all":
        wanted = ["auto", *schedules.names(), UNORDERED]
    return [name for name in wanted if name == "auto" or schedules.supports(name, mask)]


def plan_or_skip(cell: cells.Cell, direction: str, capability: tuple[int, int],
                 asked: Iterable[str | None]) -> dict[str | None, Plan]:
    """Plans by the schedule that was asked for; what no kernel serves is left out with a line."""
    found = {}
    for schedule in asked:
        try:
            found[schedule] = make_plan(cell.problem, direction, capability, schedule or "auto")
        except UnsupportedError as error:
            timing.log(f"{cell.name}: skipped {schedule or 'ours'}: {error}")
    return found


def compile_ahead(plans: Iterable[Plan], capability: tuple[int, int]) -> None:
    """Compile all kernels of these plans, as many at a time as there are CPU cores.

    One that fails is left to its first call, which says why.
    """
    todo = dict.fromkeys((kernel.kernel, kernel.defines)
                         for plan in plans for kernel in plan.kernels)
    arch = nvrtc.choose_arch(capability, nvrtc.default_library())
    start = time.perf_counter()

    def build(kernel_and_defines: tuple) -> str:
        try:
            modules.build(*kernel_and_defines, arch)
        except DashcupyError as error:
            return f"{kernel_and_defines[0]}: {type(error).__name__}"
        return ""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        faults = [fault for fault in pool.map(build, todo) if fault]
    timing.log(f"{len(todo)} kernels for {arch} compiled or found in "
               f"{time.perf_counter() - start:.0f} s{'; FAILED: ' * bool(faults)}"
               f"{', '.join(faults)}")


def kernel_of(plan: Plan, device: int) -> dict:
    """What a record says of our main kernel: all that the model of the backward needs to know.

    Parameters
    ----------
    plan
    device
        Number of the GPU; its kernels are loaded.

    Returns
    -------
    dict
        ``name``, ``q_tile`` and ``kv_tile`` (rows), ``head_group`` (kv heads that take turns as
        works are handed out: `dashcupy.plan.head_group`) and ``resident`` (CTAs, or clusters of
        them, that run at the same time); the last two None in the forward.
    """
    found = {"name": plan.config.kernel, "q_tile": plan.config.q_tile,
             "kv_tile": plan.config.kv_tile, "head_group": None, "resident": None}
    if plan.direction == "backward":
        main, = (kernel for kernel in plan.kernels if kernel.kernel == plan.config.kernel)
        function = modules.load(main.kernel, main.defines, device,
                                smem_bytes=main.smem_bytes).function
        found |= {"head_group": head_group(plan),
                  "resident": resident_workers(main, function, device)}
    return found
