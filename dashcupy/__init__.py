"""Attention whose gradients never change a bit, for NumPy, CuPy and anything with DLPack."""

from .api import attention, attention_backward, attention_plan
from .errors import (
    CompileError,
    DashcupyError,
    DeviceError,
    HangError,
    InvalidInputError,
    UnsupportedError,
)
from .plan import Plan
from .version import __version__

__all__ = [
    "CompileError", "DashcupyError", "DeviceError", "HangError", "InvalidInputError", "Plan",
    "UnsupportedError", "__version__", "attention", "attention_backward", "attention_plan",
]
