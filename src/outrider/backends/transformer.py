"""One decoder, described by a configuration: Llama and its relatives (`models.config.SUPPORTED`).

The promise: a row's logits are the same bits whichever rows share its pass (float32 and bfloat16 on a CPU with
oneDNN and on a GPU; see `linear` and `ops`). The residual stream is float32 even when weights are bfloat16, and so are
K and V on a CPU.
It knows rows and planes, not sequences, drafts or text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..engine.cache import Plane
from ..errors import ModelError
from ..models.config import ModelConfig
from ..types import Output
from . import WHOLE, Model, Part, PlaneShape, ops, with_index
from .experts import DeviceExperts, Experts, Routing
from .linear import linear, summed
from .rows import Rows

NO_BIASES: tuple[Tensor | None, Tensor | None] = (None, None)
Delta = Any  # what a block adds to the stream: [T, H], on a GPU unsummed `Parts`; or None


class WeightSource(Protocol):
    """Tensors by Hugging Face's names, without the leading `model.`"""

    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def has(self, name: str) -> bool: ...


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor | None  # [H]; None: attention reads the stream as it is
    qkv: Any  # a product, as made by `linear`
    head_norms: tuple[Tensor, Tensor, float] | None  # RMS norms of q and k [d], or of all heads [heads * d]; eps
    sinks: Tensor | None  # [heads]
    out: Any
    attention_post_norm: Tensor | None  # [H] of what attention adds to the stream
    mlp_norm: Tensor | None  # [H]
    gate_up: Any
    down: Any
    mlp_post_norm: Tensor | None  # [H]
    experts: Any  # instead of gate_up and down, which are None then
    rope: bool
    local: bool  # rotates as layers with a window do
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
        self._begin(config, dtype, device, length)
        self.dtype = torch.int8 if int8 else dtype  # of most weights
        load = self.loader(weights, int8)
        self.embedding = load.tensor("embed_tokens.weight")  # [V, H]
        self.layers: Any = [load.layer(i) for i in range(config.layers)]
        self.norm = load.norm("norm.weight")
        self.head: Any = load.head(self.embedding)
        self.exact = bool(self.head.exact)  # whether every product is row-invariant on this machine

    def _begin(
        self, config: ModelConfig, compute: torch.dtype, device: torch.device | str = "cpu", length: int | None = None
    ) -> None:
        """Everything but weights. compute: the dtype of what products read."""
        self.config, self.device, self.compute = config, with_index(device), compute
        self.stream = torch.promote_types(compute, torch.float32)  # dtype of the residual stream
        self._scale_embedding = float(torch.tensor(config.embedding_scale, dtype=compute))  # Gemma's is rounded, too
        self._prepare_rope(length or config.context_length)

    def loader(self, weights: WeightSource, int8: bool) -> Loader:
        return Loader(self.config, weights, self.compute, self.stream, self.device, int8)

    @classmethod
    def without_weights(cls, config: ModelConfig, length: int) -> Transformer:
        """A decoder in float32 whose embedding and layers the caller sets: only parts of it can run."""
        model = cls.__new__(cls)
        model._begin(config, torch.float32, length=length)
        return model

    def _prepare_rope(self, length: int) -> None:
        tables = [rope_tables(self.config, length, self.stream, self.device)]
        if self.config.local_rope_theta:
            local = replace(self.config, rope_theta=self.config.local_rope_theta, rope_scaling=None)
            tables.append(rope_tables(local, length, self.stream, self.device))
        self.ropes = tables  # of layers that read the whole context; of those with a window, where they differ
        self.cos, self.sin = tables[0]

    @property
    def plane_shape(self) -> PlaneShape:
        dtype = self.compute if self.device.type == "cuda" else self.kv_dtype or self.stream
        return PlaneShape(self.config.layers, self.config.kv_heads, self.config.head_dim, dtype)

    @torch.inference_mode()
    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        plane.count_pass()
        # x [T, H] is the residual stream; `delta` [T, H] is the last block's output, added by the next norm.
        x = self.embed(rows.tokens) if x is None else x.clone()
        ropes = [(cos[rows.positions], sin[rows.positions]) for cos, sin in self.ropes]  # [T, rotary/2] each
        delta: Delta = None
        hidden: dict[int, Tensor] = {}
        for i in range(part.start, self.config.layers if part.stop is None else part.stop):
            if i not in part.skip_attention:
                delta = self._attention(i, x, delta, rows, plane, ropes)
            if i not in part.skip_mlp:
                delta = self._mlp(self.layers[i], x, delta)
            if i in plane.streams:
                ops.keep_stream(x, delta, plane.streams[i], rows.slots)
                delta = None
            if i in taps:
                x, delta = x if delta is None else x + summed(delta), None
                hidden[i] = x.clone()
        return Output(self._logits(x, delta, rows.want)[:, : part.vocab] if part.head else x.new_zeros(0), hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream before the first layer [T, H]."""
        x = self.embedding[tokens].to(self.stream)
        return x if self._scale_embedding == 1.0 else x * self._scale_embedding

    def _attention(
        self, i: int, x: Tensor, delta: Delta, rows: Rows, plane: Plane, ropes: list[tuple[Tensor, Tensor]]
    ) -> Delta:
        c, layer, kv = self.config, self.layers[i], (plane.k[i], plane.v[i])
        cos, sin = ropes[layer.local]
        if not layer.rope:
            cos, sin = cos[:, :0], sin[:, :0]
        qkv, norms = layer.qkv(self._entering(x, delta, layer.attention_norm)), layer.head_norms
        if c.whole_qk_norm:
            qkv, norms = self._norm_whole(qkv, layer), None
        q = ops.rope_store(qkv, cos, sin, *kv, rows.slots, c.heads, c.kv_heads, norms)
        mixed = ops.attend(q, *kv, rows, c.attention_scale, self.compute, layer.window, c.score_cap, layer.sinks)
        return self._leaving(layer.out(mixed), layer.attention_post_norm)

    def _mlp(self, layer: Layer, x: Tensor, delta: Delta) -> Delta:
        h = self._entering(x, delta, layer.mlp_norm)
        if layer.experts is not None:
            return self._leaving(layer.experts(h), layer.mlp_post_norm)
        return self._leaving(layer.down(layer.gate_up.gated(h, self.config.activation)), layer.mlp_post_norm)

    def _entering(self, x: Tensor, delta: Delta, norm: Tensor | None) -> Tensor:
        """x += delta in place; what a block reads of it [T, H]."""
        if norm is not None:
            return ops.add_norm(x, delta, norm, self.config.norm_eps, self.compute)
        if delta is not None:
            x += summed(delta)
        return x.to(self.compute)

    def _leaving(self, delta: Delta, norm: Tensor | None) -> Delta:
        """What a block adds to the stream, after its norm and factor."""
        scale = self.config.residual_scale
        if norm is None and scale == 1.0:
            return delta
        total = summed(delta).to(self.stream)
        if norm is not None:
            total = ops.add_norm(total, None, norm, self.config.norm_eps, self.stream)
        return ops.as_delta(total if scale == 1.0 else total * scale)

    def _norm_whole(self, qkv: Any, layer: Layer) -> Any:
        """q and k [T, heads * d] normed as whole vectors."""
        assert layer.head_norms is not None
        q_norm, k_norm, eps = layer.head_norms
        both, (q, kv) = summed(qkv).to(self.stream), (q_norm.shape[0], k_norm.shape[0])
        parts = [part.contiguous() for part in both.split([q, kv, kv], 1)]
        normed = [
            ops.add_norm(part, None, norm, eps, self.stream)
            for part, norm in zip(parts, (q_norm, k_norm), strict=False)
        ]
        return ops.as_delta(torch.cat([*normed, parts[2]], 1))

    def _logits(self, x: Tensor, delta: Delta, want: Tensor) -> Tensor:
        if want.shape[0] < x.shape[0]:
            x, delta = x[want], None if delta is None else delta[want]
        h = ops.add_norm(x, delta, self.norm, self.config.norm_eps, self.compute)
        logits, c = summed(self.head(h)).to(self.stream), self.config  # [R, V]
        logits = logits if c.logit_scale == 1.0 else logits * c.logit_scale
        return ops.soft_cap(logits, c.logit_cap) if c.logit_cap else logits


@dataclass(frozen=True)
class Loader:
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

    def product(self, name: str, weight: Tensor, bias: Tensor | None) -> Any:
        """The product with this weight. name: such as "layers.3.qkv"."""
        return linear(weight, bias, self.int8)

    def head(self, embedding: Tensor) -> Any:
        return linear(embedding if self.config.tied else self.tensor("lm_head.weight"))

    def fused_product(self, name: str, sources: list[str], bias: Tensor | None) -> Any:
        """One product with the outputs of all these weights."""
        return self.product(name, torch.cat([self.tensor(source) for source in sources]), bias)

    def fused(self, name: str, prefix: str, names: tuple[str, ...]) -> Any:
        biased = [n for n in names if self.source.has(f"{prefix}.{n}.bias")]
        if biased and len(biased) < len(names):
            raise ModelError(f"{prefix} has a bias for {biased} only; this variant of the model is not supported.")
        bias = torch.cat([self.tensor(f"{prefix}.{n}.bias") for n in names]) if biased else None
        return self.fused_product(name, [f"{prefix}.{n}.weight" for n in names], bias)

    def layer(self, i: int) -> Layer:
        c, layer = self.config, f"layers.{i}"
        attention, norms = f"{layer}.self_attn", None
        if c.qk_norm:
            norms = (self.norm(f"{attention}.q_norm.weight"), self.norm(f"{attention}.k_norm.weight"), c.norm_eps)
        names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"} if c.pre_norm else {}
        names |= {name: name for name in ("attention_post_norm", "mlp_post_norm") if c.post_norm}
        around: dict[str, Any] = dict.fromkeys(("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"))
        around |= {field: self.norm(f"{layer}.{name}.weight") for field, name in names.items()}
        return Layer(
            **around,
            qkv=self.fused(f"{layer}.qkv", attention, ("q_proj", "k_proj", "v_proj")),
            head_norms=norms,
            sinks=self.norm(f"{attention}.sinks.weight") if c.sinks else None,
            out=self.fused(f"{layer}.out", attention, ("o_proj",)),
            **(self.mixture(layer) if c.has_experts(i) else self.dense(layer)),
            **layer_shape(c, i),
        )

    def dense(self, layer: str) -> dict[str, Any]:
        return {
            "gate_up": self.fused(f"{layer}.gate_up", f"{layer}.mlp", ("gate_proj", "up_proj")),
            "down": self.fused(f"{layer}.down", f"{layer}.mlp", ("down_proj",)),
            "experts": None,
        }

    def mixture(self, layer: str) -> dict[str, Any]:
        """A layer's experts. Their router is never rounded."""
        at = f"{layer}.mlp.experts"
        gate, up, down = (self.tensor(f"{at}.{name}_proj.weight") for name in ("gate", "up", "down"))  # [E, ...]
        router, routing = self.router(layer), routing_of(self.config)
        pairs, biases = torch.cat([gate, up], 1), NO_BIASES  # [E, 2I, H]
        if self.config.expert_bias:
            parts = [self.tensor(f"{at}.{name}_proj.bias") for name in ("gate", "up", "down")]
            biases = torch.cat(parts[:2], 1), parts[2]  # [E, 2I], [E, H]
        if ops.on_gpu(gate):
            return {"gate_up": None, "down": None, "experts": DeviceExperts(router, pairs, down, biases, routing)}
        both, back = (
            [self.product(f"{layer}.{name}.{i}", one, None if each is None else each[i]) for i, one in enumerate(many)]
            for name, many, each in (("gate_up", pairs, biases[0]), ("down", down, biases[1]))
        )
        return {"gate_up": None, "down": None, "experts": Experts(router, both, back, routing)}

    def router(self, layer: str) -> Any:
        """In the dtype of the products, whatever their weights are stored as."""
        bias = self.tensor(f"{layer}.mlp.router.bias") if self.config.expert_bias else None
        return linear(self.tensor(f"{layer}.mlp.router.weight"), bias)


def routing_of(c: ModelConfig) -> Routing:
    return Routing(c.experts_used, c.normalise_experts, c.activation)


def layer_shape(c: ModelConfig, i: int) -> dict[str, Any]:
    """What of a layer is no weight."""
    window = c.window(i)
    return {"rope": i not in c.no_rope_layers, "local": bool(c.local_rope_theta) and window > 0, "window": window}


def rope_tables(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position [L, r/2]. A lookup has the same bits in any pass; a cosine may not."""
    angles = torch.arange(length, dtype=torch.float64)[:, None] * config.inverse_frequencies(length)[None]  # [L, r/2]
    factor = config.attention_factor
    return (angles.cos() * factor).to(dtype).to(device), (angles.sin() * factor).to(dtype).to(device)
