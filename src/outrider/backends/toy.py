"""Tiny seeded models for tests, docs and `check_drafter`: a Llama with random weights in float64, thousands of passes
a second. With `blur`, its choices often but not always agree with those of the toy of the same seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.config import ModelConfig
from .transformer import Transformer

VOCABULARY = 48


class RandomWeights:
    """Weights drawn from a seed by name; `blur` (0 to 1) is the share of other random numbers in them."""

    def __init__(self, config: ModelConfig, seed: int, blur: float = 0.0) -> None:
        self.config, self.seed, self.blur = config, seed, blur

    def has(self, name: str) -> bool:
        return name.endswith(".weight") and not (self.config.tied and name.startswith("lm_head"))

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        weight = self._draw(name, self.seed)
        if self.blur:
            weight = (1 - self.blur) * weight + self.blur * self._draw(name, self.seed + 1)
        return weight.to(dtype)

    def _draw(self, name: str, seed: int) -> Tensor:
        shape = self._shape(name)
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(map(ord, name)) * 7919 + hash_of(name))
        scale = 3.0 if name.startswith(("embed", "lm_head")) else 1.5 / shape[1] ** 0.5
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    def _shape(self, name: str) -> tuple[int, ...]:
        c, kind = self.config, name.split(".")[-2]
        inner, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
        outputs = {"q_proj": inner, "k_proj": narrow, "v_proj": narrow, "embed_tokens": c.vocab_size}
        outputs |= {"lm_head": c.vocab_size, "gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
        inputs = {"o_proj": inner, "down_proj": c.intermediate_size}
        if kind in outputs:
            return outputs[kind], c.hidden_size
        return (c.hidden_size, inputs[kind]) if kind in inputs else (c.hidden_size,)


def hash_of(name: str) -> int:
    """A hash that is the same in every process, unlike Python's own."""
    value = 0
    for character in name:
        value = (value * 131 + ord(character)) % 1_000_000_007
    return value


def toy_config(layers: int = 3, vocabulary: int = VOCABULARY, context: int = 512) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=vocabulary, hidden_size=32, intermediate_size=48, layers=layers,
        heads=4, kv_heads=2, head_dim=8, norm_eps=1e-6, rope_theta=10_000.0, tied=False,
        context_length=context, eos_ids=frozenset({0}),
    )  # fmt: skip


def toy(seed: int = 1, blur: float = 0.0, dtype: torch.dtype = torch.float64, layers: int = 3) -> Transformer:
    """A tiny target; with blur, a draft model for the toy of the same seed."""
    config = toy_config(layers)
    return Transformer(config, RandomWeights(config, seed, blur), dtype)
