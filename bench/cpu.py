"""Time the CPU backend against the plain NumPy formula: ``python -m bench.cpu --help``.

Forward and backward together, one process, the two in turn. The plain formula keeps whole score
matrices, and its backward takes P from its forward; ours keeps tiles and recomputes P.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable

import ml_dtypes
import numpy as np

from dashcupy import cpu
from dashcupy.plan import Plan, make_plan
from dashcupy.problem import MASKS, Problem

from . import harness

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32,
          "float64": np.float64}


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray,
          problem: Problem) -> tuple[np.ndarray, ...]:
    """out, dq, dk, dv by whole matrices, all heads at once; float32, or float64 for float64."""
    sums = np.dtype(np.float64 if problem.dtype == "float64" else np.float32)
    q, k, v, dout = (x.astype(sums, copy=False).transpose(0, 2, 1, 3) for x in (q, k, v, dout))
    k, v = (np.repeat(x, problem.q_per_kv, axis=1) for x in (k, v))
    scale = sums.type(problem.scale)
    p = q @ k.swapaxes(2, 3)
    p *= scale
    if problem.causal:
        seen = (np.arange(problem.kv_len)
                <= np.arange(problem.q_len)[:, None] + problem.mask_offset)
        p[:, :, ~seen] = -np.inf
    p -= p.max(axis=3, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=3, keepdims=True)
    out = p @ v
    dv = p.swapaxes(2, 3) @ dout
    ds = dout @ v.swapaxes(2, 3)
    ds -= (out * dout).sum(axis=3, keepdims=True)
    ds *= p
    dq = scale * (ds @ k)
    dk = scale * (ds.swapaxes(2, 3) @ q)
    grouped = (problem.batch, problem.n_kv_head, problem.q_per_kv, *dk.shape[2:])
    dk, dv = (x.reshape(grouped).sum(axis=2) for x in (dk, dv))
    return tuple(x.transpose(0, 2, 1, 3) for x in (out, dq, dk, dv))


def ours(q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray,
         plan: Plan) -> tuple[np.ndarray, ...]:
    """out, dq, dk, dv of the CPU backend, by a plan of its backward."""
    out, lse = cpu.forward(q, k, v, plan.problem, plan.config)
    return out, *cpu.backward(dout, q, k, v, out, lse, plan.problem, plan.config, plan.schedule)


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, in turn, after one round that does not count."""
    found = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - begin)
    return {name: seconds[1:] for name, seconds in found.items()}


def peak_bytes(call: Callable[[], object]) -> int:
    """Most memory that NumPy held during the call, inputs not counted."""
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def main(arguments: list[str] | None = None) -> int:
    """Print times, memory, ratio and largest difference of one problem; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m dashcupy bench cpu",
                                     description="Time the CPU backend against plain NumPy.")
    parser.add_argument("--batch", type=harness.count, default=1)
    parser.add_argument("--length", type=harness.count, default=2048,
                        help="of q, k and v (default 2048)")
    parser.add_argument("--heads", type=harness.count, default=8)
    parser.add_argument("--kv-heads", type=harness.count, help="default: as --heads")
    parser.add_argument("--head-dim", type=harness.count, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--mask", choices=MASKS, default="causal")
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--rounds", type=harness.count, default=7,
                        help="timed calls of each (default 7)")
    options = parser.parse_args(arguments)

    kv_heads = options.kv_heads or options.heads
    problem = Problem(options.batch, options.length, options.length, options.heads, kv_heads,
                      options.head_dim, options.dtype, options.mask, options.head_dim ** -0.5)
    plan = make_plan(problem, "backward", "cpu", options.schedule)
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((problem.batch, options.length, n_head, problem.head_dim),
                            np.float32).astype(DTYPES[options.dtype])
        for n_head in (options.heads, kv_heads, kv_heads, options.heads))
    calls = {"plain": lambda: plain(q, k, v, dout, problem),
             "ours": lambda: ours(q, k, v, dout, plan)}
    seconds = measure(calls, options.rounds)
    difference = max(float(np.abs(a.astype(np.float64) - b).max())
                     for a, b in zip(calls["ours"](), calls["plain"]()))

    print(f"forward + backward, {problem}, schedule {options.schedule}, {cpu.arithmetic_id()}")
    for name, found in seconds.items():
        print(f"{name:<6} best {min(found) * 1e3:8.1f} ms   median "
              f"{statistics.median(found) * 1e3:8.1f} ms   memory "
              f"{peak_bytes(calls[name]) / 2 ** 20:8.1f} MiB")
    print(f"ours / plain: best {min(seconds['ours']) / min(seconds['plain']):.2f}, median "
          f"{statistics.median(seconds['ours']) / statistics.median(seconds['plain']):.2f}; "
          f"largest difference {difference:.2g}")
    return 0


if __name__ == "__main__":
    harness.script(main)
