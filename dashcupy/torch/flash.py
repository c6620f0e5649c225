"""The functions of the package flash-attn 2 by their names, with the deterministic backward."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import UnsupportedError
from ..problem import mask_from_causal
from .functional import attend, require_neutral
from .ops import is_deterministic


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
                    softmax_scale: float | None = None, causal: bool = False,
                    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                    alibi_slopes: torch.Tensor | None = None, deterministic: bool = False,
                    return_attn_probs: bool = False, *, schedule: str = "auto") -> Any:
    """`dashcupy.torch.attention` with the arguments of ``flash_attn.flash_attn_func``.

    Parameters
    ----------
    q : Tensor, shape [batch, q_len, n_q_head, head_dim]
    k, v : Tensor, shape [batch, kv_len, n_kv_head, head_dim]
    softmax_scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    causal : bool, optional
        Bottom-right aligned.
    dropout_p, window_size, softcap, alibi_slopes
        Only the defaults.
    deterministic : bool, optional
        True refuses a schedule that is not; every ``"auto"`` is.
    return_attn_probs : bool, optional
        Return three values.
    schedule : str, optional
        As for `dashcupy.attention_backward`.

    Returns
    -------
    out : Tensor, shape of ``q``
    softmax_lse : Tensor, shape [batch, n_q_head, q_len], float32
        With ``return_attn_probs``; autograd can differentiate it (flash-attn drops that gradient).
    S_dmask : Tensor, empty
        With ``return_attn_probs``.

    Raises
    ------
    InvalidInputError, CompileError, DeviceError
        As `dashcupy.torch.attention`.
    UnsupportedError
        As `dashcupy.torch.attention`; also for an argument that only allows its default.

    Notes
    -----
    Source of names, order and defaults: flash-attn 2.8.
    """
    return _flash("flash_attn_func", "attention", (q, k, v), dropout_p, softmax_scale, causal,
                  window_size, softcap, alibi_slopes, deterministic, return_attn_probs, schedule)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, dropout_p: float = 0.0,
                             softmax_scale: float | None = None, causal: bool = False,
                             window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                             alibi_slopes: torch.Tensor | None = None,
                             deterministic: bool = False, return_attn_probs: bool = False, *,
                             schedule: str = "auto") -> Any:
    """`flash_attn_func` with k and v in one tensor, and so their gradients, without copies.

    Parameters
    ----------
    q : Tensor, shape [batch, q_len, n_q_head, head_dim]
    kv : Tensor, shape [batch, kv_len, 2, n_kv_head, head_dim]

    Others, results and errors: as for `flash_attn_func`.
    """
    return _flash("flash_attn_kvpacked_func", "attention_kvpacked", (q, kv), dropout_p,
                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                  return_attn_probs, schedule)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, dropout_p: float = 0.0,
                              softmax_scale: float | None = None, causal: bool = False,
                              window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
                              alibi_slopes: torch.Tensor | None = None,
                              deterministic: bool = False, return_attn_probs: bool = False, *,
                              schedule: str = "auto") -> Any:
    """`flash_attn_func` with q, k and v in one tensor, and so their gradients, without copies.

    Parameters
    ----------
    qkv : Tensor, shape [batch, len, 3, heads, head_dim]

    Others, results and errors: as for `flash_attn_func`.
    """
    return _flash("flash_attn_qkvpacked_func", "attention_qkvpacked", (qkv,), dropout_p,
                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
                  return_attn_probs, schedule)


def _flash(function: str, name: str, arrays: tuple[torch.Tensor, ...], dropout_p: float,
           softmax_scale: float | None, causal: bool, window_size: tuple[int, int],
           softcap: float, alibi_slopes: torch.Tensor | None, deterministic: bool,
           return_attn_probs: bool, schedule: str) -> Any:
    window = tuple(window_size) if isinstance(window_size, list) else window_size
    require_neutral(function, dropout_p=(dropout_p, 0), window_size=(window, (-1, -1)),
                    softcap=(softcap, 0), alibi_slopes=(alibi_slopes, None))
    if deterministic and schedule != "auto" and not is_deterministic(
            schedule, mask_from_causal(causal)):
        raise UnsupportedError(f"{function}: schedule={schedule!r} is not deterministic, and "
                               f"deterministic=True was given: use another, such as 'auto'")
    out, lse = attend(name, arrays, causal, softmax_scale, schedule, True)
    return (out, lse, out.new_empty(0)) if return_attn_probs else out
