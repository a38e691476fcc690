"""The target as a plain torch module: whole sequences at once, for features, for soft labels, and to be distilled.

Promise: hidden states and logits equal those of `models.transformer` up to rounding. Here nothing is row-invariant and
nothing is cached: it serves training, where speed counts and bits do not. It knows no losses.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..backends.transformer import WeightSource
from ..models.config import ModelConfig
from ..models.weights import expected
from .blocks import Block, Norm, Sizes, angles, product


class TargetNet(nn.Module):
    """A causal decoder; its state_dict has Hugging Face's names without the leading `model.`"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        sizes = sizes_of(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(config.layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @staticmethod
    def load(
        config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> TargetNet:
        """The target's own weights, frozen."""
        with torch.device("meta"):
            net = TargetNet(config)
        wide = torch.promote_types(dtype, torch.float32)
        tensors = {
            name: weights.get(name, wide if name.endswith("norm.weight") else dtype).to(device)
            for name in expected(config)
        }
        net.load_state_dict(tensors, assign=True)
        return net.requires_grad_(False).eval()

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [B, L] -> [B, L, H] in at least float32"""
        rows: Tensor = self.embed_tokens(tokens)
        return rows.to(torch.promote_types(rows.dtype, torch.float32))

    def forward(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """tokens [B, L] -> the residual streams after the tapped layers [B, L, taps*H], the normed last one [B, L, H].

        Sequences are padded on the right, if at all: no row sees what comes after it.
        """
        c, length = self.config, tokens.shape[1]
        x = self.embed(tokens)
        where = torch.arange(length, device=tokens.device)[None]  # [1, L]
        rope = angles(where, c.inverse_frequencies(), c.attention_factor, x.dtype)
        tapped = []
        for i, layer in enumerate(self.layers):
            mask = _window(length, c.window(i), tokens.device) if c.window(i) else None
            x = layer(x, None if i in c.no_rope_layers else rope, mask)
            if i in taps:
                tapped.append(x)
        return torch.cat(tapped, -1) if tapped else x[..., :0], self.norm(x)

    def logits(self, last: Tensor) -> Tensor:
        """The normed last stream [..., H] -> [..., V]"""
        if self.lm_head is not None:
            return product(self.lm_head, last)
        return nn.functional.linear(last.to(self.embed_tokens.weight.dtype), self.embed_tokens.weight)


def sizes_of(config: ModelConfig) -> Sizes:
    c = config
    shape = (c.hidden_size, c.intermediate_size, c.heads, c.kv_heads, c.head_dim, c.norm_eps)
    return Sizes(*shape, qkv_bias=c.qkv_bias, o_bias=c.o_bias, qk_norm=c.qk_norm)


def default_taps(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as EAGLE-3 takes them: never the last one where there are others."""
    wanted = {min(1, layers - 1), max(layers // 2 - 1, 0), max(layers - 4, 0)} if layers > 3 else set(range(layers))
    return tuple(sorted(wanted))


def _window(length: int, window: int, device: torch.device) -> Tensor:
    """A causal mask [1, 1, L, L] in which a row sees itself and the window - 1 rows before it."""
    rows = torch.arange(length, device=device)
    back = rows[:, None] - rows[None]  # [L, L] how far a key lies behind
    return ((back >= 0) & (back < window))[None, None]
