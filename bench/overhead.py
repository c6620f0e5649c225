"""Host time of a call on a GPU, once kernels and plans are known: ``python -m bench.overhead``.

A tiny problem, so that the GPU never makes the host wait. Time per call in microseconds: the
least and the median over rounds of calls; the GPU is waited for between rounds, outside the time.
A plan of new lengths comes on top the first time that a call meets them; it needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import dashcupy
from dashcupy import driver
from dashcupy.errors import UnsupportedError
from dashcupy.plan import make_plan
from dashcupy.problem import Problem

from . import harness, timing

SHAPE = (1, 128, 2, 64)  # batch, len, heads, head_dim
CALLS_A_ROUND = 50
GOAL_US = 60
FORWARD, BOTH = ", forward", ", forward + backward"
DIFFERENTIABLE = "differentiable"
DIFFERENTIABLE_GOAL_US = 100
SDPA = "sdpa of PyTorch"  # beside the lines of the one above: the machine's own share
CALLING_THREAD = ", one thread"  # no thread of autograd's for the backward
AROUND_NOTHING = "differentiable, nothing computed"


def torch_arrays() -> tuple[list, Callable[[], None], Callable]:
    """Four tensors, how to wait for the GPU, and how to make a workspace."""
    import torch

    x = list(torch.randn(4, *SHAPE, device="cuda").half())
    return x, torch.cuda.synchronize, lambda n: torch.empty(n, dtype=torch.uint8, device="cuda")


def cupy_arrays() -> tuple[list, Callable[[], None], Callable]:
    """The same from CuPy."""
    import cupy

    x = np.random.default_rng(0).standard_normal((4, *SHAPE)).astype(np.float16)
    return ([cupy.asarray(part) for part in x], cupy.cuda.Device().synchronize,
            lambda n: cupy.empty(n, np.uint8))


ARRAYS = {"torch": torch_arrays, "cupy": cupy_arrays}


def calls(arrays: list, make_workspace: Callable) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    q, k, v, dout = arrays
    out, lse = dashcupy.attention(q, k, v, return_lse=True)
    grads = dashcupy.attention_backward(dout, q, k, v, out, lse)
    workspace = make_workspace(dashcupy.attention_plan(q, k, v).workspace_bytes)
    return {
        "forward": lambda: dashcupy.attention(q, k, v, return_lse=True),
        "forward, out=": lambda: dashcupy.attention(q, k, v, return_lse=True, out=(out, lse)),
        "backward": lambda: dashcupy.attention_backward(dout, q, k, v, out, lse),
        "backward, grads=, workspace=": lambda: dashcupy.attention_backward(
            dout, q, k, v, out, lse, grads=grads, workspace=workspace),
    }


def differentiable(arrays: list) -> dict[str, Callable[[], object]]:
    """A call that autograd records, alone and with the gradients of all three inputs: ours and
    PyTorch's.
    """
    import torch

    from dashcupy.torch import attention

    *inputs, dout = arrays
    inputs = [x.detach().requires_grad_() for x in inputs]

    def sdpa():
        views = [x.transpose(1, 2) for x in inputs]
        return torch.nn.functional.scaled_dot_product_attention(*views).transpose(1, 2)

    return {DIFFERENTIABLE + FORWARD: lambda: attention(*inputs),
            DIFFERENTIABLE + BOTH: lambda: torch.autograd.grad(attention(*inputs), inputs, dout),
            SDPA + FORWARD: sdpa,
            SDPA + BOTH: lambda: torch.autograd.grad(sdpa(), inputs, dout)}


def on_each_thread(arrays: list, wait: Callable[[], None], rounds: int) -> list[dict]:
    """Differentiable calls with the backward in autograd's own thread, and in the one that calls.
    """
    import torch

    records = []
    for own, suffix in ((True, ""), (False, CALLING_THREAD)):
        functions = {name + suffix: call for name, call in differentiable(arrays).items()}
        with torch.autograd.set_multithreading_enabled(own):
            records += report("torch", functions, wait, rounds)
    return records


def around_nothing(rounds: int) -> list[dict]:
    """What PyTorch and the layer for it take alone: the same on the CPU, with nothing computed."""
    import torch

    from dashcupy import call

    arrays = list(torch.randn(4, *SHAPE))
    batch, length, heads, _ = SHAPE
    shapes = {"forward": (SHAPE, (batch, heads, length)), "backward": (SHAPE,) * 3}
    run = call.run
    call.run = lambda direction, *_, **options: tuple(map(torch.empty, shapes[direction]))
    try:
        call_nothing = differentiable(arrays)[DIFFERENTIABLE + BOTH]
        return report("torch", {AROUND_NOTHING: call_nothing}, lambda: None, rounds)
    finally:
        call.run = run


def microseconds(call: Callable[[], object], wait: Callable[[], None],
                 rounds: int) -> tuple[float, float]:
    """Least and median time of a call."""
    samples = []
    for _ in range(rounds + 1):  # the first warms up
        wait()
        start = time.perf_counter()
        for _ in range(CALLS_A_ROUND):
            call()
        samples.append((time.perf_counter() - start) / CALLS_A_ROUND * 1e6)
    return min(samples[1:]), statistics.median(samples[1:])


def new_plans() -> dict[str, Callable[[], object]]:
    """Plans as they are made for lengths that were not seen before."""
    problem = Problem(2, 4096, 4096, 16, 4, 128, "bfloat16", "causal", 0.1)
    make = make_plan.__wrapped__  # without the memory of earlier plans
    return {f"plan, {direction}": lambda direction=direction: make(problem, direction, (9, 0))
            for direction in ("forward", "backward")}


def report(framework: str, functions: dict[str, Callable[[], object]], wait: Callable[[], None],
           rounds: int) -> list[dict]:
    """Time and print; one record a line."""
    records = []
    for name, call in functions.items():
        least, median = microseconds(call, wait, rounds)
        goal = DIFFERENTIABLE_GOAL_US if name.startswith((DIFFERENTIABLE, SDPA)) else GOAL_US
        print(f"{framework:6} {name:46} least {least:6.1f}  median {median:6.1f} us"
              f"{'' if least < goal else f'  (goal: {goal})'}", flush=True)
        records.append({"framework": framework, "call": name, "least_us": round(least, 2),
                        "median_us": round(median, 2)})
    return records


def main(arguments: list[str] | None = None) -> int:
    """Entry of the script: print a table, and write it if asked to; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dashcupy bench overhead", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=[*ARRAYS, "none"], action="append",
                        help="default: all; none: only what needs no GPU")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table there, too")
    options = parser.parse_args(arguments)
    chosen = [name for name in options.framework or ARRAYS if name != "none"]
    missing = [name for name in chosen if not importlib.util.find_spec(name)]
    if missing:
        raise UnsupportedError(f"{' and '.join(missing)} not installed; give --framework with "
                               f"another, or --framework none for what needs no GPU")
    if chosen:
        driver.device(0)  # a clear error where there is no GPU
    records = report("any", new_plans(), lambda: None, options.rounds)
    if importlib.util.find_spec("torch"):
        records += around_nothing(options.rounds)
    for framework in chosen:
        arrays, wait, make_workspace = ARRAYS[framework]()
        records += report(framework, calls(arrays, make_workspace), wait, options.rounds)
        if framework == "torch":
            records += on_each_thread(arrays, wait, options.rounds)
    if options.json:
        machine = timing.environment() if chosen else {}
        lines = json.dumps(machine | {"calls": records}, indent=1)
        options.json.write_text(lines + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    harness.script(main)
