"""Functions of torch tensors: where they compute, and their gradients by torch.autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..errors import DeviceError, InvalidInputError, UnsupportedError
from ..layout import numpy_dtype
from ..problem import Problem
from . import load
from .device import Place
from .function import Call, Function, require_result
from .subject import FORWARD, RESULTS, Arrays

try:
    import torch
except ImportError as error:
    raise DeviceError(f"--function of torch tensors needs torch, which cannot be imported "
                      f"({error}): pip install torch") from error

_LOAD_ROWS = 2048


def choose_torch_place(device: str, layout: str) -> Place:
    """The GPU through torch if there is one, or the CPU; arrays lie there as ``layout`` says."""
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "gpu" and not on_gpu:
        raise DeviceError(f"torch {torch.__version__} sees no GPU")
    if on_gpu:
        title = (f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA "
                 f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
    else:
        title = f"CPU, torch {torch.__version__}, {torch.get_num_threads()} threads"
    why = ("torch sees a GPU" if on_gpu else "--device cpu was given" if device == "cpu" else
           "torch sees no GPU")

    def put(array: np.ndarray) -> torch.Tensor:
        swapped = layout == "bhsd"
        array = np.ascontiguousarray(array.swapaxes(1, 2) if swapped else array)
        bits = array.view(f"i{array.itemsize}")
        try:
            x = torch.from_numpy(bits.copy()).to("cuda" if on_gpu else "cpu")
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error
        x = x.view(getattr(torch, array.dtype.name))
        return x.transpose(1, 2) if swapped else x

    def get(x: torch.Tensor) -> np.ndarray:
        name = _dtype_name(x)
        bits = getattr(torch, f"int{8 * x.element_size()}")
        return x.detach().contiguous().cpu().view(bits).numpy().view(numpy_dtype(name))

    return Place("gpu" if on_gpu else "cpu", None, title, why, title, put, get,
                 _load_gpu if on_gpu else load.on_cpu)


@contextmanager
def _load_gpu() -> Iterator[Callable[[int], None]]:
    """Products of large matrices on a stream of their own, some of them before each call."""
    stream = torch.cuda.Stream()
    matrix = torch.randn(_LOAD_ROWS, _LOAD_ROWS, device="cuda", dtype=torch.float16)

    def nudge(i: int) -> None:
        with torch.cuda.stream(stream):
            for _ in range(1 + i % 3):
                matrix @ matrix

    try:
        yield nudge
    finally:
        stream.synchronize()


def _dtype_name(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


class TorchFunction(Function):
    """``f(q, k, v, causal=..., scale=...)`` of torch tensors."""

    def __init__(self, spec: str, version: str, function: Callable, device: str, layout: str,
                 forward_only: bool):
        self._call = Call.of(spec, function)
        super().__init__(spec, version, (self._call,), forward_only)
        self.place = choose_torch_place(device, layout)
        self._swapped = layout == "bhsd"

    def compute(self, problem: Problem, name: str, arrays: Arrays, results: Arrays) -> Arrays:
        # A gradient is asked for in the forward as well: without it torch may take another kernel.
        q, k, v = (arrays[x].detach().requires_grad_() for x in "qkv")
        got = self._call(tuple(self._swap(x) for x in (q, k, v)), problem)
        named = self._forward_results(problem, got)
        if name == FORWARD:
            return {tensor: x.detach() for tensor, x in named.items()}
        if not named["out"].requires_grad:
            raise InvalidInputError(f"{self._spec} returned out without a gradient (grad_fn): make "
                                    f"it differentiable, or give --forward-only")
        try:
            gradients = torch.autograd.grad(named["out"], (q, k, v), arrays["dout"])
        except RuntimeError as error:
            raise UnsupportedError(f"the gradient of {self._spec} raised {error}") from error
        return self._checked(problem, dict(zip(RESULTS["backward"], gradients)))

    def replay(self, problem: Problem, name: str, arrays: Arrays, results: Arrays) -> Arrays:
        if self.place.kind == "cpu":
            raise UnsupportedError("there are no CUDA graphs on the CPU")
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # torch asks for a call on a side stream before a recording
            self.compute(problem, name, arrays, results)
        torch.cuda.current_stream().wait_stream(side)
        try:
            with torch.cuda.graph(graph):
                got = self.compute(problem, name, arrays, results)
        except RuntimeError as error:
            raise UnsupportedError(f"it cannot be recorded: {error}") from error
        for x in got.values():
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        return {tensor: x.clone() for tensor, x in got.items()}

    def _forward_results(self, problem: Problem, got: Any) -> Arrays:
        got = got if isinstance(got, (tuple, list)) else (got,)
        named = dict(zip(RESULTS[FORWARD], got))
        if isinstance(named.get("out"), torch.Tensor) and named["out"].dim() == 4:
            named["out"] = self._swap(named["out"])
        return self._checked(problem, named)

    def _checked(self, problem: Problem, named: Arrays) -> Arrays:
        for tensor, x in named.items():
            if not isinstance(x, torch.Tensor):
                raise InvalidInputError(f"{self._spec} returned a {type(x).__name__} as {tensor}, "
                                        f"expected a torch tensor; it must be a function that "
                                        f"returns out, or (out, lse)")
            require_result(self._spec, problem, tensor, x.shape, _dtype_name(x))
        return named

    def _swap(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2) if self._swapped else x
