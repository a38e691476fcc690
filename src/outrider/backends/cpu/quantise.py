"""Weights in eight bits: what they are, and how a model's are found.

A weight is scale[n] * w with a signed byte w, one scale per output. A row of inputs is scale * q with signed bytes
too, except in a few inputs of each product (outliers, found by running some text through the float model), whose q has
two bytes: they would otherwise leave the other inputs only a few levels. `quantise_rows` says what that means in torch;
native/int8.h does the same.

The promise: layers are read, calibrated and freed one by one, so that a model need not fit into memory in float. It
knows weights' names and the order in which kernels want them; it does not know planes, passes or files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.config import ModelConfig
from .. import ops
from ..rows import Rows
from ..transformer import WeightSource, _rope_tables

OUTPUTS = 32  # of a block of packed weights, as in native/int8.h
HALF = OUTPUTS // 2
_MOST_OUTLIERS = 64
PRODUCTS = ("qkv", "out", "gate_up", "down")
Tensors = dict[str, Tensor]
Progress = Callable[[int, int], None]  # layers done, layers in all


@dataclass(frozen=True)
class Settings:
    """What decides the bytes."""

    # Of each product, one input in so many has two bytes, 64 at most. Measured on SmolLM2: `down` and `qkv` are the
    # ones that suffer without, and each of these costs as many bytes of every output's weights.
    qkv: int = 18
    out: int = 72
    gate_up: int = 36
    down: int = 24
    head: int = 72
    calibration: int = 512  # tokens of text

    def outliers(self, name: str, inputs: int) -> int:
        """How many, of a product like "head" or "layers.3.qkv": a multiple of 4."""
        share: int = getattr(self, name.rpartition(".")[2])
        return min(_MOST_OUTLIERS, -(-inputs // share // 4) * 4) if share else 0


DEFAULT = Settings()


@dataclass(frozen=True)
class Quantised:
    """One product's weights, packed."""

    weight: Tensor  # [blocks, (outliers + inputs)/4, 32, 4] uint8: w + 128; outliers' columns first, then all
    scale: Tensor  # [blocks * 32]
    bias: Tensor | None  # [blocks * 32]
    outliers: Tensor  # [O] int64: which inputs have two bytes
    outputs: int  # those of a gated pair count twice, padding to whole blocks included
    inputs: int


# ------------------------------------------------------------ one product


def quantise(weight: Tensor, bias: Tensor | None, largest: Tensor, outliers: int, gated: bool = False) -> Quantised:
    """weight [N, K] and bias [N] floats; largest [K]: how large each input gets. gated: the first half are gates."""
    if gated:
        weight, bias = _interleaved(weight), None if bias is None else _interleaved(bias)
    outputs, inputs = weight.shape
    scale = weight.abs().amax(1) / 127  # [N]; a NaN in a row stays one in its scale, and so in its results
    scale[scale == 0] = 1
    whole = (weight / scale[:, None]).round().nan_to_num(0).clamp(-127, 127).to(torch.int16)  # [N, K]
    strong = (
        largest.argsort(descending=True, stable=True)[: min(outliers, _MOST_OUTLIERS, inputs // 4 * 4)].sort().values
    )  # [O]
    both = F.pad(torch.cat([whole[:, strong], whole], 1), (0, -inputs % 4, 0, -outputs % OUTPUTS))
    blocks = (both + 128).to(torch.uint8).view(-1, OUTPUTS, both.shape[1] // 4, 4).transpose(1, 2)
    more = (0, -outputs % OUTPUTS)
    bias = None if bias is None else F.pad(bias.float(), more)
    return Quantised(blocks.contiguous(), F.pad(scale.float(), more), bias, strong, outputs, inputs)


def _interleaved(both: Tensor) -> Tensor:
    """[2I, ...] gates then ups -> [ceil(I/16) * 32, ...]: 16 gates, their 16 ups, and so on; padded with zeros."""
    gate, up = both.chunk(2)
    more = [0, 0] * (both.dim() - 1) + [0, -gate.shape[0] % HALF]
    pairs = [F.pad(x, more).view(-1, HALF, *both.shape[1:]) for x in (gate, up)]  # [I/16, 16, ...] each
    return torch.stack(pairs, 1).reshape(-1, *both.shape[1:])


def quantise_rows(x: Tensor, outliers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K] -> highs [T, O], lows [T, K] int8, scale [T]: x is about scale * (lows, + 256 highs at outliers)."""
    rest = x.clone()
    rest[:, outliers] = 0
    strong = x[:, outliers]  # [T, O]
    few = strong.abs().amax(1) / 32639 if outliers.numel() else x.new_zeros(x.shape[0])
    scale = torch.maximum(rest.abs().amax(1) / 127, few)  # [T]
    inverse = torch.where(scale > 1e-30, 1 / scale, 0)[:, None]
    lows = (rest * inverse).nan_to_num(0, 0, 0).round().to(torch.int32)
    whole = (strong * inverse).nan_to_num(0, 0, 0).round().to(torch.int32)
    highs = (whole + 128) >> 8
    lows[:, outliers] = whole - 256 * highs
    return highs.to(torch.int8), lows.to(torch.int8), scale + (x * 0).sum(1)


# ------------------------------------------------------------ a whole model


def calibrated(
    config: ModelConfig,
    weights: WeightSource,
    ids: list[int],
    settings: Settings = DEFAULT,
    progress: Progress | None = None,
) -> Tensors:
    """Every tensor of the quantised model by name. `ids`: text whose inputs say which of them are outliers."""
    run = _Calibration(config, weights, ids[: settings.calibration], settings)
    with torch.inference_mode():
        for i in range(config.layers):
            run.layer(i)
            if progress is not None:
                progress(i + 1, config.layers + 1)
        run.head()
    return run.tensors


class _Calibration:
    """Carries the residual stream of a text from layer to layer, and leaves the layers quantised behind it."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ids: list[int], settings: Settings) -> None:
        self.config, self.source, self.settings = config, weights, settings
        self.tensors: Tensors = {"embedding": weights.get("embed_tokens.weight", torch.bfloat16).contiguous()}
        tokens = torch.tensor(ids or [0])
        self.x = self.tensors["embedding"][tokens].float()  # [n, H]
        n = tokens.shape[0]
        order = torch.arange(n)
        self.rope = _rope_tables(config, n, torch.float32, self.x.device)
        line, table = torch.zeros(n, dtype=torch.long), order[None].int().contiguous()
        self.rows = Rows(tokens, order, order, line, order + 1, table, None, order)

    def layer(self, i: int) -> None:
        c, at = self.config, f"layers.{i}."
        h = self._norm(f"{at}input_layernorm.weight", f"{at}attention_norm")
        qkv = self._product(f"{at}self_attn.", ("q_proj", "k_proj", "v_proj"), f"{at}qkv", h)
        norms = None
        if c.qk_norm:
            q_norm, k_norm = (self._vector(f"{at}self_attn.{n}.weight", f"{at}{n}") for n in ("q_norm", "k_norm"))
            norms = (q_norm, k_norm, c.norm_eps)
        planes = self.x.new_empty(2, self.x.shape[0], c.kv_heads, c.head_dim)
        cos, sin = self.rope if i not in c.no_rope_layers else (self.rope[0][:, :0], self.rope[1][:, :0])
        q = ops.rope_store(qkv, cos, sin, planes[0], planes[1], self.rows.slots, c.heads, c.kv_heads, norms)
        mixed = ops.attend(q, planes[0], planes[1], self.rows, c.head_dim**-0.5, torch.float32, c.window(i))
        self.x = self.x + self._product(f"{at}self_attn.", ("o_proj",), f"{at}out", mixed)
        h = self._norm(f"{at}post_attention_layernorm.weight", f"{at}mlp_norm")
        both = self._product(f"{at}mlp.", ("gate_proj", "up_proj"), f"{at}gate_up", h)
        self.x = self.x + self._product(f"{at}mlp.", ("down_proj",), f"{at}down", ops.silu_mul(both))

    def head(self) -> None:
        h = self._norm("norm.weight", "norm")
        weight = self.source.get("embed_tokens.weight" if self.config.tied else "lm_head.weight", torch.float32)
        self._keep("head", quantise(weight, None, h.abs().amax(0), self._outliers("head", h)))

    def _vector(self, name: str, ours: str) -> Tensor:
        self.tensors[ours] = self.source.get(name, torch.float32).contiguous()
        return self.tensors[ours]

    def _norm(self, name: str, ours: str) -> Tensor:
        return ops.add_norm(self.x, None, self._vector(name, ours), self.config.norm_eps, torch.float32)

    def _product(self, prefix: str, names: tuple[str, ...], ours: str, x: Tensor) -> Tensor:
        """x Wᵀ + b in float; its quantised weights are kept."""
        weight = torch.cat([self.source.get(f"{prefix}{n}.weight", torch.float32) for n in names])  # [N, K]
        biased = self.source.has(f"{prefix}{names[0]}.bias")
        bias = torch.cat([self.source.get(f"{prefix}{n}.bias", torch.float32) for n in names]) if biased else None
        gated = ours.endswith("gate_up")
        self._keep(ours, quantise(weight, bias, x.abs().amax(0), self._outliers(ours, x), gated))
        return F.linear(x, weight, bias)

    def _outliers(self, name: str, x: Tensor) -> int:
        return self.settings.outliers(name, x.shape[1])

    def _keep(self, name: str, q: Quantised) -> None:
        self.tensors |= {f"{name}.weight": q.weight, f"{name}.scale": q.scale, f"{name}.outliers": q.outliers}
        if q.bias is not None:
            self.tensors[f"{name}.bias"] = q.bias


def product(tensors: Tensors, name: str, config: ModelConfig) -> Quantised:
    """One product of a model, by its name: "head", or "layers.3.qkv"."""
    c, kind = config, name.rpartition(".")[2]
    inner, pair = c.heads * c.head_dim, -(-c.intermediate_size // HALF) * OUTPUTS
    outputs, inputs = {
        "qkv": (inner + 2 * c.kv_heads * c.head_dim, c.hidden_size),
        "out": (c.hidden_size, inner),
        "gate_up": (pair, c.hidden_size),
        "down": (c.hidden_size, c.intermediate_size),
        "head": (c.vocab_size, c.hidden_size),
    }[kind]
    parts = [tensors[f"{name}.{part}"] for part in ("weight", "scale", "outliers")]
    return Quantised(parts[0], parts[1], tensors.get(f"{name}.bias"), parts[2], outputs, inputs)
