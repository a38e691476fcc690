"""Seeded tiny models, real in everything but size: for tests, docs and `check_drafter`.

`toy(seed)` is a Llama with random weights in float64, small enough for thousands of passes a second; `blurred` is a
weaker copy of it, which agrees with it often but not always, as a draft model does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.config import ModelConfig
from .transformer import Transformer

VOCABULARY = 48


class RandomWeights:
    """Weights drawn from a seed by name; `blur` mixes in other random numbers."""

    def __init__(self, config: ModelConfig, seed: int, blur: float = 0.0) -> None:
        self.config, self.seed, self.blur = config, seed, blur

    def has(self, name: str) -> bool:
        return name.endswith(".weight") and not (self.config.tied and name.startswith("lm_head"))

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        exact = self._draw(name, self.seed)
        mixed = exact if not self.blur else (1 - self.blur) * exact + self.blur * self._draw(name, self.seed + 1)
        return mixed.to(dtype)

    def _draw(self, name: str, seed: int) -> Tensor:
        shape = self._shape(name)
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sum(map(ord, name)) * 7919 + hash_of(name))
        scale = 3.0 if name.startswith(("embed", "lm_head")) else 1.5 / shape[1] ** 0.5
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    def _shape(self, name: str) -> tuple[int, ...]:
        c = self.config
        inner = c.heads * c.head_dim
        shapes = {
            "embed_tokens": (c.vocab_size, c.hidden_size),
            "lm_head": (c.vocab_size, c.hidden_size),
            "q_proj": (inner, c.hidden_size),
            "k_proj": (c.kv_heads * c.head_dim, c.hidden_size),
            "v_proj": (c.kv_heads * c.head_dim, c.hidden_size),
            "o_proj": (c.hidden_size, inner),
            "gate_proj": (c.intermediate_size, c.hidden_size),
            "up_proj": (c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
        }
        return shapes.get(name.split(".")[-2], (c.hidden_size,))


def hash_of(name: str) -> int:
    """A small stable hash: Python's own changes from run to run."""
    value = 0
    for character in name:
        value = (value * 131 + ord(character)) % 1_000_000_007
    return value


def toy_config(layers: int = 3, vocabulary: int = VOCABULARY, context: int = 512) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=vocabulary,
        hidden_size=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        norm_eps=1e-6,
        rope_theta=10_000.0,
        tied=False,
        context_length=context,
        eos_ids=frozenset({0}),
    )


def toy(seed: int = 1, blur: float = 0.0, dtype: torch.dtype = torch.float64, layers: int = 3) -> Transformer:
    """A tiny target; with blur, a drafter for the toy of the same seed."""
    config = toy_config(layers)
    return Transformer(config, RandomWeights(config, seed, blur), dtype)
