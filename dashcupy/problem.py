"""What is asked, as one frozen value: sizes, dtype, mask and scale, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import InvalidInputError

DTYPES = ("float16", "bfloat16", "float32", "float64")
MASKS = ("full", "causal", "causal_top_left")

# What `causal=` accepts, and the mask each value names.
CAUSAL_ARGUMENT = {False: "full", True: "causal", "bottom_right": "causal",
                   "top_left": "causal_top_left"}


def mask_from_causal(causal: bool | str) -> str:
    """Name of the mask that the argument ``causal`` asks for."""
    try:
        return CAUSAL_ARGUMENT[causal]
    except (KeyError, TypeError):
        raise InvalidInputError(
            f"causal={causal!r} is not known; allowed: False, True (bottom-right aligned, as in "
            f"FlashAttention; also 'bottom_right') and 'top_left' (as in PyTorch)") from None


@dataclass(frozen=True)
class Problem:
    """One attention problem.

    Parameters
    ----------
    batch, q_len, kv_len, n_q_head, n_kv_head, head_dim
        Sizes (counts and rows). ``n_q_head`` is a multiple of ``n_kv_head``.
    dtype
        ``"float16"``, ``"bfloat16"``, ``"float32"`` or ``"float64"`` (the last two: CPU only).
    mask
        ``"full"``, ``"causal"`` (bottom-right aligned) or ``"causal_top_left"``.
    scale
        Factor on ``q k^T``; finite and > 0.
    """

    batch: int
    q_len: int
    kv_len: int
    n_q_head: int
    n_kv_head: int
    head_dim: int
    dtype: str
    mask: str
    scale: float

    def __post_init__(self):
        checks = (
            (self.dtype in DTYPES,
             f"dtype {self.dtype} is not supported (allowed: {', '.join(DTYPES)})"),
            (self.mask in MASKS, f"mask {self.mask!r} is not known (allowed: {', '.join(MASKS)})"),
            (min(self.batch, self.q_len, self.kv_len, self.n_q_head) >= 0,
             f"sizes must not be negative, got {self}"),
            (self.head_dim > 0, f"head_dim={self.head_dim}: must be at least 1"),
            (self.n_kv_head > 0 or self.n_q_head == 0,
             f"k and v have {self.n_kv_head} heads for {self.n_q_head} q heads: need at least one"),
            (self.n_kv_head <= 0 or self.n_q_head % self.n_kv_head == 0,
             f"q has {self.n_q_head} heads and k, v have {self.n_kv_head}: the number of q heads "
             f"must be a multiple of the number of kv heads; repeat k and v, or check the layout "
             f"[batch, len, heads, head_dim]"),
            (math.isfinite(self.scale) and self.scale > 0,
             f"scale={self.scale!r}: must be a finite number > 0 (default 1/sqrt(head_dim))"),
        )
        for good, message in checks:
            if not good:
                raise InvalidInputError(message)

    @property
    def q_per_kv(self) -> int:
        """q heads that share one kv head."""
        return self.n_q_head // self.n_kv_head if self.n_kv_head else 0

    @property
    def causal(self) -> bool:
        """Whether key j is hidden from row i for j > i + ``mask_offset``."""
        return self.mask != "full"

    @property
    def mask_offset(self) -> int:
        """Row i sees key j iff j <= i + mask_offset (meaningless for the full mask: 0)."""
        return self.kv_len - self.q_len if self.mask == "causal" else 0
