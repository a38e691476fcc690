"""One decoder for the Llama family: Llama 2/3, SmolLM2/3, Mistral, Qwen2/2.5, Qwen3, by configuration.

The promise: a row's logits are the same bits whichever rows share its pass (float32 and bfloat16 on a CPU with
oneDNN and on a GPU; see `linear` and `ops`). The residual stream is float32 even when weights are bfloat16, and so are
K and V on a CPU.
It knows rows and planes, not sequences, drafts or text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..engine.cache import Plane
from ..errors import ModelError
from ..models.config import ModelConfig
from ..types import Output
from . import WHOLE, Model, Part, PlaneShape, ops, with_index
from .linear import linear, summed
from .rows import Rows

Delta = Any  # what a block adds to the stream: [T, H], on a GPU unsummed `Parts`; or None


class WeightSource(Protocol):
    """Tensors by Hugging Face's names, without the leading `model.`"""

    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def has(self, name: str) -> bool: ...


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor  # [H]
    qkv: Any  # a product, as made by `linear`
    head_norms: tuple[Tensor, Tensor, float] | None  # Qwen3: RMS norms of q and k [d], eps
    out: Any
    mlp_norm: Tensor  # [H]
    gate_up: Any
    down: Any
    rope: bool
    window: int  # 0 reads the whole context


class Transformer(Model):
    """A causal decoder; all state between passes is in the plane."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        length: int | None = None,  # positions of the longest sequence
        int8: bool = False,  # on a GPU: the layers' weights as int8 with a scale for each output
    ) -> None:
        self.config, self.device = config, with_index(device)
        self.compute, self.dtype = dtype, torch.int8 if int8 else dtype  # of products; of most weights
        self.stream = torch.promote_types(dtype, torch.float32)  # dtype of the residual stream
        load = _Loader(config, weights, dtype, self.stream, self.device, int8)
        self.embedding = load.tensor("embed_tokens.weight")  # [V, H]
        self.layers = [load.layer(i) for i in range(config.layers)]
        self.norm = load.norm("norm.weight")
        self.head = linear(self.embedding if config.tied else load.tensor("lm_head.weight"))
        self.exact = bool(self.head.exact)  # whether every product is row-invariant on this machine
        self.cos, self.sin = rope_tables(config, length or config.context_length, self.stream, self.device)

    @property
    def plane_shape(self) -> PlaneShape:
        dtype = self.compute if self.device.type == "cuda" else self.stream
        return PlaneShape(self.config.layers, self.config.kv_heads, self.config.head_dim, dtype)

    @torch.inference_mode()
    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        plane.count_pass()
        # x [T, H] is the residual stream; `delta` [T, H] is the last block's output, added by the next norm.
        x = self.embedding[rows.tokens].to(self.stream) if x is None else x.clone()
        rope = self.cos[rows.positions], self.sin[rows.positions]  # [T, rotary/2] each
        delta: Delta = None
        hidden: dict[int, Tensor] = {}
        for i in range(part.start, self.config.layers if part.stop is None else part.stop):
            if i not in part.skip_attention:
                delta = self._attention(i, x, delta, rows, plane, rope)
            if i not in part.skip_mlp:
                delta = self._mlp(self.layers[i], x, delta)
            if i in plane.streams:
                ops.keep_stream(x, delta, plane.streams[i], rows.slots)
                delta = None
            if i in taps:
                x, delta = x if delta is None else x + summed(delta), None
                hidden[i] = x.clone()
        return Output(self._logits(x, delta, rows.want)[:, : part.vocab] if part.head else x.new_zeros(0), hidden)

    def _attention(
        self, i: int, x: Tensor, delta: Delta, rows: Rows, plane: Plane, rope: tuple[Tensor, Tensor]
    ) -> Delta:
        c, layer, kv = self.config, self.layers[i], (plane.k[i], plane.v[i])
        h = ops.add_norm(x, delta, layer.attention_norm, c.norm_eps, self.compute)
        cos, sin = rope if layer.rope else (rope[0][:, :0], rope[1][:, :0])
        q = ops.rope_store(layer.qkv(h), cos, sin, *kv, rows.slots, c.heads, c.kv_heads, layer.head_norms)
        return layer.out(ops.attend(q, *kv, rows, c.head_dim**-0.5, self.compute, layer.window))

    def _mlp(self, layer: Layer, x: Tensor, delta: Delta) -> Delta:
        h = ops.add_norm(x, delta, layer.mlp_norm, self.config.norm_eps, self.compute)
        return layer.down(layer.gate_up.gated(h))

    def _logits(self, x: Tensor, delta: Delta, want: Tensor) -> Tensor:
        if want.shape[0] < x.shape[0]:
            x, delta = x[want], None if delta is None else delta[want]
        h = ops.add_norm(x, delta, self.norm, self.config.norm_eps, self.compute)
        return summed(self.head(h)).to(self.stream)  # [R, V]


@dataclass(frozen=True)
class _Loader:
    """Weights by name; projections of the same input are fused into one product."""

    config: ModelConfig
    source: WeightSource
    dtype: torch.dtype
    stream: torch.dtype  # of norms
    device: torch.device
    int8: bool

    def tensor(self, name: str) -> Tensor:
        return self.source.get(name, self.dtype).to(self.device)

    def norm(self, name: str) -> Tensor:
        return self.source.get(name, self.stream).to(self.device)

    def fused(self, prefix: str, names: tuple[str, ...]) -> Any:
        weight = torch.cat([self.tensor(f"{prefix}.{n}.weight") for n in names])
        biased = [n for n in names if self.source.has(f"{prefix}.{n}.bias")]
        if biased and len(biased) < len(names):
            raise ModelError(f"{prefix} has a bias for {biased} only; this variant of the model is not supported.")
        bias = torch.cat([self.tensor(f"{prefix}.{n}.bias") for n in names]) if biased else None
        return linear(weight, bias, self.int8)

    def layer(self, i: int) -> Layer:
        c, layer = self.config, f"layers.{i}"
        attention, norms = f"{layer}.self_attn", None
        if c.qk_norm:
            norms = (self.norm(f"{attention}.q_norm.weight"), self.norm(f"{attention}.k_norm.weight"), c.norm_eps)
        return Layer(
            attention_norm=self.norm(f"{layer}.input_layernorm.weight"),
            qkv=self.fused(attention, ("q_proj", "k_proj", "v_proj")),
            head_norms=norms,
            out=self.fused(attention, ("o_proj",)),
            mlp_norm=self.norm(f"{layer}.post_attention_layernorm.weight"),
            gate_up=self.fused(f"{layer}.mlp", ("gate_proj", "up_proj")),
            down=self.fused(f"{layer}.mlp", ("down_proj",)),
            rope=i not in c.no_rope_layers,
            window=c.window(i),
        )


def rope_tables(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position [L, r/2]. A lookup has the same bits in any pass; a cosine may not."""
    angles = torch.arange(length, dtype=torch.float64)[:, None] * config.inverse_frequencies()[None]  # [L, r/2]
    factor = config.attention_factor
    return (angles.cos() * factor).to(dtype).to(device), (angles.sin() * factor).to(dtype).to(device)
