"""``python -m dashcupy build``: compile kernels into the cache before they are needed."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import product

from . import cache, driver, env, modules, nvrtc, schedules
from .config import GPU_DTYPES, max_head_dim
from .errors import DashcupyError, DeviceError, InvalidInputError
from .plan import make_plan
from .problem import Problem
from .terminal import Progress, duration

DESCRIPTION = """\
Compile kernels into the cache (DASHCUPY_CACHE_DIR), so that the first call need not wait. Needs
NVRTC; a GPU only to know what to compile for, unless --arch says it. Lengths, batch and heads
need no kernels of their own. The default set: head_dim 64 and 128, both dtypes, the full and the
causal mask, schedule auto.
"""
COMMON_HEAD_DIMS = (64, 128)
ALL_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
_LEN = 4096  # any: kernels do not depend on it, but a schedule must have tiles to order


def add_parser(commands) -> None:
    """Add the command ``build`` to the subparsers of a command line."""
    parser = commands.add_parser("build", help="compile kernels ahead of time",
                                 description=DESCRIPTION)
    add = parser.add_argument
    add("--arch", metavar="ARCH", help="sm_80, sm_90a, ... (default: that of the first GPU)")
    add("--head-dim", type=int, nargs="+", metavar="N", help="default: 64 128")
    add("--dtype", choices=GPU_DTYPES, nargs="+", help="default: both")
    add("--causal", choices=("yes", "no", "both"), default="both", help="default: both")
    add("--schedule", nargs="+", metavar="NAME",
        help=f"auto, {', '.join(schedules.names())} (default: auto)")
    add("--all", action="store_true",
        help="every schedule, head_dim 32 64 96 128 (and 192 256 on compute capability 9.0), "
             "and arrays that are not 16-byte aligned")
    add("--jobs", type=int, metavar="N", help="kernels compiled at a time (default: CPU cores)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status, 1 if a kernel does not compile."""
    capability, chosen_by = _capability(args.arch)
    library = nvrtc.default_library()
    arch = nvrtc.choose_arch(capability, library)
    todo = list(dict.fromkeys(_kernels(args, capability)))
    if args.jobs is not None and args.jobs < 1:
        raise InvalidInputError(f"--jobs {args.jobs}: must be at least 1")
    print(f"{len(todo)} kernels for {arch} ({chosen_by}; compute capability "
          f"{'{}.{}'.format(*capability)}) with {library}, into {cache.folder_or_none()}\n"
          f"of: {_what(args, capability)}", flush=True)
    if driver.version() is None:
        print("there is no driver here, so the newest NVRTC is taken; a machine whose driver is "
              "too old for it takes an older one, and compiles again", flush=True)

    start, faults = time.perf_counter(), []
    executor = ThreadPoolExecutor(args.jobs or os.cpu_count() or 1)
    try:
        futures = {executor.submit(modules.build, kernel, defines, arch): kernel
                   for kernel, defines in todo}
        with Progress(len(todo)) as progress:
            progress.start("compiling")
            for future in as_completed(futures):
                try:
                    future.result()
                except DashcupyError as error:
                    faults.append(f"{futures[future]}: {error}")
                progress.start(futures[future])
                progress.step()
    finally:
        # After Ctrl-C: what runs is finished, what waits is not begun.
        executor.shutdown(cancel_futures=True)
    if faults:
        print(f"FAILED {faults[0]}")
    if len(faults) > 1:
        print(f"... and {len(faults) - 1} more that are not shown; the first may explain them")
    print(f"{len(todo) - len(faults)} of {len(todo)} kernels are in the cache; "
          f"{duration(time.perf_counter() - start)}")
    return 1 if faults else 0


def _capability(arch: str | None) -> tuple[tuple[int, int], str]:
    """The compute capability that ``--arch`` names, or that of the first GPU; and which it is."""
    if arch is not None:
        match = re.fullmatch(r"(?:sm_)?(\d+)(\d)[af]?", arch)
        if not match:
            raise InvalidInputError(f"--arch {arch}: not an architecture (such as sm_80, sm_90a)")
        return (int(match[1]), int(match[2])), f"--arch {arch}"
    hint = "say for which with --arch, such as --arch sm_90a; to compile needs no GPU"
    try:
        found = driver.devices()
    except DashcupyError as error:
        raise DeviceError(f"no GPU here to compile for: {hint} ({error})") from error
    if not found:
        raise DeviceError(f"no GPU here to compile for: {hint} (the driver sees none)")
    return found[0].compute_capability, f"of GPU 0, {found[0].name}"


def _asked(args: argparse.Namespace, capability: tuple[int, int]
           ) -> tuple[Sequence[int], Sequence[str], Sequence[str], Sequence[str]]:
    """head_dims, dtypes, masks and schedules."""
    head_dims = args.head_dim or (
        [n for n in ALL_HEAD_DIMS if n <= max_head_dim(capability)] if args.all else
        COMMON_HEAD_DIMS)
    masks = {"yes": ("causal",), "no": ("full",), "both": ("full", "causal")}[args.causal]
    names = args.schedule or (schedules.names() if args.all else ("auto",))
    return head_dims, args.dtype or GPU_DTYPES, masks, names


def _what(args: argparse.Namespace, capability: tuple[int, int]) -> str:
    head_dims, dtypes, masks, names = _asked(args, capability)
    return (f"head_dim {', '.join(map(str, head_dims))}; {', '.join(dtypes)}; mask "
            f"{', '.join(masks)}; schedule {', '.join(names)}; arrays "
            f"{'of any alignment' if args.all else 'aligned to 16 bytes'}")


def _kernels(args: argparse.Namespace, capability: tuple[int, int]
             ) -> Iterator[tuple[str, Sequence[tuple[str, int | str]]]]:
    """(kernel, defines) of everything that is asked for; some come several times."""
    head_dims, dtypes, masks, names = _asked(args, capability)
    for name in names:
        if name != "auto" and not any(schedules.supports(name, mask) for mask in masks):
            raise InvalidInputError(f"--schedule {name} has no kernel for --causal {args.causal}: "
                                    f"it is defined for {', '.join(schedules.get(name).MASKS)}")
    for head_dim, dtype, mask, aligned in product(
            head_dims, dtypes, masks, (True, False) if args.all else (True,)):
        problem = Problem(1, _LEN, _LEN, 1, 1, head_dim, dtype, mask, 1.0)
        plans = [make_plan(problem, "forward", capability, aligned=aligned, debug=env.debug())]
        plans += [make_plan(problem, "backward", capability, name, aligned, env.debug())
                  for name in names if name == "auto" or schedules.supports(name, mask)]
        for plan in plans:
            yield from ((kernel.kernel, kernel.defines) for kernel in plan.kernels)
