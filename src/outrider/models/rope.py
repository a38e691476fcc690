"""Rope's variants: how a long context stretches the rotation of each pair of dimensions.

Promise: the frequencies equal those of `transformers` (Hugging Face files) and llama.cpp (GGUF). This file knows
frequencies; applying them to queries and keys is the decoder's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ModelError

if TYPE_CHECKING:
    from .gguf_file import GGUF


@dataclass(frozen=True)
class RopeScaling:
    """How rope's frequencies are stretched for long contexts."""

    kind: str  # linear, llama3, yarn, factors
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # yarn: cos and sin are multiplied by it
    factors: tuple[float, ...] = ()  # factors: one divisor per frequency, as GGUF's rope_freqs.weight has them

    def apply(self, plain: Tensor, theta: float) -> Tensor:
        """Stretch the plain frequencies [rotary_dim/2] float64."""
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "factors":
            return plain / torch.tensor(self.factors, dtype=torch.float64)
        return _llama3(plain, self) if self.kind == "llama3" else _yarn(plain, self, theta)


def _llama3(plain: Tensor, s: RopeScaling) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    turns = s.original_context * plain / (2 * math.pi)  # [rotary_dim/2] turns within the original context
    blend = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return plain * (blend + (1 - blend) / s.factor)


def _yarn(plain: Tensor, s: RopeScaling, theta: float) -> Tensor:
    """As llama3, with the blend linear in the pair's index (arXiv 2309.00071)."""
    dim = 2 * len(plain)

    def index_of(turns: float) -> float:
        return dim * math.log(s.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(s.beta_fast), index_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * ((1 - ramp) + ramp / s.factor)


def hf_parameters(data: Mapping[str, Any]) -> dict[str, Any]:
    """One dictionary from both spellings: transformers 5's rope_parameters, and rope_theta beside rope_scaling."""
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    rope = dict(rope.get("full_attention", rope)) if isinstance(rope, dict) else {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if rope.get(key) is None and data.get(key) is not None:
            rope[key] = data[key]
    return {key: value for key, value in rope.items() if value is not None}


def hf_scaling(rope: Mapping[str, Any], data: Mapping[str, Any], context: int) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = int(rope.get("original_max_position_embeddings") or data.get("original_max_position_embeddings") or 0)
    if kind == "default":
        return None
    factor = float(rope.get("factor") or (context / original if original else 1.0))
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind == "llama3":
        low, high = float(rope.get("low_freq_factor", 1.0)), float(rope.get("high_freq_factor", 4.0))
        return RopeScaling("llama3", factor, original or 8192, low_freq_factor=low, high_freq_factor=high)
    if kind != "yarn":
        raise ModelError(f"The model's rope scaling '{kind}' is not supported; Outrider knows linear, llama3 and yarn.")
    return RopeScaling(
        "yarn",
        factor,
        original or context,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_yarn_attention(rope, factor),
    )


def _yarn_attention(rope: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return mscale(float(rope["mscale"])) / mscale(float(rope["mscale_all_dim"]))
    return mscale(1.0)


def stretched(context: int, scaling: RopeScaling | None) -> int:
    """Yarn files often keep the unstretched length as the model's own."""
    if scaling is None or scaling.kind != "yarn":
        return context
    return max(context, int(scaling.original_context * scaling.factor))


def gguf_scaling(own: Mapping[str, Any], file: GGUF) -> RopeScaling | None:
    kind = str(own.get("rope.scaling.type", "linear" if own.get("rope.scale_linear") else "none"))
    factor = float(own.get("rope.scaling.factor") or own.get("rope.scale_linear") or 1.0)
    if "rope_freqs.weight" in file.tensors:  # llama3's scaling, already worked out by the converter
        stretch = factor if kind == "linear" else 1.0
        return RopeScaling("factors", factors=tuple(f * stretch for f in file.array("rope_freqs.weight").tolist()))
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    original = int(own.get("rope.scaling.original_context_length") or own.get("context_length") or 0)
    rope = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    return hf_scaling(rope | _gguf_yarn(own, factor), {}, original)


def _gguf_yarn(own: Mapping[str, Any], factor: float) -> dict[str, Any]:
    extra = {"attention_factor": float(own.get("rope.scaling.attn_factor", 1.0)) * _yarn_attention({}, factor)}
    betas = {key: own.get(f"rope.scaling.yarn_{key}") for key in ("beta_fast", "beta_slow")}
    return extra | {key: value for key, value in betas.items() if value}
