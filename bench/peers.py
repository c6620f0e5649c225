"""The functions we are compared with: PyTorch's own, other packages', Triton's tutorial kernel."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

from dashcupy.errors import InvalidInputError

_DET = "_det"  # at the end of a name: the deterministic mode, which differs in the backward only
# Called as PyTorch's operators; not cudnn_det, which only the function around them refuses.
_OPERATORS = ("fa2", "fa2_det", "cudnn")
_BACKENDS = {"fa2": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION",
             "efficient": "EFFICIENT_ATTENTION", "math": "MATH"}
_PACKAGES = {"flash_attn": "flash_attn", "fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}
_TRITON = "triton"
# Without a word these are tried; the others are slow, or need more memory than the long cells have.
USUAL = ("fa2", "fa2_det", "cudnn",
         *(name + mode for name in _PACKAGES for mode in ("", _DET)), _TRITON)
PEERS = (*USUAL, "cudnn_det", *(name + mode for name in ("efficient", "math")
                                for mode in ("", _DET)))


def mode_of(peer: str) -> str:
    """What a record says about the bits that the peer promises."""
    return "deterministic" if peer.endswith(_DET) else "default"


def choose(text: str) -> list[str]:
    """Peers by names with commas; ``usual``, ``all`` and ``none`` are names, too.

    Raises
    ------
    InvalidInputError
        A name is unknown.
    """
    if text in ("usual", "all", "none"):
        return list({"usual": USUAL, "all": PEERS, "none": ()}[text])
    names = [name.strip() for name in text.split(",")]
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        raise InvalidInputError(f"--peers {', '.join(map(repr, unknown))}: not known (allowed: "
                                f"usual, all, none, {', '.join(PEERS)})")
    return names


def why_not(peer: str, direction: str, triton_file: Path | None) -> str:
    """Why a peer cannot be timed in this environment, or ``""``."""
    family = peer.removesuffix(_DET)
    if direction == "forward" and peer.endswith(_DET):
        return f"its forward is that of {family}"
    try:
        if family in _PACKAGES:
            _of_package(family)
        elif family == _TRITON:
            _of_file(triton_file)
    except Exception as error:  # a broken installation fails in its own ways
        return f"{type(error).__name__}: {error}"
    return ""


def forward(peer: str, q, k, v, causal: bool, triton_file: Path | None = None
            ) -> Callable[[], tuple]:
    """A call that computes out, and lse where the peer gives it.

    Parameters
    ----------
    peer
        One of ``PEERS``.
    q, k, v
        Tensors [batch, len, heads, head_dim]. Peers get views of them; Triton's kernel, which
        takes no strides, gets copies made here.
    triton_file
        Triton's tutorial ``06-fused-attention.py``.

    Returns
    -------
    callable
        Returns (out [batch, len, heads, head_dim], ...).
    """
    import torch

    if peer in _OPERATORS:
        operator = _forward_operator(peer, *(_heads_first(x) for x in (q, k, v)), causal)

        def call():
            out, lse, *_ = operator()
            return _heads_first(out), lse
        return call
    attend, arrange, back = _function(peer, causal, triton_file)
    q, k, v = (arrange(x) for x in (q, k, v))

    def call_function():
        with torch.no_grad():
            return (back(attend(q, k, v)),)
    return call_function


def backward(peer: str, dout, q, k, v, causal: bool, triton_file: Path | None = None
             ) -> Callable[[], tuple]:
    """A call that computes dq, dk and dv, all launches included.

    The forward runs once, here. Arguments and results as in `forward`.
    """
    import torch

    family = peer.removesuffix(_DET)
    is_deterministic = peer.endswith(_DET)
    if peer not in _OPERATORS:
        return _by_autograd(is_deterministic, dout, q, k, v,
                            *_function(peer, causal, triton_file))
    firsts = [_heads_first(x) for x in (dout, q, k, v)]
    saved = _forward_operator(family, *firsts[1:], causal)()
    # All of the forward's results but the mask for debugging; cum_seq_* are undefined (None).
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset = saved[:8]
    if family == "cudnn":
        operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
        arguments = (*firsts, out, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal)
    else:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
        arguments = (*firsts, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)

    def call():
        with deterministic(is_deterministic):
            return tuple(_heads_first(grad) for grad in operator(*arguments))
    try:
        call()
        torch.cuda.synchronize()
    except (RuntimeError, TypeError):  # PyTorch's private operators may change: then by autograd
        return _by_autograd(is_deterministic, dout, q, k, v, *_of_torch(family, causal))
    return call


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """PyTorch's deterministic mode, without its filling of fresh memory (it would be timed)."""
    import torch

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
    import torch

    if peer == "cudnn":
        operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        return lambda: operator(q, k, v, None, True, 0.0, causal, False)
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default
    return lambda: operator(q, k, v, 0.0, causal, False)


# (attend, arrange, back): attend takes arranged q, k, v; back undoes the layout of its result.
_Function = tuple[Callable, Callable, Callable]


def _function(peer: str, causal: bool, triton_file: Path | None) -> _Function:
    family = peer.removesuffix(_DET)
    if family in _BACKENDS:
        return _of_torch(family, causal)
    if family == _TRITON:
        attention = _of_file(triton_file)

        def attend_triton(q, k, v):
            return attention(q, k, v, causal, q.shape[-1] ** -0.5)
        return attend_triton, lambda x: _heads_first(x).contiguous(), _heads_first
    function = _of_package(family)

    def attend(q, k, v):
        found = function(q, k, v, causal=causal, deterministic=peer.endswith(_DET))
        return found[0] if isinstance(found, tuple) else found
    return attend, lambda x: x, lambda x: x


def _of_torch(family: str, causal: bool) -> _Function:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, _BACKENDS[family])):
            return scaled_dot_product_attention(q, k, v, is_causal=causal,
                                                enable_gqa=q.shape[1] != k.shape[1])
    return attend, _heads_first, _heads_first


def _of_package(family: str) -> Callable:
    return importlib.import_module(_PACKAGES[family]).flash_attn_func


@functools.cache
def _of_file(path: Path | None) -> Callable:
    if path is None:
        raise InvalidInputError("give the file of Triton's tutorial 06-fused-attention: --triton")
    spec = importlib.util.spec_from_file_location("triton_tutorial", path)
    if spec is None or not Path(path).is_file():
        raise InvalidInputError(f"--triton {path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.attention


def _by_autograd(is_deterministic: bool, dout, q, k, v, attend: Callable, arrange: Callable,
                 back: Callable) -> Callable[[], tuple]:
    import torch

    leaves = [arrange(x).detach().requires_grad_() for x in (q, k, v)]
    grad_out = arrange(dout)
    with deterministic(is_deterministic):
        out = attend(*leaves)

    def call():
        with deterministic(is_deterministic):
            return tuple(map(back, torch.autograd.grad(out, leaves, grad_out, retain_graph=True)))
    return call
