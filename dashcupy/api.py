"""The public functions: attention, its backward, and the plan of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import call
from .errors import InvalidInputError
from .plan import DIRECTIONS, Plan


def attention(q: Any, k: Any, v: Any, *, causal: bool | str = False, scale: float | None = None,
              return_lse: bool = False, out: Any = None) -> Any:
    """Softmax attention, ``softmax(scale * q k^T) v`` for every head.

    NumPy arrays (and torch or JAX arrays on the CPU) are computed on the CPU. CuPy arrays, torch
    CUDA tensors, JAX GPU arrays and anything else with ``__dlpack__`` on a CUDA device are
    computed on that GPU, on the caller's current stream; nothing is waited for.

    Parameters
    ----------
    q : array, shape [batch, q_len, n_q_head, head_dim]
    k, v : array, shape [batch, kv_len, n_kv_head, head_dim]
        All of one framework, device and dtype. Every q head has a kv head of its own, or
        ``n_q_head`` is a multiple of ``n_kv_head`` and neighbours share one (GQA, MQA).
        On a GPU: float16 or bfloat16, ``head_dim`` a multiple of 8 up to 128 (up to 256 on
        compute capability 9.0), the last axis contiguous, the other strides free; on 9.0, q, k, v
        and out are copied first if an address or a stride is no multiple of 16 bytes or a stride is
        0 or less. On the CPU: also float32 and float64, any ``head_dim``
        and strides. torch tensors that require a gradient are taken detached.
    causal : bool or str, optional
        False: every row sees every key. True or ``"bottom_right"``: row i sees key j iff
        ``j <= i + kv_len - q_len`` (FlashAttention's rule). ``"top_left"``: iff ``j <= i``
        (PyTorch's rule). A row that sees no key has out 0 and lse -inf.
    scale : float, optional
        Factor on ``q k^T``; default ``1 / sqrt(head_dim)``.
    return_lse : bool, optional
        Also return the log-sum-exp, which `attention_backward` needs.
    out : array or tuple, optional
        Where to write: an array for out, or with ``return_lse`` a tuple ``(out, lse)`` in which
        None stands for a new array. Same framework, device, shape and dtype as the result; on a
        GPU the last axis is contiguous. It may share no memory with an input.

    Returns
    -------
    out : array, shape and dtype of ``q``, of the caller's framework
        For arrays known by ``__dlpack__`` alone: a CuPy array.
    lse : array, shape [batch, n_q_head, q_len]
        With ``return_lse``: natural-log log-sum-exp of the scaled scores, float32 (float64 for
        float64 inputs).

    Raises
    ------
    InvalidInputError
        A shape, dtype, device, stride or value that makes no sense.
    UnsupportedError
        A dtype, head_dim or GPU that no kernel serves.
    CompileError, DeviceError
        A kernel cannot be built, or the GPU, driver or CuPy is missing.

    Notes
    -----
    The bits of a head's results depend on its inputs, dtype, head_dim, the lengths, mask, scale,
    the tile sizes and compute capability that ``attention_plan(...).fingerprint`` names, and the
    version (major.minor) of the NVRTC that compiled the kernels. They do not depend on the run, on
    batch and heads around it, on strides, stream or framework, or on the number of SMs. On the CPU
    they also depend on NumPy's BLAS and the processor.

    The first call with a new kind of problem compiles a kernel (seconds; kept on disk). Arrays of
    the last call with JAX or DLPack arrays stay referenced until the next such call.

    Examples
    --------
    >>> import numpy as np, dashcupy
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 5, 2, 8), dtype=np.float32)
    >>> out, lse = dashcupy.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((1, 5, 2, 8), (1, 2, 5))
    >>> bool(np.array_equal(out[:, 0], v[:, 0]))  # row 0 sees key 0 alone
    True
    """
    if return_lse:
        given = _tuple_of("out", out, ("out", "lse"))
    elif isinstance(out, (tuple, list)):
        raise InvalidInputError("out is a tuple, which goes with return_lse=True: give one array, "
                                "or ask for lse")
    else:
        given = (out, None)
    results = call.run("forward", (q, k, v), given, causal=causal, scale=scale,
                       n_wanted=2 if return_lse else 1)
    return results if return_lse else results[0]


def attention_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *,
                       causal: bool | str = False, scale: float | None = None,
                       schedule: str = "auto", grads: Any = None, workspace: Any = None,
                       dlse: Any = None) -> tuple[Any, Any, Any]:
    """Gradients of `attention` with respect to q, k and v, the same bits every time.

    Parameters
    ----------
    dout : array, shape [batch, q_len, n_q_head, head_dim]
        Gradient of the loss with respect to ``out``. A broadcast array (zero strides) will do; on
        a GPU not along the last axis, which is contiguous.
    q, k, v : array
        As given to `attention`.
    out, lse : array
        As `attention` returned them, with ``return_lse=True``; on a GPU the last axis of each is
        contiguous.
    causal, scale
        As given to `attention`.
    schedule : str, optional
        The order in which CTAs visit tiles and sum dq: one of ``dashcupy.schedules.names()``, or
        ``"auto"``, a function of the problem (whether q heads share a kv head included) and the
        kernel, never of a timing. Bits depend on it.
        ``"unordered"`` is NOT deterministic: it adds in whatever order parts come, to measure what
        an order costs (compute capability 9.0 only).
    grads : tuple of array, optional
        Where to write: ``(dq, dk, dv)``, in which None stands for a new array. Same framework,
        device, shapes and dtype as the results; on a GPU the last axis is contiguous (the other
        strides are free, so the three may be slices of one fused array). They may share no memory
        with an input or with each other.
    workspace : array, optional
        Scratch memory on the device of the others: uint8, one axis, contiguous, at least
        ``attention_plan(...).workspace_bytes`` long (0 on the CPU, where it is checked and then
        left alone), any contents. Only a CUDA graph that is
        captured from CuPy arrays needs it: CuPy's pool would hand the memory out again. Copies
        that compute capability 9.0 needs, as in `attention`, come on top if dout, out or the
        gradients are the reason, which the plan does not see: an error says how much.
    dlse : array, shape and dtype of ``lse``, optional
        Gradient of the loss with respect to ``lse``; None if the loss does not depend on it, which
        gives the bits of zeros. On a GPU the last axis is contiguous. Where ``lse`` is -inf (a row
        that sees no key) any value will do, NaN included.

    Returns
    -------
    dq, dk, dv : array, shapes and dtype of ``q``, ``k``, ``v``
        Of the caller's framework. A row of q that sees no key has gradient 0, and so has a key
        that no row sees.

    Raises
    ------
    InvalidInputError
        As for `attention`; also for an unknown schedule, or one not defined for the mask.
    UnsupportedError
        As for `attention`; also where a schedule needs more CTAs at the same time than the GPU
        has. Nothing weaker is done instead.
    CompileError, DeviceError
        As for `attention`.
    HangError
        With ``DASHCUPY_DEBUG=1``, which also waits for the GPU: a wait was given up.

    Notes
    -----
    Bits: as for `attention`, and they depend on the schedule's name. Memory beside the results is
    linear in the lengths.

    Examples
    --------
    >>> import numpy as np, dashcupy
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = rng.standard_normal((4, 1, 5, 2, 8), dtype=np.float32)
    >>> out, lse = dashcupy.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = dashcupy.attention_backward(dout, q, k, v, out, lse)
    >>> bool(np.allclose(dv.sum(1), dout.sum(1), atol=1e-5))  # every row's weights sum to 1
    True
    """
    given = _tuple_of("grads", grads, ("dq", "dk", "dv"))
    return call.run("backward", (q, k, v, out, dout, lse, dlse), given, causal=causal, scale=scale,
                    schedule=schedule, workspace=workspace)


def attention_plan(q: Any, k: Any, v: Any, *, causal: bool | str = False,
                   scale: float | None = None, schedule: str = "auto",
                   direction: str = "backward") -> Plan:
    """What a call with these arrays would run; nothing is computed, compiled or launched.

    Parameters
    ----------
    q, k, v, causal, scale, schedule
        As for `attention` and `attention_backward`.
    direction : str, optional
        ``"backward"`` or ``"forward"``.

    Returns
    -------
    Plan
        ``fingerprint`` names all that the bits depend on but the values and the NVRTC version:
        equal fingerprints promise equal bits under one NVRTC.
        ``workspace_bytes`` is the scratch memory, ``schedule`` and ``config`` say what was
        chosen, and ``explain()`` tells all of it with the reasons.

    Raises
    ------
    InvalidInputError, UnsupportedError
        As the call itself would.

    Examples
    --------
    >>> import numpy as np, dashcupy
    >>> x = np.zeros((1, 300, 2, 64), np.float32)
    >>> plan = dashcupy.attention_plan(x, x, x, causal=True, schedule="shortest_first")
    >>> plan.schedule, plan.target
    ('shortest_first', 'cpu')
    """
    if direction not in DIRECTIONS:
        raise InvalidInputError(
            f"direction={direction!r} is not known (allowed: {', '.join(DIRECTIONS)})")
    return call.plan(direction, (q, k, v), causal=causal, scale=scale, schedule=schedule)


def _tuple_of(argument: str, given: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Preallocated results as one entry each, None where there is none."""
    if given is None:
        return (None,) * len(names)
    if not isinstance(given, (tuple, list)) or len(given) != len(names):
        raise InvalidInputError(f"{argument} must be None or a tuple ({', '.join(names)}), with "
                                f"None for each that is to be made")
    return tuple(given)
