"""Attention and its backward as operators of torch: kernels, shapes for tracing, autograd, vmap."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from .. import call, schedules
from ..errors import InvalidInputError, UnsupportedError
from ..layout import Layout
from ..problem import CAUSAL_OF_MASK, Problem, lse_dtype

# Every operator by its name, with the arrays it takes. Packed ones hold k and v, or all three,
# side by side on axis 2, and so does their gradient: slices of it would be copied by autograd.
ARRAYS = {"attention": ("q", "k", "v"), "attention_kvpacked": ("q", "kv"),
          "attention_qkvpacked": ("qkv",)}
_OPTIONS = "str mask, float? scale, str schedule"

# By name, and each with "_backward" after it; torch.ops takes a microsecond to find one.
OPERATORS: dict[str, torch._ops.OpOverload] = {}
# Kernel and autograd function of each.
_IMPLEMENTATIONS: dict[str, tuple[Any, type[torch.autograd.Function]]] = {}

_AUTOGRAD = torch._C.DispatchKey.AutogradOther  # goes with those of all devices
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded

# What it defines goes with it, so it lives as long as this module. Not the decorator
# torch.library.custom_op: its general checks and autograd cost another 20 us (cuda_src/README.md).
_LIBRARY = torch.library.Library("dashcupy", "DEF")


@functools.cache
def is_deterministic(schedule: str, mask: str) -> bool:
    """Whether the schedule gives equal bits in every run.

    Raises
    ------
    InvalidInputError
        The schedule is unknown, or not defined for the mask.
    """
    shape = schedules.Shape.from_counts(1, 1, mask != "full")
    return schedules.resolve(schedule, shape).DETERMINISTIC


def _require_allowed(schedule: str, mask: str) -> None:
    """Refuse a schedule that torch.use_deterministic_algorithms, as set now, forbids."""
    if is_deterministic(schedule, mask) or not torch.are_deterministic_algorithms_enabled():
        return
    message = (f"schedule={schedule!r} is not deterministic, and "
               f"torch.use_deterministic_algorithms(True) is set: use another, such as 'auto'")
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise UnsupportedError(message)
    warnings.warn(message, stacklevel=2)


def _split(arrays: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """q, k and v, whatever is packed."""
    if len(arrays) == 3:
        return tuple(arrays)
    *first, packed = arrays
    n_packed = 3 - len(first)
    if packed.dim() != 5 or packed.shape[2] != n_packed:
        name = "qkv"[-n_packed:]
        raise InvalidInputError(f"{name} has shape {tuple(packed.shape)}, expected [batch, len, "
                                f"{n_packed}, heads, head_dim]: {', '.join(name)} side by side")
    return (*first, *packed.unbind(2))


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose last axis the kernels can read, a copy only if need be."""
    return x.contiguous() if x.is_cuda and x.dim() and x.stride(-1) != 1 else x


def _forward(arrays: Sequence[torch.Tensor], mask: str, scale: float | None,
             schedule: str) -> tuple[torch.Tensor, torch.Tensor]:
    _require_allowed(schedule, mask)
    return call.run("forward", _split(arrays), (None, None), causal=CAUSAL_OF_MASK[mask],
                    scale=scale)


def _backward(arrays: Sequence[torch.Tensor | None], mask: str, scale: float | None,
              schedule: str) -> Any:
    dout, *arrays, out, lse, dlse = arrays
    _require_allowed(schedule, mask)
    grads, parts = (), (None, None, None)
    if len(arrays) < 3:
        grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in arrays)
        parts = _split(grads)
    # The gradient of a sum has stride 0. A flag in place of a sign the dispatcher has resolved.
    dout = contiguous_rows(dout)
    if dlse is not None:
        dlse = contiguous_rows(dlse)
    results = call.run("backward", (*_split(arrays), out, dout, lse, dlse), parts,
                       causal=CAUSAL_OF_MASK[mask], scale=scale, schedule=schedule)
    return _unwrapped(grads or results)


def _require_one_device(tensors: dict[str, torch.Tensor]) -> None:
    """Refuse a mixture, of which torch would make uninitialised results where one is meta."""
    if len({x.device for x in tensors.values()}) > 1:
        places = ", ".join(f"{name} is on {x.device}" for name, x in tensors.items())
        raise InvalidInputError(f"{places}: all must be on one device; move them")


def _unwrapped(grads: tuple[torch.Tensor, ...]) -> Any:
    return grads[0] if len(grads) == 1 else grads


def _fake_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *arrays, mask, scale, schedule = arguments
    is_deterministic(schedule, mask)
    q, k, v = _split(arrays)
    _require_one_device({"q": q, "k": k, "v": v})
    layouts = {name: Layout(x.shape, None, str(x.dtype).removeprefix("torch."))
               for name, x in zip("qkv", (q, k, v))}
    # Not the default scale, a root of a size that may be symbolic.
    problem = Problem.from_arrays(layouts, mask, 1.0 if scale is None else scale)
    batch, q_len, n_q_head, _ = q.shape
    return (q.new_empty(q.shape), q.new_empty(
        (batch, n_q_head, q_len), dtype=getattr(torch, lse_dtype(problem.dtype))))


def _fake_backward(dout: torch.Tensor, *arguments: Any) -> Any:
    *arrays, out, lse, dlse, mask, scale, schedule = arguments
    tensors = zip((*"qkv", "out", "dout", "lse", "dlse"), (*_split(arrays), out, dout, lse, dlse))
    _require_one_device({name: x for name, x in tensors if x is not None})
    return _unwrapped(tuple(x.new_empty(x.shape) for x in arrays))


class _Attention(torch.autograd.Function):
    """An operator of ``ARRAYS`` that autograd has recorded."""

    @staticmethod
    def forward(ctx, name, compute, options, *arrays):
        output = compute(arrays, *options)
        ctx.operator, ctx.options = name, options
        ctx.save_for_backward(*arrays, *output)
        ctx.set_materialize_grads(False)  # no zeros for an lse that nobody uses
        return output

    @staticmethod
    def backward(ctx, dout, dlse):
        saved = ctx.saved_tensors
        if dout is None:
            if dlse is None:
                return (None,) * len(ctx.needs_input_grad)
            dout = torch.zeros_like(saved[-2])
        grads = run(f"{ctx.operator}_backward", (dout, *saved, dlse), ctx.options)
        grads = (grads,) if isinstance(grads, torch.Tensor) else grads
        return (None, None, None, *[grad if needed else None for grad, needed
                                    in zip(grads, ctx.needs_input_grad[3:])])


class _Backward(torch.autograd.Function):
    """The operator of a backward, recorded so that it can say that it has no derivative."""

    @staticmethod
    def forward(ctx, name, compute, options, *arrays):
        return compute(arrays, *options)

    @staticmethod
    def backward(ctx, *_):
        raise UnsupportedError("attention has no second derivatives: give create_graph=True only "
                               "where the gradients themselves are not differentiated, or use "
                               "PyTorch's math attention (torch.nn.attention.sdpa_kernel)")


def run(name: str, arrays: tuple[torch.Tensor | None, ...],
        options: tuple[str, float | None, str]) -> Any:
    """What the operator of that name does, past the dispatcher where it has nothing to add.

    Each direction would go through it twice, above and below autograd: a sixth of a call's time.
    """
    tensors = arrays[:-1] if arrays[-1] is None else arrays  # dlse
    if not _is_plain(tensors):
        return OPERATORS[name](*arrays, *options)
    kernel, function = _IMPLEMENTATIONS[name]
    if not torch.is_grad_enabled() or _is_excluded(_AUTOGRAD) or not any(
            [x.requires_grad for x in tensors]):
        return kernel(arrays, *options)
    # Not Function.apply, which looks for transforms again.
    return super(torch.autograd.Function, function).apply(name, kernel, options, *arrays)


def _is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether nobody but autograd and the kernel would see a call with these tensors.

    No compiler, transform, mode, profiler or derivative in forward mode, no subclass, and all
    values in memory as they are.
    """
    if (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
            or torch._C._get_tracing_state() or torch._C._autograd._profiler_enabled()
            or torch.autograd.profiler._is_profiler_enabled  # one that follows all threads
            or forward_ad._current_level >= 0 or torch.overrides.has_torch_function(tensors)):
        return False
    # The first is also true wherever a dispatch mode is active.
    return not (any(map(torch._C._dispatch_isTensorSubclassLike, tensors))
                or any(map(torch.Tensor.is_neg, tensors))
                or any(map(torch.Tensor._is_zerotensor, tensors)))


def _inside_function(name: str, arrays: Sequence[torch.Tensor], *options: Any) -> Any:
    """What is recorded; a transform of torch.func around the one that records does so too."""
    if not torch._C._are_functorch_transforms_active():
        return _below_autograd(name, (*arrays, *options))
    with torch.enable_grad():  # off inside a Function
        return _below_autograd(name, (*arrays, *options))


def _below_autograd(name: str, arguments: Sequence[Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return OPERATORS[name](*arguments)


def _recorded(function: type[torch.autograd.Function], name: str, *arguments: Any) -> Any:
    """What the operator does where autograd may be on."""
    forward_mode = forward_ad._current_level >= 0
    if not forward_mode and not torch.is_grad_enabled():
        return _below_autograd(name, arguments)
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    if forward_mode and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise UnsupportedError("attention has no forward-mode derivative (jvp): use reverse mode "
                               "(torch.func.vjp, grad, jacrev, or backward())")
    if not (torch.is_grad_enabled() and any([x.requires_grad for x in tensors])):
        return _below_autograd(name, arguments)
    given = name, functools.partial(_inside_function, name), arguments[-3:], *arguments[:-3]
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*given)
    # The operator was dispatched to one transform already; Function.apply would start again.
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*given)


def _vmapped(name: str, info: Any, dims: tuple, *arguments: Any) -> tuple[Any, Any]:
    """Under torch.vmap: the new axis joins the batch, on which no bits depend."""
    tensors = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(arguments, dims)
               if isinstance(x, torch.Tensor)]
    folded = [(x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x)
              .flatten(0, 1) for x, dim in zip(tensors, dims)]
    results = OPERATORS[name](*folded, *arguments[len(tensors):])
    if isinstance(results, torch.Tensor):
        return results.unflatten(0, (info.batch_size, -1)), 0
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in results), (0,) * len(results)


def _define(name: str, tensors: str, n_results: int, kernel: Any, fake: Any,
            function: type[torch.autograd.Function]) -> None:
    """Make one operator known to torch."""
    results = ", ".join(["Tensor"] * n_results)
    _LIBRARY.define(f"{name}({tensors}, {_OPTIONS}) -> ({results})")
    OPERATORS[name] = getattr(torch.ops.dashcupy, name).default
    _IMPLEMENTATIONS[name] = kernel, function
    _LIBRARY.impl(name, lambda *arguments: kernel(arguments[:-3], *arguments[-3:]),
                  "CompositeExplicitAutograd")
    _LIBRARY.impl(name, functools.partial(_recorded, function, name), "Autograd")
    torch.library.register_fake(f"dashcupy::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"dashcupy::{name}", functools.partial(_vmapped, name),
                                lib=_LIBRARY)


for _name, _arrays in ARRAYS.items():
    _tensors = ", ".join([f"Tensor {array}" for array in _arrays])
    _define(_name, _tensors, 2, _forward, _fake_forward, _Attention)
    _define(f"{_name}_backward", f"Tensor dout, {_tensors}, Tensor out, Tensor lse, Tensor? dlse",
            len(_arrays), _backward, _fake_backward, _Backward)
