"""Problems, calls and comparisons that the GPU tests share."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import dashcupy
import pytest
from dashcupy import driver, params, schedules
from dashcupy.launch import Launcher
from dashcupy.layout import Layout
from dashcupy.plan import Plan
from dashcupy.problem import CAUSAL_OF_MASK, Problem

from . import truth
from .truth import torch

DEVICE = "cuda:0"  # by its number: which GPU is current, XLA changes
TESTS = Path(__file__).resolve().parent.parent
# Every schedule with every kind of mask that it is defined for.
SCHEDULED = [(name, mask) for name in schedules.names() for mask in ("full", "causal")
             if schedules.supports(name, mask)]
# Other GPUs have no kernels above 128.
HEAD_DIMS = (64, 96, 128, *(pytest.param(head_dim, marks=pytest.mark.sm90)
                        for head_dim in (192, 256)))
NAMES = truth.NAMES
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROCESS_LIMIT_S = 80  # most of it: importing torch and CuPy, compiling


@dataclass(frozen=True)
class Case:
    """One problem with random inputs: randn times ``factor``."""

    q_len: int
    kv_len: int
    mask: str = "full"
    head_dim: int = 64
    dtype: str = "bfloat16"
    batch: int = 1
    n_q_head: int = 2
    n_kv_head: int = 2
    schedule: str = "auto"
    factor: float = 1.0
    seed: int = 0

    @property
    def problem(self) -> Problem:
        """What plans are made of, with the scale that calls have by default."""
        return Problem(self.batch, self.q_len, self.kv_len, self.n_q_head, self.n_kv_head,
                       self.head_dim, self.dtype, self.mask, 1 / math.sqrt(self.head_dim))

    def replace(self, **changes) -> Case:
        """The same, but for these fields."""
        return dataclasses.replace(self, **changes)

    def draw(self, device: str = DEVICE) -> dict[str, torch.Tensor]:
        """q, k, v and dout; dout is never scaled."""
        generator = torch.Generator(device=device).manual_seed(self.seed)
        q = (self.batch, self.q_len, self.n_q_head, self.head_dim)
        k = (self.batch, self.kv_len, self.n_kv_head, self.head_dim)

        def randn(size, factor):
            x = torch.randn(size, generator=generator, device=device) * factor
            return x.to(getattr(torch, self.dtype))

        return {"q": randn(q, self.factor), "k": randn(k, self.factor),
                "v": randn(k, self.factor), "dout": randn(q, 1.0)}


def compile_plans(plans: Iterable[Plan]) -> None:
    """Compile their kernels on all cores: one by one, as they are needed, would take minutes."""
    from bench.ours import compile_ahead
    compile_ahead(plans, driver.device(0).compute_capability)


def run(case: Case, inputs: dict) -> dict[str, torch.Tensor]:
    """Forward, then backward with its results: ``out, lse, dq, dk, dv``."""
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    causal = CAUSAL_OF_MASK[case.mask]
    out, lse = dashcupy.attention(q, k, v, causal=causal, return_lse=True)
    return dict(zip(NAMES, (out, lse, *backward(case, inputs, out, lse))))


def backward(case: Case, inputs: dict, out, lse, **options) -> tuple:
    """dq, dk, dv by the schedule of the case."""
    q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
    return dashcupy.attention_backward(dout, q, k, v, out, lse, causal=CAUSAL_OF_MASK[case.mask],
                                       schedule=case.schedule, **options)


def expect_right(case: Case, inputs: dict, got: dict, scale: float | None = None,
                 dlse: torch.Tensor | None = None) -> None:
    """Fail unless all results are within their bounds."""
    arguments = (*(inputs[name] for name in ("q", "k", "v", "dout")), case.mask, scale)
    exact = truth.attention(*arguments, dlse=dlse)
    yardstick = truth.attention(*arguments, dtype=getattr(torch, case.dtype), dlse=dlse)
    wrong = truth.faults(got, exact, yardstick)
    assert not wrong, "\n".join([str(case), *wrong])


def launcher_of(plan: Plan, arrays: dict, max_ctas: int | None = None) -> Callable[..., None]:
    """Enqueues the kernels of a plan, with these arrays and a workspace, on the current stream.

    ``arrays`` are inputs and results by name; dlse need not be there.
    """
    layouts = {name: Layout(tuple(x.shape), x.stride(), str(x.dtype).removeprefix("torch."))
               for name, x in arrays.items()}
    launcher = Launcher(plan, layouts, torch.cuda.current_device(), max_ctas)
    pointers = [arrays[name].data_ptr() if name in arrays else 0
                for name in params.ARRAYS[plan.direction]]

    def launch(workspace: torch.Tensor | None = None) -> None:
        launcher(list(pointers), 0 if workspace is None else workspace.data_ptr(),
                 torch.cuda.current_stream().cuda_stream)

    return launch


def with_pauses(plan: Plan) -> Plan:
    """The same, of builds in which warps of the Hopper backwards pause now and then."""
    return dataclasses.replace(plan, kernels=tuple(
        dataclasses.replace(kernel, defines=(*kernel.defines, ("DC_DELAY", 1)))
        if kernel.kernel.startswith("bwd_sm90") else kernel for kernel in plan.kernels))


def check(case: Case, inputs: dict | None = None) -> dict[str, torch.Tensor]:
    """Compute a case and compare it with the truth; returns the results."""
    inputs = case.draw() if inputs is None else inputs
    got = run(case, inputs)
    expect_right(case, inputs, got)
    return got


def bits(x: torch.Tensor) -> torch.Tensor:
    """The raw bits, as integers that compare NaN with itself."""
    return x.contiguous().view(torch.int32 if x.element_size() == 4 else torch.int16)


def expect_same_bits(got: dict, expected: dict, what: str) -> None:
    """Fail with the number of different elements, the first of them, and both values in hex."""
    lines = []
    for name, x in got.items():
        y = expected[name]
        assert x.shape == y.shape and x.dtype == y.dtype, \
            f"{what}: {name} is {x.dtype} {tuple(x.shape)}, not {y.dtype} {tuple(y.shape)}"
        if torch.equal(bits(x), bits(y)):
            continue
        different = (bits(x) != bits(y)).nonzero()
        first = tuple(different[0].tolist())
        lines.append(f"{name}: {len(different)} of {x.numel()} elements differ, first at "
                     f"{list(first)}: {_hex(bits(x)[first])} against {_hex(bits(y)[first])}")
    assert not lines, "\n".join([what, *lines])


def jax_on_the_gpu():
    """JAX, or skip; GPU 0 is the current one, whatever XLA made of that as it began."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip("JAX sees no GPU")
    torch.cuda.set_device(0)
    return jax


def to_jax(x: torch.Tensor):
    """A JAX array over the memory of a tensor, which torch exports from the current GPU only."""
    jax = jax_on_the_gpu()
    with torch.cuda.device(x.device):
        torch.cuda.synchronize()
        return jax.dlpack.from_dlpack(x.contiguous())


def wait_for_jax(results):
    """The same arrays, computed; what XLA calls in this thread may have left GPU 1 current."""
    jax_on_the_gpu().block_until_ready(results)
    torch.cuda.set_device(0)
    return results


def expect_same_bits_on_gpu_1(compute: Callable[[dict], dict], inputs: dict) -> dict:
    """Fail unless GPU 1 computes the bits of GPU 0, and GPU 0 stays the current one.

    Returns the inputs on GPU 1.
    """
    expected = compute(inputs)
    there = {name: x.to("cuda:1") for name, x in inputs.items()}
    assert torch.cuda.current_device() == 0
    got = compute(there)
    assert torch.cuda.current_device() == 0 and got["dq"].get_device() == 1
    torch.cuda.synchronize(1)
    expect_same_bits({name: x.to("cuda:0") for name, x in got.items()}, expected, "GPU 1")
    return there


def _hex(x: torch.Tensor) -> str:
    width = 2 * x.element_size()
    return f"0x{int(x) & (1 << 4 * width) - 1:0{width}x}"


def from_cupy(x) -> torch.Tensor:
    """A torch tensor over the memory of a CuPy array; 16-bit types travel as integers."""
    kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(x.dtype.name)
    return torch.from_dlpack(x.view("int16")).view(kind) if kind else torch.from_dlpack(x)


def digest(results: dict) -> str:
    """SHA-256 over the bytes of all results."""
    found = hashlib.sha256()
    for name in NAMES:
        found.update(bits(results[name]).cpu().numpy().tobytes())
    return found.hexdigest()


def digests(case: Case) -> list[str]:
    """One line for each schedule and mask: the digest of a case."""
    found = []
    for name, mask in SCHEDULED:
        this = case.replace(schedule=name, mask=mask)
        found.append(f"{name} {mask} {digest(run(this, this.draw()))}")
    return found


def limit(seconds: float):
    """Decorator: this test may take as long as that before it counts as hanging."""
    def mark(test):
        test.limit_s = seconds
        return test
    return mark


def in_new_process(code: str, **environment: str) -> str:
    """Standard output of Python code in a fresh process that can import dashcupy and this package.

    Fails with the process's own words when it fails or takes longer than ``PROCESS_LIMIT_S``.
    """
    folders = [str(Path(dashcupy.__file__).resolve().parent.parent), str(TESTS),
               os.environ.get("PYTHONPATH", "")]
    variables = os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True,
                          text=True, timeout=PROCESS_LIMIT_S)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr[-4000:]}"
    return done.stdout
