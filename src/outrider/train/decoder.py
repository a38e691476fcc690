"""The target as a plain torch module: whole sequences at once, differentiable, parameters with Hugging Face's names.

Hidden states and logits equal those of the serving decoder up to rounding. Nothing here is row-invariant or cached.
B sequences of L rows, H hidden size, h heads of d dimensions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..backends.transformer import WeightSource
from ..errors import ModelError
from ..models.config import ModelConfig
from ..models.weights import LayerSubset, cut_config, expected

Rope = tuple[Tensor, Tensor]  # cos and sin [B or 1, 1, L, r/2]


@dataclass(frozen=True)
class LayerSizes:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False


class RmsNorm(nn.Module):
    """Computed in at least float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))  # [size]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape, in the wider of float32 and x's type."""
        wide = widened(x)
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(wide.dtype)


class Attention(nn.Module):
    """Projections to heads and back; the caller runs the attention between them."""

    def __init__(self, sizes: LayerSizes, inputs: int) -> None:
        super().__init__()
        self.sizes = sizes
        inner, narrow = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(inputs, inner, bias=sizes.qkv_bias)
        self.k_proj = nn.Linear(inputs, narrow, bias=sizes.qkv_bias)
        self.v_proj = nn.Linear(inputs, narrow, bias=sizes.qkv_bias)
        self.o_proj = nn.Linear(inner, sizes.hidden, bias=sizes.o_bias)
        if sizes.qk_norm:
            self.q_norm, self.k_norm = RmsNorm(sizes.head_dim, sizes.eps), RmsNorm(sizes.head_dim, sizes.eps)

    def split(self, x: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, L, inputs] -> q, k, v [B, h, L, d] after rope; keys and values repeated for their query heads."""
        s = self.sizes
        q = _heads(linear(self.q_proj, x), s.heads)  # [B, h, L, d]
        k, v = _heads(linear(self.k_proj, x), s.kv_heads), _heads(linear(self.v_proj, x), s.kv_heads)
        if s.qk_norm:
            q, k = self.q_norm(q).to(q.dtype), self.k_norm(k).to(k.dtype)
        if rope is not None:
            q, k = _rotate(q, *rope).to(v.dtype), _rotate(k, *rope).to(v.dtype)
        times = s.heads // s.kv_heads
        return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)

    def join(self, mixed: Tensor) -> Tensor:
        """mixed [B, h, L, d] -> [B, L, H]"""
        return linear(self.o_proj, mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """down(silu(gate) * up)"""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.intermediate, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]"""
        return linear(self.down_proj, F.silu(linear(self.gate_proj, x)) * linear(self.up_proj, x))


class DecoderLayer(nn.Module):
    """A pre-norm layer."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.self_attn = Attention(sizes, sizes.hidden)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.mlp = Mlp(sizes)

    def forward(self, x: Tensor, rope: Rope | None, mask: Tensor | None) -> Tensor:
        """x [B, L, H]; mask [B or 1, 1, L, L], True where a row may attend, None for causal."""
        q, k, v = self.self_attn.split(self.input_layernorm(x), rope)
        x = x + self.self_attn.join(attend(q, k, v, mask))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


def insist_trainable(config: ModelConfig) -> None:
    """Refuse a target whose layers are not a Llama's."""
    if not config.llama_like:
        raise ModelError(f"A drafter for a target of the family {config.architecture} cannot be trained yet.")


class TargetNet(nn.Module):
    """A causal decoder; its state_dict has Hugging Face's names without the leading `model.`"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        insist_trainable(config)
        self.config = c = config
        shape = (c.hidden_size, c.intermediate_size, c.heads, c.kv_heads, c.head_dim, c.norm_eps)
        sizes = LayerSizes(*shape, qkv_bias=c.qkv_bias, o_bias=c.o_bias, qk_norm=c.qk_norm)
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(c.layers))
        self.norm = RmsNorm(c.hidden_size, c.norm_eps)
        self.lm_head = None if c.tied else nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    @staticmethod
    def load(
        config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> TargetNet:
        """The target with its own weights, frozen; norms in at least float32."""
        with torch.device("meta"):
            net = TargetNet(config)
        wide = torch.promote_types(dtype, torch.float32)
        tensors = {
            name: weights.get(name, wide if name.endswith("norm.weight") else dtype).to(device)
            for name in expected(config)
        }
        net.load_state_dict(tensors, assign=True)
        return net.requires_grad_(False).eval()

    @property
    def output_table(self) -> Tensor:
        """[V, H] the weights of the output layer."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, L] -> [B, L, H] in at least float32"""
        return widened(self.embed_tokens(tokens))

    def forward(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """tokens [B, L] -> hidden states after the tapped layers [B, L, taps*H], the last after the norm [B, L, H].

        Sequences may be padded on the right: no row attends to what comes after it.
        """
        c, length = self.config, tokens.shape[1]
        x = self.embed(tokens)
        positions = torch.arange(length, device=tokens.device)[None]  # [1, L]
        rope = rotary(positions, c.inverse_frequencies(), c.attention_factor, x.dtype)
        tapped = []
        for i, layer in enumerate(self.layers):
            mask = _window_mask(length, c.window(i), tokens.device) if c.window(i) else None
            x = layer(x, None if i in c.no_rope_layers else rope, mask)
            if i in taps:
                tapped.append(x)
        return torch.cat(tapped, -1) if tapped else x[..., :0], self.norm(x)

    def logits(self, last: Tensor) -> Tensor:
        """The last hidden states after the norm [..., H] -> [..., V]"""
        return F.linear(last.to(self.output_table.dtype), self.output_table)


def default_taps(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as in EAGLE-3: never the last one where there are others."""
    taps = {min(1, layers - 1), max(layers // 2 - 1, 0), max(layers - 4, 0)} if layers > 3 else set(range(layers))
    return tuple(sorted(taps))


def cut_target(
    config: ModelConfig, weights: WeightSource, layers: int, train_embedding: bool, device: torch.device | str
) -> TargetNet:
    """A trainable float32 model of `layers` of the target's layers: the last one, or evenly from first to last.

    The embedding and the output layer stay frozen unless `train_embedding`: they are most of a small model.
    """
    chosen = chosen_layers(config, layers)
    net = TargetNet.load(
        cut_config(config, chosen), LayerSubset(weights, chosen), torch.float32, device
    ).requires_grad_(True)
    net.embed_tokens.requires_grad_(train_embedding)
    if net.lm_head is not None:
        net.lm_head.requires_grad_(train_embedding)
    return net


def chosen_layers(config: ModelConfig, layers: int) -> list[int]:
    """The last of the target's layers, or so many evenly from first to last."""
    if not 1 <= layers <= config.layers:
        raise ModelError(f"--layers is {layers}, but the target has {config.layers}.")
    last = config.layers - 1
    return [round(i * last / (layers - 1)) for i in range(layers)] if layers > 1 else [last]


# ---------------------------------------------------------------- operations


def widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A product in the type of the weights; hidden states around it may be wider."""
    y: Tensor = layer(x.to(layer.weight.dtype))
    return y


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q, k, v [B, h, L, d] -> [B, h, L, d]; causal without a mask."""
    mixed: Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return mixed


def rotary(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Rope:
    """cos and sin [B or 1, 1, L, r/2] of positions [B or 1, L] under frequencies [r/2] float64."""
    angles = positions.double()[:, None, :, None] * frequencies.to(positions.device)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope on x [B, h, L, d]: the first r of d dimensions, with the two halves as pairs."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest.to(torch.promote_types(x.dtype, cos.dtype))], -1)


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, L, heads*d] -> [B, heads, L, d]"""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """A causal mask [1, 1, L, L] in which a row attends to itself and the window - 1 rows before it."""
    rows = torch.arange(length, device=device)
    distance = rows[:, None] - rows[None]  # [L, L]
    return ((distance >= 0) & (distance < window))[None, None]
