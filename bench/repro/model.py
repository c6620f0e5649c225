"""A decoder as language models are built today: RMSNorm, rotary positions, grouped kv heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from dashcupy.errors import InvalidInputError

from .attention import Attention
from .data import VOCABULARY

MLPS = ("swiglu", "gelu")
HEAD_DIMS = (64, 128)
_ROPE_BASE = 10_000.0
_INIT_STD = 0.02


@dataclass(frozen=True)
class Size:
    """Width of the residual stream, layers, and hidden width of SwiGLU."""

    width: int
    n_layer: int
    hidden: int


SIZES = {"tiny": Size(128, 2, 384), "small": Size(512, 6, 1344), "base": Size(1024, 10, 2688)}


class Linear(nn.Linear):
    """A product without bias: float32 weights, rounded to the dtype of what comes in."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__(n_in, n_out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm of the float32 stream; the result has the dtype that products run in."""

    def __init__(self, width: int, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5).to(self.dtype)


class SelfAttention(nn.Module):
    """Projections apart for q, k and v, so that a gradient that differs can be told by its name."""

    def __init__(self, width: int, head_dim: int, kv_heads: int, attention: Attention):
        super().__init__()
        self.head_dim, self.attention = head_dim, attention
        self.q_heads, self.kv_heads = width // head_dim, kv_heads
        self.q = Linear(width, width)
        self.k = Linear(width, kv_heads * head_dim)
        self.v = Linear(width, kv_heads * head_dim)
        self.out = Linear(width, width)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim))
                   for project in (self.q, self.k, self.v))
        return self.out(self.attention(rotate(q, rope), rotate(k, rope), v).flatten(-2))


class SwiGLU(nn.Module):
    """Gated MLP."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up = Linear(width, hidden), Linear(width, hidden)
        self.out = Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    """Plain MLP; 3/2 of the hidden width of SwiGLU gives as many parameters."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.up, self.out = Linear(width, hidden * 3 // 2), Linear(hidden * 3 // 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.up(x)))


class Layer(nn.Module):
    """Attention, then MLP, each added to the stream."""

    def __init__(self, size: Size, head_dim: int, kv_heads: int, mlp: str, attention: Attention,
                 dtype: torch.dtype):
        super().__init__()
        self.attention_norm = Norm(size.width, dtype)
        self.attention = SelfAttention(size.width, head_dim, kv_heads, attention)
        self.mlp_norm = Norm(size.width, dtype)
        self.mlp = (SwiGLU if mlp == "swiglu" else GELU)(size.width, size.hidden)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Bytes in, mean cross entropy of the next bytes out.

    Parameters
    ----------
    size
        One of `SIZES`, by name.
    head_dim
        One of `HEAD_DIMS`.
    kv_heads
        kv heads of a layer; None: as many as q heads.
    mlp
        One of `MLPS`.
    seqlen
        Longest sequence.
    attention
        Shared by all layers.
    dtype
        Of products and attention. Weights, the residual stream, norms and the loss are float32.
    seed
        Of the weights, which are drawn on the CPU: equal on every device.
    device
        Where the weights go.

    Raises
    ------
    InvalidInputError
        ``kv_heads`` does not divide the q heads.
    """

    def __init__(self, size: str, head_dim: int, kv_heads: int | None, mlp: str, seqlen: int,
                 attention: Attention, dtype: torch.dtype, seed: int, device: torch.device):
        super().__init__()
        chosen = SIZES[size]
        q_heads = chosen.width // head_dim
        kv_heads = q_heads if kv_heads is None else kv_heads
        if kv_heads < 1 or q_heads % kv_heads:
            raise InvalidInputError(f"--kv-heads {kv_heads} does not divide the {q_heads} q heads "
                                    f"of --size {size} --head-dim {head_dim}")
        self.embedding = nn.Embedding(VOCABULARY, chosen.width)
        self.layers = nn.ModuleList(
            Layer(chosen, head_dim, kv_heads, mlp, attention, dtype)
            for _ in range(chosen.n_layer))
        self.norm = Norm(chosen.width, dtype)
        self.head = Linear(chosen.width, VOCABULARY)
        self._draw(seed, chosen.n_layer)
        self.to(device)
        # Not a buffer: those DDP would send around in every forward.
        self.rope = rotations(seqlen, head_dim).to(device)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Loss, float32, of tokens and targets [batch, len]."""
        x = self.embedding(tokens)
        rope = self.rope[:, :tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, rope)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def _draw(self, seed: int, n_layer: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # What is added to the stream starts smaller the more layers add to it.
                added = name.endswith("out.weight")
                weight.normal_(0.0, _INIT_STD / (2 * n_layer) ** 0.5 if added else _INIT_STD,
                               generator=generator)


def rotations(seqlen: int, head_dim: int) -> torch.Tensor:
    """Cosines and sines of rotary positions: float32, shape [2, seqlen, 1, head_dim / 2]."""
    frequency = _ROPE_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(seqlen, dtype=torch.float64)[:, None, None] * frequency
    return torch.stack([angle.cos(), angle.sin()]).float()


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Turn the two halves of each row of [batch, len, heads, head_dim]; in float32."""
    cos, sin = rope
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
    return turned.to(x.dtype)
