"""Weights in low precision for benchmarks: any model rounded to four bits, and random ones of a model's shape.

    large = rounded(twin.seven(open_checkpoint()))     # the 7.04B twin in int4, groups of 128, float16 scales

`Rounded` is what AWQ and GPTQ files hold, made by plain rounding: good enough to measure speed and exactness, not to
judge quality. `RandomFile` has the block types of a Q4_K_M file, for a model whose file is not at hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.models.config import ModelConfig
from outrider.models.precision import GGUF, INT4
from outrider.models.quantised import Grouped
from outrider.models.weights import Weights, expected

GROUP = 128
_HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_SIZES = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176)}
_SIZES["Q6_K"] = (256, 210)


def round_to_groups(weight: Tensor, group: int = GROUP) -> Grouped:
    """Each group's range in 16 steps. weight [N, K] floats, K a multiple of the group."""
    parts = weight.float().unflatten(1, (-1, group))  # [N, G, group]
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).to(torch.float16)  # [N, G]
    zero = (-low / scale.float()).round().clamp(0, 15).to(torch.uint8)
    fields = (parts / scale.float()[..., None] + zero.float()[..., None]).round().clamp(0, 15).to(torch.uint8)
    return Grouped(fields.flatten(1), scale, zero, group, 4)


class Rounded(Weights):
    """Another source's weights with the products of the layers in int4."""

    stored_in = INT4

    def __init__(self, source: Any) -> None:
        self.source = source

    def names(self) -> frozenset[str]:
        return frozenset(self.source.names())

    def has(self, name: str) -> bool:
        return bool(self.source.has(name))

    def shape(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.source.shape(name)
        return shape

    def grouped(self, name: str) -> Grouped | None:
        if not name.endswith("_proj.weight"):
            return None
        return round_to_groups(self.source.get(name, torch.float32))

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        weight = self.grouped(name)
        made: Tensor = self.source.get(name, dtype) if weight is None else weight.floats(dtype)
        return made


def rounded(checkpoint: Any) -> Any:
    """The same model with four-bit layers."""
    return replace(checkpoint, name=f"{checkpoint.name}-w4", weights=Rounded(checkpoint.weights))


class Random(Weights):
    """Random weights of a model's shape, made on the device; the same each time."""

    def __init__(self, config: ModelConfig, device: str = "cuda") -> None:
        self.config, self.device, self._shapes = config, device, expected(config)

    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dice(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(sum(map(ord, name)))

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        noise = torch.randn(self.shape(name), generator=self.dice(name), dtype=dtype, device=self.device)
        return noise * 0.02 + (1.0 if "norm" in name else 0.0)


class RandomFile(Random):
    """The same in the block types of a Q4_K_M file: half of the layers' v and down, and the head, have six bits."""

    stored_in = GGUF

    def kind(self, name: str) -> str:
        if name.startswith("lm_head"):
            return "Q6_K"
        six = name.endswith(("v_proj.weight", "down_proj.weight")) and int(name.split(".")[1]) % 2 == 0
        return "Q6_K" if six else "Q4_K" if name.endswith(("_proj.weight", "embed_tokens.weight")) else "F32"

    def blocks(self, name: str) -> Tensor:
        outputs, inputs = self.shape(name)
        return random_blocks(self.kind(name), outputs, inputs, self.dice(name))


def random_blocks(kind: str, outputs: int, inputs: int, dice: torch.Generator) -> Tensor:
    """[N, bytes]: random fields with small scales of both signs."""
    block, size = _SIZES[kind]
    shape = (outputs, inputs // block, size)
    raw = torch.randint(0, 256, shape, generator=dice, dtype=torch.uint8, device=dice.device)
    for at in _HALVES[kind]:
        scale = (torch.rand(shape[:2], generator=dice, device=dice.device) - 0.5) * 2e-3
        raw[..., at : at + 2] = scale.to(torch.float16)[..., None].view(torch.uint8)
    return raw.flatten(1)
