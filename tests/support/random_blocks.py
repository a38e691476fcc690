"""Random tensors in GGUF's block types, and a small model of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from outrider.backends.toy import RandomWeights
from outrider.models.config import ModelConfig
from outrider.models.gguf_file import GGUFWeights

_HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_SIZE = {"Q4_0": 0.02, "Q4_1": 0.02, "Q8_0": 0.001, "Q4_K": 0.0005, "Q5_K": 0.0003, "Q6_K": 0.0001}


def random_blocks(kind: str, rows: int, inputs: int, seed: int) -> Tensor:
    """[rows, bytes]: every bit pattern of weights and sub-block scales, sensible float scales of both signs."""
    draw = np.random.default_rng(seed)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = draw.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        scales = (_SIZE[kind] * draw.uniform(-1, 1, raw.shape[:2])).astype(np.float16)
        raw[..., at : at + 2] = scales[..., None].view(np.uint8)
    return torch.from_numpy(raw.reshape(rows, -1))


def floats(raw: Tensor, kind: str) -> Tensor:
    return torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType[kind]))


class RandomBlocks(GGUFWeights):
    """The weights of a model: products in these types, in turn, norms and biases in float32."""

    def __init__(self, config: ModelConfig, *kinds: str) -> None:
        self._config, self.kinds, self._shapes = config, kinds, RandomWeights(config, 1)

    def has(self, name: str) -> bool:
        return name.endswith(".weight") or (
            self._config.qkv_bias and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        )

    def kind(self, name: str) -> str:
        return self.kinds[sum(map(ord, name)) % len(self.kinds)]

    def blocks(self, name: str) -> Tensor:
        return random_blocks(self.kind(name), *self._shapes._shape(name), seed=sum(map(ord, name)))

    def mapped(self, name: str) -> npt.NDArray[np.uint8]:
        return self.blocks(name).numpy()

    def rows(self, name: str, ids: Tensor) -> Tensor:
        return floats(self.blocks(name)[ids], self.kind(name))

    def block_rows(self, name: str, ids: Tensor) -> Tensor:
        return self.blocks(name)[ids]

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        shape, draw = self._shapes._shape(name), torch.Generator().manual_seed(sum(map(ord, name)))
        if name.endswith(".bias"):
            return torch.randn(shape[0], generator=draw).to(dtype)
        if "norm" in name:
            size = self._config.head_dim if "self_attn" in name else shape[0]
            return (1 + torch.rand(size, generator=draw)).to(dtype)
        return floats(self.blocks(name), self.kind(name)).to(dtype)


class StoredEmbedding(RandomBlocks):
    """The same with products in Q4_K and an embedding of any type."""

    def __init__(self, config: ModelConfig, embedding: str) -> None:
        super().__init__(config, "Q4_K")
        self.type = GGMLQuantizationType[embedding]
        draw = np.random.default_rng(5)
        values = draw.normal(0, 1, (config.vocab_size, config.hidden_size)).astype(np.float32)
        try:
            self._rows = quants.quantize(values, self.type).view(np.uint8)
        except NotImplementedError:  # the package reads this type and does not write it
            self._rows = random_blocks(embedding, *values.shape, seed=5).numpy()

    def kind(self, name: str) -> str:
        return self.type.name if name == "embed_tokens.weight" else super().kind(name)

    def mapped(self, name: str) -> npt.NDArray[np.uint8]:
        assert name == "embed_tokens.weight"
        return self._rows

    def rows(self, name: str, ids: Tensor) -> Tensor:
        raw = self._rows if self.type.name not in ("F16", "F32") else self._rows.view(f"<f{self._rows.shape[1] // 256}")
        return torch.from_numpy(quants.dequantize(raw[ids.numpy()], self.type).astype(np.float32))

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        if name != "embed_tokens.weight":
            return super().get(name, dtype)
        return self.rows(name, torch.arange(self._rows.shape[0])).to(dtype)


def block_config(inputs: int = 256, **changes: object) -> ModelConfig:
    """A small model whose products have multiples of so many inputs."""
    base = ModelConfig(
        architecture="qwen2", vocab_size=75, hidden_size=inputs, layers=2, heads=inputs // 32, kv_heads=1, head_dim=32,
        intermediate_size=3 * inputs, norm_eps=1e-6, rope_theta=10_000.0, context_length=64,
    )  # fmt: skip
    return dataclasses.replace(base, rotary_dim=0, **changes)  # type: ignore[arg-type]
