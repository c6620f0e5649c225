"""Attention for PyTorch: differentiable, under names that PyTorch users know."""

from .flash import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from .functional import attention, scaled_dot_product_attention
from .transformers import register_transformers

__all__ = ["attention", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
           "register_transformers", "scaled_dot_product_attention"]
