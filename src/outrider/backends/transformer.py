"""One decoder, described by a configuration: Llama and its relatives, with or without an encoder
(`models.config.SUPPORTED`).

The promise: a row's logits are the same bits whichever rows share its pass (float32 and bfloat16 on a CPU with
oneDNN and on a GPU; see `linear` and `ops`). The residual stream is float32 even when weights are bfloat16, and so are
K and V on a CPU.
It knows rows and planes, not sequences, drafts or text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..engine.cache import Plane
from ..errors import ModelError
from ..models.config import ModelConfig
from ..types import Output
from . import WHOLE, Model, Part, PlaneShape, ops, with_index
from .encoder import Encoder, distance_bias
from .experts import DeviceExperts, Experts, Router, Routing
from .linear import linear, summed
from .rows import Rows

NO_BIASES: tuple[Tensor | None, Tensor | None] = (None, None)
Delta = Any  # what a block adds to the stream: [T, H], on a GPU unsummed `Parts`; or None. See `_leaving`


class WeightSource(Protocol):
    """Tensors by Hugging Face's names, without the leading `model.`"""

    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def has(self, name: str) -> bool: ...


@dataclass(frozen=True)
class Cross:
    """A layer's attention to the encoder's output."""

    norm: Tensor  # [H] or [2, H]
    q: Any
    kv: Any  # of the encoder's output: k first
    out: Any


@dataclass(frozen=True)
class Layer:
    # A norm is [H], or gain and bias of a layer norm [2, H]; None: the block reads the stream as it is.
    attention_norm: Tensor | None
    qkv: Any  # a product, as made by `linear`
    head_norms: tuple[Tensor, Tensor, float] | None  # RMS norms of q and k [d], or of all heads [heads * d]; eps
    sinks: Tensor | None  # [heads]
    out: Any
    attention_post_norm: Tensor | None  # [H] of what attention adds to the stream
    mlp_norm: Tensor | None  # [H]
    gate_up: Any
    down: Any
    mlp_post_norm: Tensor | None  # [H]
    experts: Any  # instead of gate_up and down, which are None then, or the MLP that every row uses beside them
    rope: bool
    local: bool  # rotates as layers with a window do
    window: int  # 0 reads the whole context
    cross: Cross | None = None


class Transformer(Model):
    """A causal decoder; all state between passes is in the plane."""

    fused: Any  # `cuda.layers.FusedLayers`, where they suit the model

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        length: int | None = None,  # positions of the longest sequence
        int8: bool = False,  # on a GPU: the layers' weights as int8 with a scale for each output
        bidirectional: bool = False,  # an encoder: it has no output product
    ) -> None:
        self._begin(config, dtype, device, length)
        self.dtype = torch.int8 if int8 else dtype  # of most weights
        load = self.loader(weights, int8)
        self.embedding = load.tensor("embed_tokens.weight")  # [V, H]
        self.add_vectors({name: load.norm(name) for name in vectors(config)}, length, bidirectional)
        self.layers: Any = [load.layer(i) for i in range(config.layers)]
        if bidirectional:
            return
        self.head: Any = load.head(self.embedding)
        self.exact = bool(self.head.exact)  # whether every product is row-invariant on this machine
        if self.device.type == "cuda":
            self.fused = ops.fused_layers(self)
        if config.encoder is not None:
            source, reads = Prefixed(weights, "encoder."), config.encoder.context_length
            self.add_encoder(Transformer(config.encoder, source, dtype, device, reads, int8, bidirectional=True))

    def _begin(
        self, config: ModelConfig, compute: torch.dtype, device: torch.device | str = "cpu", length: int | None = None
    ) -> None:
        """Everything but weights. compute: the dtype of what products read."""
        self.config, self.device, self.compute = config, with_index(device), compute
        self.stream = torch.promote_types(compute, torch.float32)  # dtype of the residual stream
        self.scale_embedding = float(torch.tensor(config.embedding_scale, dtype=compute))  # Gemma's is rounded, too
        self._prepare_rope(length or config.context_length)
        self.fused = None
        self.add_vectors({}, length, False)

    def add_vectors(self, named: Mapping[str, Tensor], length: int | None, bidirectional: bool) -> None:
        """What is beside matrices and layers. named: as `vectors` lists it."""
        self.norm, self.embedding_norm = named.get("norm"), named.get("embed_norm")
        self.positions = named.get("embed_positions")  # [L, H]
        self.distance_bias: Tensor | None = None  # [heads, distances]
        self._nearest = 0  # the column of distance 0
        if (bias := named.get("distance_bias")) is not None:
            length = length or self.config.context_length
            self.distance_bias = distance_bias(bias, self.config, length, bidirectional)
            self._nearest = length - 1 if bidirectional else 0

    def add_encoder(self, network: Transformer) -> None:
        self.reader, self.encoder, self.starts = Encoder(network, self.layers), True, self.config.starts
        self.max_source = self.source_length

    @property
    def source_length(self) -> int:  # type: ignore[override]
        return 0 if self.config.encoder is None else self.config.encoder.context_length

    def loader(self, weights: WeightSource, int8: bool) -> Loader:
        return Loader(self.config, weights, self.compute, self.stream, self.device, int8)

    @classmethod
    def without_weights(
        cls, config: ModelConfig, length: int, compute: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Transformer:
        """A decoder whose embedding and layers the caller sets: only parts of it can run."""
        model = cls.__new__(cls)
        model._begin(config, compute, device, length)
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
        self._read_sources(rows, plane)
        # x [T, H] is the residual stream; `delta` [T, H] is the last block's output, added by the next norm.
        hidden: dict[int, Tensor] = {}
        if self.fused is not None:
            x, delta = self._fused(None if x is None else x.clone(), rows, plane, part, taps, hidden), None
        else:
            x = self.embed(rows.tokens, rows.positions) if x is None else x.clone()
            x, delta = self._layers(x, rows, plane, part, taps, hidden)
        return Output(self._logits(x, delta, rows.want, part.vocab) if part.head else x.new_zeros(0), hidden)

    def _read_sources(self, rows: Rows, plane: Plane) -> None:
        """The encoder reads the sources that the plane does not hold yet."""
        if self.reader is not None and rows.sources is not None and (new := rows.sources.unread(plane)):
            self.reader.read(new, plane)

    def _fused(
        self, x: Tensor | None, rows: Rows, plane: Plane, part: Part, taps: tuple[int, ...], hidden: dict[int, Tensor]
    ) -> Tensor:
        """As `_layers`, with embedding: the stream to which everything was added."""

        def after(i: int, x: Tensor) -> None:
            if i in plane.streams:
                ops.keep_stream(x, None, plane.streams[i], rows.slots)
            if i in taps:
                hidden[i] = x.clone()

        stream: Tensor = self.fused.run(x, rows, plane, part, after)
        return stream

    def _layers(
        self, x: Tensor, rows: Rows, plane: Plane, part: Part, taps: tuple[int, ...], hidden: dict[int, Tensor]
    ) -> tuple[Tensor, Delta]:
        """The stream after these layers, and what is to be added to it. hidden: the tapped layers' outputs."""
        ropes = [(cos[rows.positions], sin[rows.positions]) for cos, sin in self.ropes]  # [T, rotary/2] each
        delta: Delta = None
        across = None if self.config.encoder is None else rows.on_sources
        for i in range(part.start, self.config.layers if part.stop is None else part.stop):
            if i not in part.skip_attention:
                delta = self._attention(i, x, delta, rows, plane, ropes)
                if across is not None:
                    delta = self._cross(i, x, delta, across, plane)
            if i not in part.skip_mlp:
                delta = self._mlp(self.layers[i], x, delta)
            if i in plane.streams:
                ops.keep_stream(x, None if self.config.stream_norm else delta, plane.streams[i], rows.slots)
                delta = None
            if i in taps:
                if not (delta is None or self.config.stream_norm):
                    x, delta = x + summed(delta), None
                hidden[i] = x.clone()
        return x, delta

    def embed(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """The residual stream before the first layer [T, H]. positions [T]: where the model embeds them too."""
        x = ops.embed(tokens, self.embedding, self.scale_embedding, self.stream, positions, self.positions)
        if self.embedding_norm is None:
            return x
        return ops.add_norm(x, None, self.embedding_norm, self.config.norm_eps, self.stream)

    def _attention(
        self, i: int, x: Tensor, delta: Delta, rows: Rows, plane: Plane, ropes: list[tuple[Tensor, Tensor]]
    ) -> Delta:
        c, layer, kv = self.config, self.layers[i], (plane.k[i], plane.v[i])
        cos, sin = ropes[layer.local]
        if not layer.rope:
            cos, sin = cos[:, :0], sin[:, :0]
        qkv, norms = layer.qkv(self._entering(x, delta, layer.attention_norm)), layer.head_norms
        bias = None
        if self.distance_bias is not None:
            bias = (self.distance_bias, rows.positions + self._nearest if self._nearest else rows.positions)
        if c.whole_qk_norm:
            qkv, norms = self._norm_whole(qkv, layer), None
        q = ops.rope_store(qkv, cos, sin, *kv, rows.slots, c.heads, c.kv_heads, norms)
        mixed = ops.attend(q, *kv, rows, c.attention_scale, self.compute, layer.window, c.score_cap, layer.sinks, bias)
        return self._leaving(x, layer.out(mixed), layer.attention_norm, layer.attention_post_norm)

    def _cross(self, i: int, x: Tensor, delta: Delta, rows: Rows, plane: Plane) -> Delta:
        """Attention to the source, whose K/V the encoder has written."""
        c, layer, kv = self.config, self.layers[i].cross, (plane.k[i], plane.v[i])
        q = ops.heads_of(layer.q(self._entering(x, delta, layer.norm)), *kv, c.heads)
        mixed = ops.attend(q, *kv, rows, c.attention_scale, self.compute)
        return self._leaving(x, layer.out(mixed), layer.norm, None)

    def _mlp(self, layer: Layer, x: Tensor, delta: Delta) -> Delta:
        h = self._entering(x, delta, layer.mlp_norm)
        if layer.experts is not None:
            added = layer.experts(h)
            if layer.gate_up is not None:
                shared = layer.down(layer.gate_up.gated(h, self.config.activation))
                added = ops.as_delta(summed(added) + summed(shared).to(self.stream))
        elif self.config.gated:
            added = layer.down(layer.gate_up.gated(h, self.config.activation))
        else:
            added = layer.down(ops.activate(layer.gate_up(h), self.config.activation, self.compute))
        return self._leaving(x, added, layer.mlp_norm, layer.mlp_post_norm)

    def _entering(self, x: Tensor, delta: Delta, norm: Tensor | None) -> Tensor:
        """x += delta in place; what a block reads of it [T, H]."""
        if self.config.stream_norm:
            return x.to(self.compute) if delta is None else delta
        if norm is not None:
            return ops.add_norm(x, delta, norm, self.config.norm_eps, self.compute)
        if delta is not None:
            x += summed(delta)
        return x.to(self.compute)

    def _leaving(self, x: Tensor, delta: Delta, own: Tensor | None, norm: Tensor | None) -> Delta:
        """What a block adds to the stream x, after its norm and factor. Where the stream itself is normed, it is added
        here, and what is left is the stream as the next block reads it."""
        if self.config.stream_norm:
            assert own is not None
            return ops.norm_stream(x, delta, own, self.config.norm_eps, self.compute)
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

    def _logits(self, x: Tensor, delta: Delta, want: Tensor, vocab: int | None) -> Tensor:
        if want.shape[0] < x.shape[0]:
            x, delta = x[want], None if delta is None else delta[want]
        h, c = self.closing(x, delta), self.config
        logits = summed(self.head(h) if vocab is None else self.head.first(h, vocab)).to(self.stream)  # [R, V]
        logits = logits if c.logit_scale == 1.0 else logits * c.logit_scale
        return ops.soft_cap(logits, c.logit_cap) if c.logit_cap else logits

    def closing(self, x: Tensor, delta: Delta) -> Tensor:
        """The stream after the last layer and its norm, as products read it [T, H]."""
        return self._entering(x, delta, self.norm)


@dataclass(frozen=True)
class Prefixed:
    """The weights whose names have a prefix, without it."""

    source: WeightSource
    prefix: str

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.source.get(self.prefix + name, dtype)

    def has(self, name: str) -> bool:
        return self.source.has(self.prefix + name)


def vectors(c: ModelConfig) -> list[str]:
    """The names of what a model has beside its matrices and layers."""
    present = {
        "norm": not c.stream_norm,
        "embed_positions": bool(c.positions),
        "embed_norm": c.embedding_norm,
        "distance_bias": c.distance_buckets > 0,
    }
    return [name for name, has in present.items() if has]


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
        """A norm's gain [H], or gain and bias [2, H]; any vector that is not rounded."""
        gain = self.source.get(f"{name}.weight", self.stream)
        if self.config.layer_norm and self.source.has(f"{name}.bias"):
            gain = torch.stack([gain, self.source.get(f"{name}.bias", self.stream)])
        return gain.to(self.device)

    def head_bias(self) -> Tensor | None:
        """What is added to logits [V]: minus infinity where a token is banned."""
        c = self.config
        if not (c.head_bias or c.banned):
            return None
        bias = self.tensor("lm_head.bias") if c.head_bias else torch.zeros(c.vocab_size, dtype=self.dtype)
        banned = torch.tensor(c.banned, dtype=torch.long, device=bias.device)
        return bias.index_fill(0, banned, -torch.inf).to(self.device)

    def product(self, name: str, weight: Tensor, bias: Tensor | None) -> Any:
        """The product with this weight. name: such as "layers.3.qkv"."""
        return linear(weight, bias, self.int8)

    def head(self, embedding: Tensor) -> Any:
        return linear(embedding if self.config.tied else self.tensor("lm_head.weight"), self.head_bias())

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
            norms = (self.norm(f"{attention}.q_norm"), self.norm(f"{attention}.k_norm"), c.norm_eps)
        names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"} if c.pre_norm else {}
        names |= {name: name for name in ("attention_post_norm", "mlp_post_norm") if c.post_norm}
        around: dict[str, Any] = dict.fromkeys(("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"))
        around |= {field: self.norm(f"{layer}.{name}") for field, name in names.items()}
        return Layer(
            **around,
            qkv=self.fused(f"{layer}.qkv", attention, ("q_proj", "k_proj", "v_proj")),
            head_norms=norms,
            sinks=self.norm(f"{attention}.sinks") if c.sinks else None,
            out=self.fused(f"{layer}.out", attention, ("o_proj",)),
            **(self.mixture(layer) if c.has_experts(i) else self.dense(layer)),
            **layer_shape(c, i),
            cross=None if c.encoder is None else self.cross(layer),
        )

    def cross(self, layer: str) -> Cross:
        attention = f"{layer}.cross_attn"
        return Cross(
            self.norm(f"{layer}.cross_attention_layernorm"),
            self.fused(f"{layer}.cross_q", attention, ("q_proj",)),
            self.fused(f"{layer}.cross_kv", attention, ("k_proj", "v_proj")),
            self.fused(f"{layer}.cross_out", attention, ("o_proj",)),
        )

    def dense(self, layer: str, mlp: str = "mlp") -> dict[str, Any]:
        names = ("gate_proj", "up_proj") if self.config.gated else ("up_proj",)
        return {
            "gate_up": self.fused(f"{layer}.gate_up", f"{layer}.{mlp}", names),
            "down": self.fused(f"{layer}.down", f"{layer}.{mlp}", ("down_proj",)),
            "experts": None,
        }

    def mixture(self, layer: str) -> dict[str, Any]:
        """A layer's experts, and the MLP beside them. Their router is never rounded."""
        every_row = (
            self.dense(layer, "mlp.shared_experts") if self.config.shared_size else {"gate_up": None, "down": None}
        )
        return every_row | {"experts": self.experts(layer)}

    def experts(self, layer: str) -> Experts | DeviceExperts:
        at = f"{layer}.mlp.experts"
        gate, up, down = (self.tensor(f"{at}.{name}_proj.weight") for name in ("gate", "up", "down"))  # [E, ...]
        router = self.router(layer)
        pairs, biases = torch.cat([gate, up], 1), NO_BIASES  # [E, 2I, H]
        if self.config.expert_bias:
            parts = [self.tensor(f"{at}.{name}_proj.bias") for name in ("gate", "up", "down")]
            biases = torch.cat(parts[:2], 1), parts[2]  # [E, 2I], [E, H]
        if ops.on_gpu(gate):
            return DeviceExperts(router, pairs, down, biases)
        both, back = (
            [self.product(f"{layer}.{name}.{i}", one, None if each is None else each[i]) for i, one in enumerate(many)]
            for name, many, each in (("gate_up", pairs, biases[0]), ("down", down, biases[1]))
        )
        return Experts(router, both, back)

    def router(self, layer: str) -> Router:
        """In the dtype of the products, whatever their weights are stored as."""
        at, c = f"{layer}.mlp.router", self.config
        bias = self.tensor(f"{at}.bias") if c.expert_bias else None
        correction = None
        if c.corrected_router:
            correction = self.source.get(f"{layer}.mlp.correction.bias", torch.float32).to(self.device)
        return Router(linear(self.tensor(f"{at}.weight"), bias), routing_of(c), correction)


def routing_of(c: ModelConfig) -> Routing:
    return Routing(c.experts_used, c.normalise_experts, c.activation, c.expert_scale)


def layer_shape(c: ModelConfig, i: int) -> dict[str, Any]:
    """What of a layer is no weight."""
    window = c.window(i)
    return {"rope": i not in c.no_rope_layers, "local": bool(c.local_rope_theta) and window > 0, "window": window}


def rope_tables(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position [L, r/2]; r is 0 where no layer rotates."""
    frequencies = config.inverse_frequencies(length)  # [r/2]
    if len(config.no_rope_layers) == config.layers:
        frequencies = frequencies[:0]
    return tables_of(frequencies, config.attention_factor, length, dtype, device)


def tables_of(
    frequencies: Tensor, factor: float, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [L, r/2] of these frequencies [r/2]. A lookup has the same bits in any pass; a cosine may not."""
    angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies  # [L, r/2]
    return (angles.cos() * factor).to(dtype).to(device), (angles.sin() * factor).to(dtype).to(device)
