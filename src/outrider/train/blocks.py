"""The pieces that a decoder is made of, as torch modules whose parameters have Hugging Face's names.

Promise: the same mathematics as `models.transformer`, whole sequences at once and differentiable. They know tensors;
which model they belong to is not their business. B sequences, L rows each, H hidden size, h heads, g key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """What one layer needs to know."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False


class Norm(nn.Module):
    """RMS norm, computed in at least float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))  # [size]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape, in the wider of float32 and x's type."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(wide.dtype)


class Attention(nn.Module):
    """Projections to heads and back; who attends to whom is the caller's."""

    def __init__(self, sizes: Sizes, inputs: int) -> None:
        super().__init__()
        self.sizes = sizes
        inner, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(inputs, inner, bias=sizes.qkv_bias)
        self.k_proj = nn.Linear(inputs, narrow, bias=sizes.qkv_bias)
        self.v_proj = nn.Linear(inputs, narrow, bias=sizes.qkv_bias)
        self.o_proj = nn.Linear(inner, sizes.hidden, bias=sizes.o_bias)
        if sizes.qk_norm:
            self.q_norm, self.k_norm = Norm(sizes.head_dim, sizes.eps), Norm(sizes.head_dim, sizes.eps)

    def split(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, L, inputs] -> q, k, v [B, h, L, d], turned to their positions; keys repeated for their queries."""
        s = self.sizes
        q = _heads(product(self.q_proj, x), s.heads)  # [B, h, L, d]
        k, v = _heads(product(self.k_proj, x), s.kv_heads), _heads(product(self.v_proj, x), s.kv_heads)
        if s.qk_norm:
            q, k = self.q_norm(q).to(q.dtype), self.k_norm(k).to(k.dtype)
        if rope is not None:
            q, k = turn(q, *rope).to(v.dtype), turn(k, *rope).to(v.dtype)
        times = s.heads // s.kv_heads
        return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)

    def join(self, mixed: Tensor) -> Tensor:
        """mixed [B, h, L, d] -> [B, L, H]"""
        return product(self.o_proj, mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """down(silu(gate) * up)"""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]"""
        return product(self.down_proj, F.silu(product(self.gate_proj, x)) * product(self.up_proj, x))


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = Norm(sizes.hidden, sizes.eps)
        self.self_attn = Attention(sizes, sizes.hidden)
        self.post_attention_layernorm = Norm(sizes.hidden, sizes.eps)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """x [B, L, H]; mask [B or 1, 1, L, L], True where a row may look, None for causal."""
        q, k, v = self.self_attn.split(self.input_layernorm(x), rope)
        x = x + self.self_attn.join(attend(q, k, v, mask))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q, k, v [B, h, L, d] -> [B, h, L, d]; causal without a mask."""
    mixed: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return mixed


def product(layer: nn.Linear, x: Tensor) -> Tensor:
    """A product in the weights' own type: the stream around it may be wider."""
    out: Tensor = layer(x.to(layer.weight.dtype))
    return out


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on x [B, h, L, d]; cos, sin [B or 1, 1, L, r/2]: the first r of d dimensions turn, halves as pairs."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest.to(torch.promote_types(x.dtype, cos.dtype))], -1)


def angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B or 1, 1, L, r/2] of positions [B or 1, L] under frequencies [r/2] float64."""
    turned = positions.double()[:, None, :, None] * frequencies.to(positions.device)
    return (turned.cos() * factor).to(dtype), (turned.sin() * factor).to(dtype)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, L, heads*d] -> [B, heads, L, d]"""
    apart: Tensor = x.unflatten(2, (heads, -1))
    return apart.transpose(1, 2)
