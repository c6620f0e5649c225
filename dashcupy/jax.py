"""Differentiable attention for JAX: eager, and under jit, grad, vmap, checkpoint and shard_map."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from . import call, driver
from .arrays import CPU
from .errors import InvalidInputError, UnsupportedError
from .layout import Layout, dtype_name
from .plan import make_plan
from .problem import AXES, Problem, lse_dtype, mask_from_causal, number_from_scale

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:
    raise ImportError(
        f"dashcupy.jax needs jax.experimental.buffer_callback, which JAX {jax.__version__} does "
        f"not have: install another JAX (0.10 has it), or give JAX arrays to dashcupy.attention "
        f"and dashcupy.attention_backward outside jit and grad") from error

__all__ = ["attention"]

_DLPACK_CPU = 1  # kDLCPU


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool | str = False,
              scale: float | None = None, schedule: str = "auto",
              return_lse: bool = False) -> Any:
    """`dashcupy.attention` with `dashcupy.attention_backward` as its gradient, for JAX.

    Works eagerly and inside ``jax.jit``, on CUDA GPUs and on the CPU, with equal bits: both run
    the same kernels on the same arrays. Nothing is copied to the host and nothing is waited for.

    Parameters
    ----------
    q : jax.Array, shape [batch, q_len, n_q_head, head_dim]
    k, v : jax.Array, shape [batch, kv_len, n_kv_head, head_dim]
        As for `dashcupy.attention`; concrete or traced.
    causal, scale
        As for `dashcupy.attention`; Python values, which no tracer can stand for.
    schedule : str, optional
        As for `dashcupy.attention_backward`: the bits of the gradients depend on it.
    return_lse : bool, optional
        Also return the log-sum-exp, which may be differentiated like ``out``.

    Returns
    -------
    out : jax.Array, shape and dtype of ``q``
    lse : jax.Array, shape [batch, n_q_head, q_len]
        With ``return_lse``: float32 (float64 for float64 inputs).

    Raises
    ------
    InvalidInputError
        A shape, dtype or value that makes no sense, or no JAX array; while tracing under jit.
    UnsupportedError
        A second derivative is taken. What only a GPU refuses (float32, a head_dim) is known when
        it runs: under jit JAX then raises its ``JaxRuntimeError``, with the text of this error at
        the end.
    CompileError, DeviceError
        As for `dashcupy.attention`, and under jit as above.

    Notes
    -----
    ``jax.vmap`` makes the mapped axis part of the batch: one launch, and an array that is not
    mapped is first broadcast. Its gradient is then summed over that axis by XLA.
    A jit of sharded arrays gathers them, and every device computes all. ``jax.shard_map``, inside
    jit and with ``check_vma=False``, lets every device compute its own part.

    On a GPU, XLA calls Python to enqueue the kernels on its stream, so a compiled program needs
    this process and can be neither exported nor cached on disk. Scratch memory comes from CuPy's
    pool, beside what XLA has set aside for itself.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from dashcupy.jax import attention
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 5, 2, 8))
    >>> loss = lambda q: attention(q, k, v, causal=True).sum()
    >>> dq = jax.jit(jax.grad(loss))(q)
    >>> bool((dq == jax.grad(loss)(q)).all())  # bit for bit
    True
    """
    arrays = {"q": q, "k": k, "v": v}
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            raise InvalidInputError(
                f"{name} is a {type(x).__module__}.{type(x).__qualname__}, not a JAX array: give "
                f"jax.numpy.asarray({name})")
    options = _Options(causal, number_from_scale(scale), schedule)
    problem = Problem.from_arrays(
        {name: Layout(x.shape, None, dtype_name(x.dtype)) for name, x in arrays.items()},
        mask_from_causal(causal), options.scale)
    call.require_name(schedule)
    make_plan(problem, "backward", CPU, schedule)  # refuses a wrong schedule before the backward
    out, lse = _differentiable(options)(q, k, v)
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Options:
    """What does not change while a program runs."""

    causal: bool | str
    scale: float | None
    schedule: str


@functools.lru_cache(maxsize=1024)
def _differentiable(options: _Options) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(out, lse) as a function of q, k and v."""
    forward, backward = _Callback("forward", options), _Callback("backward", options)

    @jax.custom_vjp
    def attend(q, k, v):
        return _compute(forward, (q, k, v))

    def attend_forward(q, k, v):
        q, k, v = q.value, k.value, v.value
        out, lse = _compute(forward, (q, k, v))
        return (out, lse), (q, k, v, out, lse)

    def attend_backward(saved, cotangents):
        dout, dlse = cotangents
        q, k, v, out, lse = saved
        if isinstance(dout, SymbolicZero):
            dout = jax.numpy.zeros_like(out)
        if isinstance(dlse, SymbolicZero):
            dlse = None
        return _compute(backward, (q, k, v, out, dout, lse, dlse))

    # Symbolic zeros tell a loss that does not use lse, for which nothing more is computed.
    attend.defvjp(attend_forward, attend_backward, symbolic_zeros=True)
    return attend


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _compute(callback: _Callback, inputs: tuple[jax.Array | None, ...]) -> tuple[jax.Array, ...]:
    """Results of one direction, of concrete arrays at once, of traced ones when the program runs.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in inputs):
        return callback.run(inputs, (None,) * len(call.RESULTS[callback.direction]))
    # vmap puts its axis in front of every array, which `_Callback` makes part of the batch.
    return buffer_callback(callback, callback.results(*inputs),
                           vmap_method="broadcast_all")(*inputs)


@_compute.defjvp
def _refuse(callback, primals, tangents):
    raise UnsupportedError("dashcupy.jax.attention has a first derivative in reverse mode only "
                           "(jax.grad, jax.vjp): no second one, and no jax.jvp, jacfwd or hessian")


@dataclass(frozen=True)
class _Callback:
    """What XLA calls; equal ones are one to JAX, which compiles a program for each."""

    direction: str
    options: _Options

    def run(self, inputs: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
        o = self.options
        return call.run(self.direction, inputs, given, causal=o.causal, scale=o.scale,
                        schedule=o.schedule)

    def results(self, q: Any, k: Any, v: Any, *_: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of the results."""
        if self.direction == "backward":
            return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v))
        batch, q_len, n_q_head, _ = q.shape
        return (jax.ShapeDtypeStruct(q.shape, q.dtype),
                jax.ShapeDtypeStruct((batch, n_q_head, q_len), lse_dtype(dtype_name(q.dtype))))

    def __call__(self, context: Any, results: tuple[Any, ...], *inputs: Any) -> None:
        """Compute into XLA's buffers; on a GPU, enqueue on XLA's stream."""
        kind, device = inputs[0].__dlpack_device__()
        if kind == _DLPACK_CPU:
            self._run_views(np.asarray, results, inputs)
            return
        driver.on_device(device, self._run_on_stream, context.stream, results, inputs)

    def _run_on_stream(self, stream, results, inputs) -> None:
        cupy = driver.require_cupy()
        with cupy.cuda.Stream.from_external(_Stream(stream)):
            self._run_views(cupy.from_dlpack, results, inputs)

    def _run_views(self, view, results, inputs) -> None:
        names = (*call.INPUTS[self.direction], *call.RESULTS[self.direction])
        views = [None if x is None else _fold(view(x), len(AXES[name]))
                 for name, x in zip(names, (*inputs, *results))]
        self.run(tuple(views[:len(inputs)]), tuple(views[len(inputs):]))


def _fold(x: Any, n_axes: int) -> Any:
    """A view with ``n_axes`` axes: those in front are made part of the first one."""
    n_more = x.ndim - n_axes + 1
    return x.reshape(math.prod(x.shape[:n_more]), *x.shape[n_more:])


@dataclass(frozen=True)
class _Stream:
    """A CUDA stream by its handle, in the form that CuPy takes."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle  # version of the protocol
