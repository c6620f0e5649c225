"""The functions we are compared with: FlashAttention-2 and cuDNN as PyTorch ships them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

PEERS = ("fa2", "fa2_det", "cudnn")  # fa2_det differs from fa2 in the backward only
_MODES = {"fa2": "default", "fa2_det": "deterministic", "cudnn": "default"}


def mode_of(peer: str) -> str:
    """What a record says about the bits that the peer promises."""
    return _MODES[peer]


def forward(peer: str, q, k, v, causal: bool) -> Callable[[], tuple]:
    """A call that computes out and lse.

    Parameters
    ----------
    peer
        ``"fa2"`` or ``"cudnn"``.
    q, k, v
        Tensors [batch, len, heads, head_dim]; PyTorch gets views of them, nothing is copied.

    Returns
    -------
    callable
        Returns (out [batch, len, heads, head_dim], lse as the peer lays it out).
    """
    operator = _forward_operator(peer, *(_heads_first(x) for x in (q, k, v)), causal)

    def call():
        out, lse, *_ = operator()
        return _heads_first(out), lse
    return call


def backward(peer: str, dout, q, k, v, causal: bool) -> Callable[[], tuple]:
    """A call that computes dq, dk and dv, all launches included.

    The forward runs once, here. Arguments and results as in `forward`.
    """
    q, k, v, dout = (_heads_first(x) for x in (q, k, v, dout))
    saved = _forward_operator(peer, q, k, v, causal)()
    # All of the forward's results but the mask for debugging; cum_seq_* are undefined (None).
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset = saved[:8]
    if peer == "cudnn":
        operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default

        def call():
            return operator(dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, max_q,
                            max_k, 0.0, causal)
    else:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

        def call():
            with deterministic(peer == "fa2_det"):
                return operator(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal,
                                seed, offset)
    try:
        call()
        torch.cuda.synchronize()
    except (RuntimeError, TypeError):  # PyTorch's private operators may change: then by autograd
        call = _by_autograd(peer, dout, q, k, v, causal)
    return lambda: tuple(_heads_first(grad) for grad in call())


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """PyTorch's deterministic mode, without its filling of fresh memory (it would be timed)."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def _heads_first(x):
    return x.transpose(1, 2)  # its own inverse


def _forward_operator(peer: str, q, k, v, causal: bool) -> Callable[[], tuple]:
    if peer == "cudnn":
        operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        return lambda: operator(q, k, v, None, True, 0.0, causal, False)
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    return lambda: operator(q, k, v, 0.0, causal, False)


def _by_autograd(peer: str, dout, q, k, v, causal: bool) -> Callable[[], tuple]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.CUDNN_ATTENTION if peer == "cudnn" else SDPBackend.FLASH_ATTENTION
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(backend), deterministic(peer == "fa2_det"):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)

    def call():
        with deterministic(peer == "fa2_det"):
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)
    return call
