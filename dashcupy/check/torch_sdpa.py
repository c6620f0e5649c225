"""Adapters for `--function torch:NAME`: torch's scaled_dot_product_attention by its backends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from ..errors import InvalidInputError
from .torch_function import torch

# name -> torch's name of the backend; None: torch chooses
BACKENDS = {"sdpa": None, "math": "MATH", "flash": "FLASH_ATTENTION",
            "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


def adapter(name: str) -> Callable:
    """The function that ``torch:NAME`` stands for, over [batch, len, heads, head_dim].

    Raises
    ------
    InvalidInputError
        Unknown name.
    """
    if name not in BACKENDS:
        raise InvalidInputError(f"--function torch:{name} is not known (allowed: "
                                f"{', '.join(f'torch:{known}' for known in BACKENDS)})")

    def attention(q, k, v, *, causal: bool, scale: float):
        # torch's own order of axes; k and v are not repeated for the q heads that share them.
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        shared = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        with _backend(BACKENDS[name]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, **shared).transpose(1, 2)

    attention.causal_alignment = "top_left"
    return attention


def _backend(name: str | None):
    if name is None:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel(getattr(SDPBackend, name))
