"""All kernels under NVIDIA's compute-sanitizer: ``python -m bench.sanitize``.

Small odd problems, once as they are, then under each tool: memcheck (addresses), synccheck
(barriers), initcheck (memory that nobody wrote), racecheck (shared memory). CuPy arrays, each in
an allocation of its own, so that the first byte past its end is an error. A child process runs the
cases of a tool one after another; one that takes too long is ended, and the child begins again
behind it. The tools run side by side.

Exit status: 1 for a report that is not in `KNOWN`, a case that fails, or one that does not end
(but under racecheck, whose cost has no bound); 2 where compute-sanitizer is not installed.
"""

from __future__ import annotations

import argparse
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

import dashcupy
from dashcupy import arrays, driver, params
from dashcupy.launch import Launcher
from dashcupy.plan import Plan, make_plan
from dashcupy.problem import CAUSAL_OF_MASK, Problem
from dashcupy.source import PACKAGE

from . import ours, soak

PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
TOOLS = ("memcheck", "synccheck", "initcheck", "racecheck")
LIMIT_S = 40  # of one case; the first also starts Python
DONE, FAILED = "case done:", "case failed:"


@dataclass(frozen=True)
class Case:
    """One problem, forward and backward.

    Parameters
    ----------
    portable
        Run the kernels that a GPU of compute capability 8.0 gets.
    shift
        Elements by which the arrays miss the alignment of their allocation.
    """

    q_len: int
    kv_len: int
    n_q_head: int
    n_kv_head: int
    head_dim: int
    mask: str
    schedule: str = "auto"
    dtype: str = "bfloat16"
    portable: bool = False
    shift: int = 0


CASES = {
    "d64 causal, team": Case(65, 330, 4, 2, 64, "causal", "symmetric_shift"),
    "d64 causal, blocks": Case(200, 400, 4, 2, 64, "causal", "longest_first"),
    "d128 full, team": Case(129, 300, 2, 1, 128, "full", "shift"),
    "d128 causal, rows without keys": Case(130, 70, 2, 2, 128, "causal"),
    "d40 float16": Case(33, 65, 2, 2, 40, "full", "ascending", "float16"),
    "d256 full, team": Case(65, 200, 2, 1, 256, "full", "shift"),
    "d256 causal": Case(300, 330, 2, 2, 256, "causal"),
    "d192 causal": Case(70, 130, 2, 2, 192, "causal"),
    "d128 unaligned": Case(50, 90, 1, 1, 128, "causal_top_left", shift=1),
    "portable d64 causal": Case(129, 200, 2, 1, 64, "causal", portable=True),
    "portable d128 full, team": Case(70, 300, 2, 2, 128, "full", "shift", portable=True),
    "no keys": Case(5, 0, 1, 1, 64, "full"),
}

# Reports that are false: tool, what they hold, why. None is known. (synccheck takes a named barrier
# that warps reach from two places of the code for a fault, and ends the kernel: no kernel has one.)
KNOWN: tuple[tuple[str, str, str], ...] = ()
# Two tools get the portable kernels alone. The Hopper kernels load and store by bulk copies, which
# run in the async proxy and are ordered by mbarriers. racecheck follows neither: every tile that
# was awaited races with its loads. initcheck does not see what they write: out of fwd_sm90 was
# never written when bwd_preprocess reads it, nor dq_accum when bwd_postprocess does.
PORTABLE_ONLY = ("racecheck", "initcheck")


@dataclass
class Outcome:
    """What became of one case under one tool: its reports, each the lines of one block."""

    state: str = "ok"  # or "failed", "time limit", "not run"
    reports: list[list[str]] = field(default_factory=list)


# --- the child ------------------------------------------------------------------------------------

def run_case(case: Case) -> None:
    """Forward and backward of a case, waited for; results must be finite.

    The loss depends on lse, too: its gradient is lse itself.
    """
    import cupy

    of_q = (1, case.q_len, case.n_q_head, case.head_dim)
    of_k = (1, case.kv_len, case.n_kv_head, case.head_dim)
    q, k, v, dout = (_shifted(soak.normal(cupy, (i, *shape), case.dtype)[0], case.shift)
                     for i, shape in enumerate((of_q, of_k, of_k, of_q), 1))
    causal = CAUSAL_OF_MASK[case.mask]
    if case.portable:
        out, lse = _launch(case, "forward", (q, k, v))
        grads = _launch(case, "backward", (q, k, v, out, dout, lse, lse))
    else:
        out, lse = dashcupy.attention(q, k, v, causal=causal, return_lse=True)
        grads = dashcupy.attention_backward(dout, q, k, v, out, lse, causal=causal,
                                            schedule=case.schedule, dlse=lse)
    cupy.cuda.Device().synchronize()
    for x in (out, *grads):
        finite = np.isfinite(x.view("uint16").get().view(x.dtype))
        assert finite.all(), f"{(~finite).sum()} of {x.size} elements are not finite"


def _shifted(x, n_element: int):
    """The same values, some elements behind the start of an allocation."""
    import cupy

    if not n_element:
        return x
    memory = cupy.empty(x.size + n_element, "uint16")[n_element:].reshape(x.shape)
    memory[...] = x.view("uint16")
    return memory.view(x.dtype)


def _launch(case: Case, direction: str, inputs: tuple) -> tuple:
    """The kernels of another GPU's plan."""
    import cupy

    plan = _plan(case, direction)
    q, k = inputs[:2]
    if direction == "forward":
        results = (cupy.empty_like(q), cupy.empty((1, case.n_q_head, case.q_len), "float32"))
    else:
        results = (cupy.empty_like(q), cupy.empty_like(k), cupy.empty_like(k))
    names = params.ARRAYS[direction]
    borrowed = [arrays.CUPY.borrow(x, name) for name, x in zip(names, (*inputs, *results))]
    workspace = cupy.empty(max(plan.workspace_bytes, 1), "uint8")
    Launcher(plan, {name: b.layout for name, b in zip(names, borrowed)}, 0)(
        [b.pointer for b in borrowed], workspace.data.ptr, cupy.cuda.get_current_stream().ptr)
    return results


def _plan(case: Case, direction: str) -> Plan:
    problem = Problem(1, case.q_len, case.kv_len, case.n_q_head, case.n_kv_head, case.head_dim,
                      case.dtype, case.mask, case.head_dim ** -0.5)
    target = (8, 0) if case.portable else driver.device(0).compute_capability
    return make_plan(problem, direction, target, case.schedule, aligned=case.shift == 0)


def child(names: list[str]) -> int:
    """Run these cases, and say after each that it is done."""
    cupy = driver.require_cupy()
    cupy.cuda.set_allocator(None)  # no pool: a neighbour's memory is out of bounds
    for name in names:
        try:
            run_case(CASES[name])
            print(DONE, name, flush=True)
        except (dashcupy.DashcupyError, RuntimeError, AssertionError) as error:
            print(error, flush=True)
            print(FAILED, name, flush=True)
    return 0


# --- the parent -----------------------------------------------------------------------------------

def run_tool(sanitizer: str, tool: str | None, names: list[str]) -> dict[str, Outcome]:
    """All cases under one tool; None: as they are."""
    found = {name: Outcome("not run") for name in names}
    left = list(names)
    while left:
        prefix = [sanitizer, "--tool", tool, "--show-backtrace", "device", "--print-limit", "50"]
        command = [*(prefix if tool else ()), sys.executable, "-m", "dashcupy", "bench", "sanitize",
                   "--child", *left]
        for name, outcome in follow(command, left):
            found[name] = outcome
        ended = [name for name in left if found[name].state != "not run"]
        if not ended:  # nothing came: it does not start
            break
        left = left[len(ended):]
    return found


def follow(command: list[str], names: list[str]):
    """Yield (case, outcome) as the child says that they are done; end it when one takes long."""
    process = subprocess.Popen(command, cwd=PACKAGE.parent, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, start_new_session=True)
    left, lines = list(names), []
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            deadline, rest = time.monotonic() + LIMIT_S, b""
            while left:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    yield left[0], Outcome("time limit", reports(lines))
                    return
                chunk = os.read(process.stdout.fileno(), 1 << 16)
                if not chunk:
                    yield left[0], Outcome("failed", reports(lines) or [lines[-10:]])
                    return
                *whole, rest = (rest + chunk).split(b"\n")
                for line in (raw.decode(errors="replace") for raw in whole):
                    if line.startswith((DONE, FAILED)):
                        state = "ok" if line.startswith(DONE) else "failed"
                        found = reports(lines)
                        if state == "failed":
                            found.append(lines[-3:])
                        yield left.pop(0), Outcome(state, found)
                        lines, deadline = [], time.monotonic() + LIMIT_S
                    else:
                        lines.append(line)
    finally:
        if process.poll() is None:
            try:
                process.wait(timeout=5 if not left else 0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def reports(lines: list[str]) -> list[list[str]]:
    """Blocks of the sanitizer's output, each begun by a line that is not indented."""
    found: list[list[str]] = []
    for line in lines:
        if not line.startswith("========="):
            continue
        text = line.removeprefix("=========")
        if re.match(r" (COMPUTE-SANITIZER|.*SUMMARY:|Target application)", text):
            continue
        if text.startswith(" ") and not text.startswith("  ") and text.strip():
            found.append([])
        if found and text.strip():
            found[-1].append(text.strip())
    return found


def why_known(tool: str | None, report: list[str]) -> str:
    """Why such a report is expected; "" if it is not."""
    text = "\n".join(report)
    return next((why for of, kernels, why in KNOWN if of == tool and re.search(kernels, text)), "")


def cell(tool: str | None, outcome: Outcome) -> tuple[str, bool]:
    """Text of the table, and whether it is a fault."""
    known = [report for report in outcome.reports if why_known(tool, report)]
    n_new = len(outcome.reports) - len(known)
    if outcome.state == "time limit":
        return "time limit", tool != "racecheck" or bool(n_new)
    if outcome.state != "ok":
        return outcome.state, True
    parts = [f"{n_new} NEW"] * bool(n_new) + [f"{len(known)} known"] * bool(known)
    return ", ".join(parts) or "ok", bool(n_new)


def find_sanitizer() -> str | None:
    """compute-sanitizer, from the path or where toolkits put it."""
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(PLACES))


def main(arguments: list[str] | None = None) -> int:
    """Run all, print the table and every new report."""
    parser = argparse.ArgumentParser(prog="python -m dashcupy bench sanitize", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"default: {','.join(TOOLS)}")
    parser.add_argument("--cases", default="", help="only cases whose name has this text")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return child(options.child)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is not here: it comes with the CUDA toolkit")
        return 2
    names = [name for name in CASES if options.cases in name]
    if not names:
        parser.error(f"--cases {options.cases}: there are {', '.join(CASES)}")
    tools: list[str | None] = [None, *options.tools.split(",")]
    os.environ["DASHCUPY_LINEINFO"] = "1"  # reports name lines
    ours.compile_ahead([_plan(CASES[name], direction) for name in names
                        for direction in ("forward", "backward")],
                       driver.device(0).compute_capability)
    found: dict[str | None, dict[str, Outcome]] = {None: run_tool(sanitizer, None, names)}
    with ThreadPoolExecutor() as pool:
        found |= zip(tools[1:], pool.map(lambda tool: run_tool(sanitizer, tool, [
            name for name in names if CASES[name].portable or tool not in PORTABLE_ONLY]),
            tools[1:]))
    return show(found, names)


def show(found: dict[str | None, dict[str, Outcome]], names: list[str]) -> int:
    """Print the table, then every new report once; exit status."""
    print(f"{'':32}" + "".join(f"{tool or 'plain':>16}" for tool in found))
    fault, seen = False, set()
    for name in names:
        cells = [cell(tool, found[tool][name]) if name in found[tool] else ("-", False)
                 for tool in found]
        fault |= any(bad for _, bad in cells)
        print(f"{name:32}" + "".join(f"{text:>16}" for text, _ in cells))
    for tool, outcomes in found.items():
        for name, outcome in outcomes.items():
            for report in outcome.reports:
                why = why_known(tool, report)
                if (key := (tool, why or (name, *report[:2]))) not in seen:
                    seen.add(key)
                    print(f"\n{tool or 'plain'}, {name}: {'known: ' + why if why else 'NEW'}")
                    print("\n".join(f"    {line}" for line in report[:6]))
    return int(fault)


if __name__ == "__main__":
    sys.exit(main())
