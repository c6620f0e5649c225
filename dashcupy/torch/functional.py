"""Differentiable attention, and PyTorch's scaled_dot_product_attention on top of it."""

from __future__ import annotations

from typing import Any

import torch

from .. import schedules
from ..errors import InvalidInputError, UnsupportedError
from ..problem import mask_from_causal, number_from_scale
from .ops import ARRAYS, contiguous_rows, run


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool | str = False,
              scale: float | None = None, schedule: str = "auto",
              return_lse: bool = False) -> Any:
    """Softmax attention of torch tensors that autograd can differentiate, deterministically.

    The operator ``torch.ops.dashcupy.attention`` with what a user expects around it. It works
    under torch.compile, torch.export, autocast, activation checkpointing, torch.func (vmap, grad,
    vjp, jacrev) and CUDA graph capture, on the device of the tensors and its current stream.

    Parameters
    ----------
    q : Tensor, shape [batch, q_len, n_q_head, head_dim]
    k, v : Tensor, shape [batch, kv_len, n_kv_head, head_dim]
        As for `dashcupy.attention`. Under autocast they are cast to its dtype, as those of
        PyTorch's attention are. On a GPU one whose last axis is not contiguous is copied.
    causal, scale
        As for `dashcupy.attention`.
    schedule : str, optional
        As for `dashcupy.attention_backward`.
    return_lse : bool, optional
        Also return the log-sum-exp, which autograd can differentiate like ``out``.

    Returns
    -------
    out : Tensor, shape of ``q``, contiguous
    lse : Tensor, shape [batch, n_q_head, q_len]
        With ``return_lse``.

    Raises
    ------
    InvalidInputError, CompileError, DeviceError
        As `dashcupy.attention` and `dashcupy.attention_backward`. What torch.compile finds while
        it traces comes wrapped in its own error.
    UnsupportedError
        Also for second derivatives, forward-mode derivatives, and a schedule that is not
        deterministic under ``torch.use_deterministic_algorithms(True)``, which is read at every
        call (with ``warn_only=True`` it warns).

    Notes
    -----
    Bits: as for the functions of arrays. Of q, k, v, out and the gradients no copies are made,
    with two exceptions: a last axis that is not contiguous, and addresses or strides that compute
    capability 9.0 cannot read (see `dashcupy.attention`).

    Examples
    --------
    >>> import torch
    >>> from dashcupy.torch import attention
    >>> q, k, v = torch.randn(3, 1, 5, 2, 8, requires_grad=True)
    >>> attention(q, k, v, causal=True).sum().backward()
    """
    return attend("attention", (q, k, v), causal, scale, schedule, return_lse)


def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                                 attn_mask: Any = None, dropout_p: float = 0.0,
                                 is_causal: bool = False, scale: float | None = None,
                                 enable_gqa: bool = False, *,
                                 schedule: str = "auto") -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with the deterministic backward.

    Parameters
    ----------
    query : Tensor, shape [batch, n_q_head, q_len, head_dim] or [batch, q_len, head_dim]
    key, value : Tensor, shape [batch, n_kv_head, kv_len, head_dim] or [batch, kv_len, head_dim]
        Read where they lie, in whatever order of axes.
    attn_mask, dropout_p
        Only None and 0.
    is_causal : bool, optional
        Row i sees key j iff ``j <= i``, whatever the lengths.
    scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    enable_gqa : bool, optional
        Allow fewer heads in ``key`` and ``value``.
    schedule : str, optional
        As for `dashcupy.attention_backward`.

    Returns
    -------
    Tensor, shape of ``query``
        A view of a contiguous [batch, q_len, n_q_head, head_dim].

    Raises
    ------
    InvalidInputError, CompileError, DeviceError
        As `attention`.
    UnsupportedError
        As `attention`; also for a mask or dropout.

    Notes
    -----
    Source of names, order and defaults: PyTorch 2.13.
    """
    require_neutral("scaled_dot_product_attention", attn_mask=(attn_mask, None),
                    dropout_p=(dropout_p, 0))
    arrays = {"query": query, "key": key, "value": value}
    require_tensors(arrays)
    n_axis = query.dim()
    if n_axis not in (3, 4) or key.dim() != n_axis or value.dim() != n_axis:
        raise _sdpa_error(arrays, "must all be [batch, heads, len, head_dim], or all [batch, len, "
                                  "head_dim]")
    # Here, and not where axes are in our order and have our names.
    if (key.shape != value.shape or query.shape[0] != key.shape[0]
            or query.shape[-1] != key.shape[-1]):
        raise _sdpa_error(arrays, "must have one batch (axis 0) and one head_dim (the last axis), "
                                  "and key and value one shape")
    if n_axis == 3:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise InvalidInputError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}: give enable_gqa=True for "
            f"q heads that share kv heads")
    if query.shape[1] and (not key.shape[1] or query.shape[1] % key.shape[1]):
        raise _sdpa_error(arrays, "the heads of query (axis 1) must be a multiple of those of key "
                                  "and value")
    out = attend("attention", (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)),
                 "top_left" if is_causal else False, scale, schedule, False)
    return out.squeeze(2) if n_axis == 3 else out.transpose(1, 2)


def _sdpa_error(arrays: dict[str, torch.Tensor], text: str) -> InvalidInputError:
    """With the shapes as they were given."""
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in arrays.items())
    return InvalidInputError(f"scaled_dot_product_attention got {shapes}: {text}")


def attend(name: str, arrays: tuple[torch.Tensor, ...], causal: bool | str, scale: float | None,
           schedule: str, return_lse: bool) -> Any:
    """One of the operators of `ops.ARRAYS`, called as the public functions promise."""
    require_tensors(dict(zip(ARRAYS[name], arrays)))
    if not isinstance(schedule, str):
        schedules.get(schedule)  # says what is allowed
    kind = arrays[0].device.type
    if kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        arrays = tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x
                       for x in arrays)
    out, lse = run(name, tuple([contiguous_rows(x) for x in arrays]),
                   (mask_from_causal(causal), number_from_scale(scale), schedule))
    return (out, lse) if return_lse else out


def require_tensors(arrays: dict[str, Any]) -> None:
    """Refuse what is no torch tensor."""
    for name, x in arrays.items():
        if not isinstance(x, torch.Tensor):
            raise InvalidInputError(
                f"{name} is a {type(x).__module__}.{type(x).__qualname__}, not a torch tensor: "
                f"convert it with torch.as_tensor, or use dashcupy.attention, which takes it")


def require_neutral(function: str, **arguments: tuple[Any, Any]) -> None:
    """Refuse arguments that ask for what no kernel does.

    Parameters
    ----------
    function
        Name for the message.
    arguments
        By name: what was given, and the value that asks for nothing.
    """
    for name, (given, neutral) in arguments.items():
        if given is neutral or (not isinstance(given, torch.Tensor) and given == neutral):
            continue
        shown = "a tensor" if isinstance(given, torch.Tensor) else repr(given)
        raise UnsupportedError(f"{function}: {name} is {shown}, which is not supported (allowed: "
                               f"{neutral!r}); leave it away, or use another attention")
