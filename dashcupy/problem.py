"""What is asked, as one frozen value: sizes, dtype, mask and scale, checked once."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .errors import InvalidInputError

DTYPES = ("float16", "bfloat16", "float32", "float64")
MASKS = ("full", "causal", "causal_top_left")

# Smallest and largest factor that float32 can hold, with room for the log2(e) of kernels that work
# in base 2. One that became 0 or inf there would give NaN.
_FLOAT32_SCALES = (2.0**-126, 2.0**126)

# Axes of every array that the public functions take or return.
_AS_Q = ("batch", "q_len", "n_q_head", "head_dim")
_AS_K = ("batch", "kv_len", "n_kv_head", "head_dim")
_PER_ROW = ("batch", "n_q_head", "q_len")
AXES = {
    "q": _AS_Q, "k": _AS_K, "v": _AS_K, "out": _AS_Q, "lse": _PER_ROW,
    "dout": _AS_Q, "dlse": _PER_ROW, "dq": _AS_Q, "dk": _AS_K, "dv": _AS_K,
}
# Those with one number for each row of q, in the dtype of the sums.
ROW_ARRAYS = ("lse", "dlse")

# What `causal=` accepts, and the mask each value names.
CAUSAL_ARGUMENT = {False: "full", True: "causal", "bottom_right": "causal",
                   "top_left": "causal_top_left"}
# The other way round; of two values that name a mask, the first.
CAUSAL_OF_MASK = {mask: causal for causal, mask in reversed(CAUSAL_ARGUMENT.items())}


def mask_from_causal(causal: bool | str) -> str:
    """Name of the mask that the argument ``causal`` asks for."""
    try:
        return CAUSAL_ARGUMENT[causal]
    except (KeyError, TypeError):
        raise InvalidInputError(
            f"causal={causal!r} is not known; allowed: False, True (bottom-right aligned, as in "
            f"FlashAttention; also 'bottom_right') and 'top_left' (as in PyTorch)") from None


def number_from_scale(scale: object) -> float | None:
    """The argument ``scale`` as a Python float, or None for the default."""
    if scale is None or type(scale) is float:
        return scale
    if isinstance(scale, numbers.Real):  # ints, and NumPy's scalars
        try:
            return float(scale)
        except OverflowError:
            return math.inf  # refused with the other numbers that are not finite
    raise InvalidInputError(
        f"scale is a {type(scale).__name__}: must be None (1/sqrt(head_dim)) or a Python or NumPy "
        f"number; an array on a GPU would have to be waited for, so read it first: float(scale)")


def lse_dtype(dtype: str) -> str:
    """dtype of lse for inputs of ``dtype``."""
    return "float64" if dtype == "float64" else "float32"


class Described(Protocol):
    """Anything with a shape and the name of a dtype."""

    shape: tuple[int, ...]
    dtype: str


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
        Factor on ``q k^T``; finite and > 0, and within the range of float32 unless ``dtype`` is
        ``"float64"``.
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
            # One by one: of sizes that are symbolic, torch.export would keep which is the smallest.
            (all(n >= 0 for n in (self.batch, self.q_len, self.kv_len, self.n_q_head)),
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
            (self.dtype == "float64" or _FLOAT32_SCALES[0] <= self.scale <= _FLOAT32_SCALES[1],
             f"scale={self.scale!r}: {self.dtype} is computed in float32, which needs a scale from "
             f"2**-126 to 2**126; scale q instead, or give float64 arrays"),
        )
        for good, message in checks:
            if not good:
                raise InvalidInputError(message)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Described], mask: str,
                    scale: float | None = None) -> Problem:
        """The problem that these arrays pose.

        Parameters
        ----------
        arrays
            By the names of ``AXES``; ``"q"``, ``"k"`` and ``"v"`` must be there, and come first.
        mask
            One of ``MASKS``.
        scale
            Factor on ``q k^T``; None: 1/sqrt(head_dim).

        Raises
        ------
        InvalidInputError
            A rank, shape or dtype does not go with the others.
        """
        sizes: dict[str, int] = {}
        dtype = arrays["q"].dtype
        if dtype not in DTYPES:
            raise InvalidInputError(
                f"q has dtype {dtype} (allowed: {', '.join(DTYPES)}); cast q, k and v")
        for name, array in arrays.items():
            _check_shape(name, tuple(array.shape), sizes)
            wanted = lse_dtype(dtype) if name in ROW_ARRAYS else dtype
            if array.dtype != wanted:
                raise InvalidInputError(
                    f"{name} has dtype {array.dtype}, expected {wanted}: q, k, v and all arrays "
                    f"that go with them share one dtype, and lse and dlse are float32 (float64 "
                    f"for float64); cast {name}")
        if scale is None:
            scale = 1 / math.sqrt(max(sizes["head_dim"], 1))
        return cls(**sizes, dtype=dtype, mask=mask, scale=scale)

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


def _check_shape(name: str, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    """Compare a shape with the sizes known so far, and learn the others from it."""
    axes = AXES[name]
    if len(shape) == len(axes) and all(
            sizes.setdefault(axis, size) == size for axis, size in zip(axes, shape)):
        return
    expected = ", ".join(str(sizes.get(axis, "any")) for axis in axes)
    others = "" if name == "q" else ", to go with the arrays before it"
    raise InvalidInputError(
        f"{name} has shape {shape}, expected [{', '.join(axes)}] = ({expected}){others}; "
        f"heads come after the length, and there is no axis to leave out")
