"""`--function module:name`: the same check of somebody else's attention."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DashcupyError, InvalidInputError, UnsupportedError
from ..problem import AXES, Problem, lse_dtype
from .device import Place, choose_place
from .subject import FORWARD, RESULTS, Arrays, Subject

LAYOUTS = ("bshd", "bhsd")
CONVENTION = """\
f(q, k, v, causal=..., scale=...) of torch tensors, returning out, or (out, lse), differentiable by
torch.autograd; or an object (a module will do) with forward(q, k, v, causal=..., scale=...),
returning out or (out, lse), and backward(dout, q, k, v, out, lse, causal=..., scale=...), returning
(dq, dk, dv), of NumPy arrays on the CPU and CuPy arrays on a GPU"""
# Our arguments, and what others call them.
_NAMES = {"causal": ("causal", "is_causal"), "scale": ("scale", "softmax_scale", "sm_scale")}
BACKWARD = "backward"


def load_subject(spec: str, device: str, layout: str, forward_only: bool) -> Subject:
    """What ``--function`` names, ready to be checked.

    Parameters
    ----------
    spec
        ``"module:name"`` (the name may have dots), ``"module"`` for one with forward and backward,
        or ``"torch:sdpa"`` and its like, see `dashcupy.check.torch_sdpa`.
    device
        As ``--device``.
    layout
        ``"bshd"`` or ``"bhsd"``: the axes of the function's arrays.
    forward_only
        Whether the gradients are left out.

    Raises
    ------
    InvalidInputError
        The module or name is not there, or is not of the convention.
    DeviceError, UnsupportedError
        torch is missing, or the GPU that is asked for.
    """
    found = _find(spec)
    pair = _is_pair(found)
    if not pair and not callable(found):
        raise InvalidInputError(f"--function {spec} is of type {type(found).__name__}, and cannot "
                                f"be called; allowed: {' '.join(CONVENTION.split())}")
    if inspect.isclass(found):
        raise InvalidInputError(
            f"--function {spec} is a class: name an instance of it, or a function; of a "
            f"torch.autograd.Function its apply ({spec}.apply)")
    version = f"{spec}@{_source_digest(found)}"
    if pair:
        if layout != "bshd":
            raise InvalidInputError("--layout is for functions of torch tensors: forward and "
                                    "backward take [batch, len, heads, head_dim]")
        return Pair(spec, version, found, choose_place(device), forward_only)
    from .torch_function import TorchFunction  # needs torch
    return TorchFunction(spec, version, found, device, layout, forward_only)


def _find(spec: str) -> Any:
    module_name, _, name = spec.partition(":")
    if module_name == "torch" and name:
        from . import torch_sdpa  # needs torch
        return torch_sdpa.adapter(name)
    if os.getcwd() not in sys.path:  # the script `dashcupy` does not put it there, `python -m` does
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module of the user raises
        raise InvalidInputError(
            f"--function {spec}: module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {error}); it is looked for in this folder and where Python "
            f"looks for modules") from error
    for part in filter(None, name.split(".")):
        if not hasattr(found, part):
            there = ", ".join(x for x in dir(found) if not x.startswith("_"))[:200]
            raise InvalidInputError(
                f"--function {spec}: {part!r} is not there (there are: {there})")
        found = getattr(found, part)
    return found


def _is_pair(found: Any) -> bool:
    return not inspect.isclass(found) and all(
        callable(getattr(found, name, None)) for name in ("forward", "backward"))


def _source_digest(found: Any) -> str:
    """Digest of the file that holds the source; "" of what has none."""
    try:
        path = inspect.getsourcefile(found if hasattr(found, "__code__") or inspect.ismodule(found)
                                     else type(found))
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    except (TypeError, OSError):
        return ""


@dataclass(frozen=True)
class Call:
    """A callable of the user's, and how it spells the optional arguments.

    Parameters
    ----------
    spec
        Its name, for messages.
    function
    keywords
        Our name of an argument -> its own, for those that it takes.
    """

    spec: str
    function: Callable
    keywords: dict[str, str]

    @classmethod
    def of(cls, spec: str, function: Callable) -> Call:
        """Look at the signature; one that cannot be seen is taken to be ``causal``, ``scale``."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            return cls(spec, function, {name: name for name in _NAMES})
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        keywords = {}
        for ours, names in _NAMES.items():
            known = [name for name in names if name in parameters]
            if known or anything:
                keywords[ours] = known[0] if known else ours
        return cls(spec, function, keywords)

    @property
    def causal_alignment(self) -> str:
        """How the function says that it aligns its causal mask; "" where it says nothing."""
        return getattr(self.function, "causal_alignment", "")

    def __call__(self, arrays: tuple, problem: Problem) -> Any:
        """Call it; whatever it raises becomes an `UnsupportedError` with its words."""
        given = {"causal": problem.causal, "scale": problem.scale}
        if problem.causal and "causal" not in self.keywords:
            raise InvalidInputError(
                f"--causal: {self.spec} has no argument {' or '.join(_NAMES['causal'])}")
        if (problem.mask == "causal" and problem.q_len != problem.kv_len
                and self.causal_alignment == "top_left"):
            raise InvalidInputError(f"--causal: {self.spec} aligns its mask top-left, which is "
                                    f"another one when lengths differ: give --causal top_left")
        options = {theirs: given[ours] for ours, theirs in self.keywords.items()}
        try:
            return self.function(*arrays, **options)
        except DashcupyError:
            raise
        except (Exception, SystemExit) as error:  # of the user's function
            raise UnsupportedError(self._words(error, arrays, options)) from error

    def _words(self, error: Exception, arrays: tuple, options: dict) -> str:
        shapes = ", ".join("None" if x is None else str(tuple(x.shape)) for x in arrays)
        text = " ".join(str(error).split())[:500]
        return (f"{self.spec} raised {type(error).__name__}: {text}; it was called with arrays of "
                f"shapes {shapes} and {options} (`python -m dashcupy check --help` says how a "
                f"function must look)")


def expected_results(problem: Problem, names: tuple[str, ...]) -> dict[str, tuple]:
    """Shape and dtype of each result."""
    return {name: (tuple(getattr(problem, axis) for axis in AXES[name]),
                   lse_dtype(problem.dtype) if name == "lse" else problem.dtype)
            for name in names}


def require_result(spec: str, problem: Problem, name: str, shape: tuple, dtype: str) -> None:
    """Refuse a result of another shape or dtype than the convention has.

    Raises
    ------
    InvalidInputError
        With both.
    """
    wanted = expected_results(problem, (name,))[name]
    if (tuple(shape), dtype) != wanted:
        raise InvalidInputError(
            f"{spec} returned {name} of shape {tuple(shape)} and dtype {dtype}, expected shape "
            f"{wanted[0]} [{', '.join(AXES[name])}] and dtype {wanted[1]} (is its layout another, "
            f"see --layout?)")


class Function:
    """What functions of others share, whatever their arrays are."""

    place: Place

    def __init__(self, spec: str, version: str, calls: tuple[Call, ...], forward_only: bool):
        self.title, self._version, self._spec = f"function {spec}", version, spec
        self._forward_only = forward_only
        self.takes_scale = all("scale" in call.keywords for call in calls)
        self.causal_alignment = calls[0].causal_alignment

    def backwards(self, problem: Problem, asked: str | None) -> list[str]:
        if asked is not None:
            raise InvalidInputError(f"--schedule {asked}: {self._spec} has no schedules")
        return [] if self._forward_only else [BACKWARD]

    def fingerprint(self, problem: Problem, name: str) -> str:
        p = problem
        return ":".join([self._version, name, p.dtype, f"d{p.head_dim}", f"q{p.q_len}",
                         f"k{p.kv_len}", p.mask, f"scale={float(p.scale).hex()}"])

    def locate(self, problem: Problem, name: str, tensor: str, index: tuple[int, ...]) -> str:
        return ""


class Pair(Function):
    """An object with a forward and a backward of NumPy or CuPy arrays."""

    def __init__(self, spec: str, version: str, pair: Any, place: Place, forward_only: bool):
        self._calls = {name: Call.of(f"{spec}, {name}", getattr(pair, name))
                       for name in (FORWARD, BACKWARD)}
        super().__init__(spec, version, tuple(self._calls.values()), forward_only)
        self.place = place

    def compute(self, problem: Problem, name: str, arrays: Arrays, results: Arrays) -> Arrays:
        inputs = tuple(arrays[x] for x in "qkv")
        if name == FORWARD:
            got = self._calls[FORWARD](inputs, problem)
            got = got if isinstance(got, (tuple, list)) else (got,)
        else:
            got = self._calls[BACKWARD](
                (arrays["dout"], *inputs, results["out"], results.get("lse")), problem)
            if not isinstance(got, (tuple, list)) or len(got) != 3:
                raise InvalidInputError(f"{self._spec}, backward returned a {type(got).__name__}, "
                                        f"expected a tuple (dq, dk, dv)")
        named = dict(zip(RESULTS[name], got))
        for tensor, array in named.items():
            if not isinstance(array, type(inputs[0])):
                raise InvalidInputError(
                    f"{self._spec}, {name} returned a {type(array).__name__} as {tensor}, expected "
                    f"a {type(inputs[0]).__module__}.{type(inputs[0]).__name__}")
            require_result(self._spec, problem, tensor, array.shape, np.dtype(array.dtype).name)
        return named

    def replay(self, problem: Problem, name: str, arrays: Arrays, results: Arrays) -> Arrays:
        raise UnsupportedError("only functions of torch tensors are recorded")
