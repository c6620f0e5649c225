"""Attention for models of Hugging Face Transformers, and the refusal of masks that it lacks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnsupportedError
from .functional import attention, require_neutral

_PADDED = ("dashcupy cannot compute padded batches: attention_mask is 0 for some tokens. Give "
           "sequences of one length without attention_mask, or use attn_implementation='sdpa'")
_OTHER = ("dashcupy computes full and causal attention only, and this model or batch needs another "
          "mask ({}). Use attn_implementation='sdpa' or 'flex_attention'")
_PACKED = _OTHER.format("packed sequences, whose position_ids start again, or an extra mask")
_OWN = ("this model has an attention of its own, which reads the causal mask and never calls "
        "dashcupy's: use attn_implementation='eager'")
# What models hand to an attention beside the mask, and what changes its result.
_REFUSED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices",
            "cu_seq_lens_q", "cu_seq_lens_k")


class _CausalMask:
    """What a model gets for a causal mask: only `_forward` knows it.

    None would do for models that call `_forward`. Others would compute full attention without a
    word, so whatever they try to do with it is refused.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _NoMaskError(_OWN)

    def __getitem__(self, index: Any) -> Any:
        raise UnsupportedError(_OWN)

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise UnsupportedError(_OWN)


class _NoMaskError(UnsupportedError, AttributeError):
    """Also what ``hasattr`` expects: libraries that move arguments to a device ask by it."""


def register_transformers(name: str = "dashcupy", *, schedule: str = "auto") -> None:
    """Let models of Hugging Face Transformers use `attention` as ``attn_implementation=name``.

    Full and causal attention, grouped kv heads, training and generation with a growing cache. What
    else a model or batch needs is refused, never computed wrong: padded batches, packed sequences,
    sliding windows and chunks shorter than the sequence, keys chosen by an indexer, soft caps,
    sinks, biases, dropout, attention weights, static and paged caches, masks made by the caller,
    and causal models whose attention cannot be replaced.

    Parameters
    ----------
    name : str, optional
        The implementation's name.
    schedule : str, optional
        As for `dashcupy.attention_backward`.

    Raises
    ------
    UnsupportedError
        Transformers is missing or too old. A model raises it where it meets one of the above;
        under torch.compile and in a CUDA graph, which cannot look at values, padded and packed
        batches end in the RuntimeError of an assertion that runs on the device.

    Notes
    -----
    Source of the interfaces: Transformers 5.24, ``AttentionInterface`` and
    ``AttentionMaskInterface``.

    Examples
    --------
    >>> import dashcupy.torch
    >>> dashcupy.torch.register_transformers()
    >>> # AutoModelForCausalLM.from_pretrained(..., attn_implementation="dashcupy")
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError as error:
        raise UnsupportedError(f"register_transformers needs the package transformers, version 5.5 "
                               f"or newer (pip install -U transformers): {error}") from error
    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise UnsupportedError("this version of transformers makes masks in an older way: install "
                               "a newer one (pip install -U transformers)")

    def forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
                value: torch.Tensor, attention_mask: Any = None, **options: Any) -> Any:
        return _forward(module, query, key, value, attention_mask, schedule, **options)

    def mask(*arguments: Any, **options: Any) -> _CausalMask | None:
        return _check_mask(sdpa_mask, *arguments, **options)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, mask)


def _forward(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
             attention_mask: Any, schedule: str, *, dropout: float = 0.0,
             scaling: float | None = None, is_causal: bool | None = None,
             sliding_window: int | None = None, output_attentions: bool | None = None,
             position_ids: torch.Tensor | None = None,
             **others: Any) -> tuple[torch.Tensor, None]:
    """The attention of one layer; query, key and value are [batch, heads, len, head_dim]."""
    if isinstance(attention_mask, _CausalMask):  # some modules that have one say is_causal=False
        attention_mask, is_causal = None, True
    require_neutral(
        type(module).__name__, attention_mask=(attention_mask, None), dropout=(dropout, 0),
        output_attentions=(output_attentions or None, None),
        **{name: (others.get(name), None) for name in _REFUSED})
    q_len, kv_len = query.shape[2], key.shape[2]
    if sliding_window is not None and kv_len > sliding_window:
        raise UnsupportedError(_OTHER.format(
            f"a sliding window of {sliding_window} keys, shorter than the {kv_len} that there are"))
    if position_ids is not None and position_ids.dim() == 2 and q_len > 1:
        _require_one_sequence(position_ids)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and q_len > kv_len:
        raise UnsupportedError(_OTHER.format(f"causal, with {q_len} rows for {kv_len} keys"))
    out = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
                    causal=bool(causal), scale=scaling, schedule=schedule)
    return out, None


def _require_one_sequence(position_ids: torch.Tensor) -> None:
    """Refuse packed sequences, for which a model that has a cache makes no mask of its own."""
    if _is_tracing():
        torch._assert_async((position_ids.diff() == 1).all(), _PACKED)
        return
    # Checked once for all layers, as the GPU is waited for; again if written since.
    version = None if position_ids.is_inference() else position_ids._version
    if version is not None and getattr(position_ids, "_dashcupy_checked", None) == version:
        return
    if not (position_ids.diff() == 1).all():
        raise UnsupportedError(_PACKED)
    position_ids._dashcupy_checked = version


def _is_tracing() -> bool:
    """Whether the values of tensors are out of reach."""
    return torch.compiler.is_compiling() or (
        torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _check_mask(sdpa_mask: Callable, batch_size: int, q_length: int, kv_length: int,
                q_offset: Any = 0, kv_offset: int = 0, mask_function: Any = None,
                attention_mask: torch.Tensor | None = None, local_size: int | None = None,
                allow_is_causal_skip: bool = True,
                allow_is_bidirectional_skip: bool | None = None,
                **options: Any) -> _CausalMask | None:
    """Refuse the mask that a model asks for unless it is full, or causal to the last key.

    The two ``allow`` flags are True only where the mask is one of these, but for padding and
    ``local_size``.
    """
    full, tracing = bool(allow_is_bidirectional_skip), _is_tracing()
    if local_size is not None and (kv_offset != 0 or kv_length > local_size):
        raise UnsupportedError(_OTHER.format(
            f"a window or chunks of {local_size} keys, and there are {kv_length}"))
    if isinstance(q_offset, torch.Tensor):
        raise UnsupportedError(_OTHER.format("a static cache, which has keys past the last token"))
    if not full and q_offset + q_length != kv_offset + kv_length:
        raise UnsupportedError(_OTHER.format(
            f"causal, with {q_length} rows from position {q_offset} on for keys up to position "
            f"{kv_offset + kv_length}, as in a static cache"))
    known = full or allow_is_causal_skip
    if not known and not (tracing and allow_is_bidirectional_skip is None):
        raise UnsupportedError(_PACKED)
    if not known:
        # While it traces, the model takes every batch for packed. So the values decide, later.
        visible = sdpa_mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function,
                            attention_mask, local_size, allow_is_causal_skip=False, **options)
        rows = torch.arange(q_length, device=visible.device) + (kv_length - q_length)
        causal = torch.arange(kv_length, device=visible.device) <= rows[:, None]
        torch._assert_async((visible == causal).all(), _PACKED)
    elif attention_mask is not None:
        seen = attention_mask[:, -kv_length:]
        if tracing and seen.shape[1] == kv_length:
            torch._assert_async(seen.all(), _PADDED)
        elif seen.shape[1] != kv_length or not seen.all():
            raise UnsupportedError(_PADDED)
    return None if full else _CausalMask()
