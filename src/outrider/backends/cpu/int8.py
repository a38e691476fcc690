"""The int8 decoder on a CPU: the whole pass in one native call, or in torch where there is no compiler.

The promise: a row's logits are the same bits whichever rows share its pass, for every number of rows and threads.
Integer sums do not depend on order; rows are quantised one by one; for the rest see `ops`. Native and torch may differ
in the last bits, so one process uses one of them. The residual stream is float32, K and V are what the plane holds.
It knows rows and planes, not sequences, drafts or text.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence as Listing
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...engine.cache import Plane
from ...models.config import SILU, ModelConfig
from ...models.stages import stage
from ...types import Output
from .. import WHOLE, Chain, Model, Part, PlaneShape, ops
from ..experts import Experts, Router
from ..linear import linear
from ..rows import Rows
from ..transformer import Cross, Layer, Transformer, layer_shape, rope_tables, routing_of
from . import native, quantise as quant
from .quantise import PRODUCTS, Quantised, Settings, Tensors

if TYPE_CHECKING:
    from ...models.checkpoint import Checkpoint

_CHUNK = 16 * quant.OUTPUTS  # rows of a weight that are rounded at once: whole blocks that fit the CPU's cache
_SKIP_ATTENTION, _SKIP_MLP = 1, 2  # as in native/pass.h


class Int8Transformer(Model):
    """A causal decoder; all state between passes is in the plane."""

    dtype = compute = torch.int8
    exact = True  # every product is row-invariant on every machine

    def __init__(self, config: ModelConfig, tensors: Tensors, length: int | None = None) -> None:
        """tensors: as made by `quant.calibrated`; length: positions of the longest sequence."""
        self.config, self.tensors, self.device = config, tensors, torch.device("cpu")
        self.cos, self.sin = rope_tables(config, length or config.context_length, torch.float32, self.device)
        kernels = ops._loaded().kernels
        self.native = None if kernels is None else NativePass(self, kernels)
        self.torch = TorchPass(self) if kernels is None else None
        self.keeps_streams = self.drafts_chains = kernels is not None

    @property
    def plane_shape(self) -> PlaneShape:
        kv = self.kv_dtype or torch.float32
        return PlaneShape(self.config.layers, self.config.kv_heads, self.config.head_dim, kv)

    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        plane.count_pass()
        run = self.native or self.torch
        assert run is not None
        return run(rows, plane, part, x, taps)

    def chains(
        self, rows: Rows, plane: Plane, slots: list[list[int]], budgets: list[int], floor: float, vocab: int | None
    ) -> list[Chain]:
        assert self.native is not None
        plane.count_pass()
        return self.native.chains(rows, plane, slots, budgets, floor, vocab)


def calibration_ids(checkpoint: Checkpoint, count: int) -> list[int]:
    """Tokens of the bundled prompts, which have every kind of text."""
    from ...models.prompts import bundled

    ids: list[int] = []
    for prompt in bundled():
        ids += checkpoint.tokenizer.encode(prompt.text + "\n\n")
        if len(ids) >= count:
            break
    return [i for i in ids if i < checkpoint.config.vocab_size][:count]


class PlaneAddresses:
    """Where a plane is, for native code."""

    def __init__(self, plane: Plane) -> None:
        pairs = zip(plane.k, plane.v, strict=True)
        self._kv = array("q", [ops.plane_address(t) for pair in pairs for t in pair])
        self._streams = array("q", ops.addresses_of(*(plane.streams.get(i) for i in range(len(plane.k)))))
        self.kv = self._kv.buffer_info()[0]  # the address of the addresses of each layer's k and v
        self.streams = self._streams.buffer_info()[0] if plane.streams else 0  # and of each layer's stream
        self.slots = plane.k[0].shape[0]

    @staticmethod
    def of(plane: Plane) -> PlaneAddresses:
        if plane.addresses is None:
            plane.addresses = PlaneAddresses(plane)
        return plane.addresses  # type: ignore[no-any-return]


class Addresses:
    """Addresses of memory that native code reads. This object keeps that memory alive."""

    def __init__(self, *held: object) -> None:
        self._held: list[object] = [*held]

    def _keep(self, data: bytes) -> int:
        held = array("B", data)
        self._held.append(held)
        return held.buffer_info()[0]

    def _linear(self, q: Quantised) -> tuple[int, ...]:
        """As `linear_fields`."""
        self._held.append(q)
        return linear_fields(q)


def linear_fields(q: Quantised) -> tuple[int, ...]:
    """The fields of `Linear` in int8.h. The caller keeps the product."""
    addresses = ops.addresses_of(q.weight, q.high, q.scale, q.bias, q.outliers)
    return (*addresses, q.outputs, q.inputs, q.outliers.shape[0], 0)


class Words(NamedTuple):
    """Where native code finds the tokens' embeddings: one of the three addresses is set."""

    embedding: int = 0  # [V, H] bfloat16
    pieces: int = 0  # as in native/blocks.h
    stored: int = 0  # as they are in a GGUF file
    row_bytes: int = 0
    kind: int = 0  # in native/blocks.h

    @property
    def elsewhere(self) -> tuple[int, ...]:
        """The last fields of `Model` in pass.h."""
        return self[1:]


class NativeRows:
    """Rows as native code reads them. This object keeps the memory alive whose addresses it gives."""

    FIELDS = ("tokens", "positions", "slots", "lines", "context", "want")  # in the order of pass.h

    def __init__(self, rows: Rows) -> None:
        b, tails = rows.batch, list[list[int]]()
        if b is not None:  # it has the lists already; tensors of a few numbers cost several times more
            self.lists, tails = [b.tokens, b.positions, b.slots, b.lines, b.context, b.want], b.tails
            self.table = b.table  # [lines, length]
        else:
            self.lists = [getattr(rows, name).tolist() for name in self.FIELDS]
            tails = [] if rows.ancestors is None else rows.ancestors.tolist()
            self.table = ops.contiguous(rows.table, torch.int32)
        self.depth = max(map(len, tails), default=0)  # drafted ancestors of a row, at most
        self._tails = array("i", [slot for tail in tails for slot in (*tail, *[-1] * (self.depth - len(tail)))])

    @property
    def count(self) -> int:
        """T"""
        return len(self.lists[0])

    def addresses(self) -> tuple[int, ...]:
        """Of the six fields (int64), of the table and of the drafted ancestors' slots [T, depth] (int32)."""
        self._flat = array("q", [number for numbers in self.lists for number in numbers])
        first, each = self._flat.buffer_info()[0], 8 * self.count
        fields = (first + each * i for i in range(len(self.lists)))
        return (*fields, self.table.data_ptr(), self._tails.buffer_info()[0] if self.depth else 0)


class ChainBuffers:
    """What native code drafts chains into, and where: the fields of `Chain` in chain.h around the ids."""

    def __init__(self, slots: list[list[int]], budgets: list[int], floors: Listing[float]) -> None:
        """floors: of chains of 1, 2, … tokens; the last one holds for longer ones."""
        self.count, self.longest = len(budgets), max(budgets, default=0)
        self._slots = array("i", [slot for each in slots for slot in (*each, *[0] * (self.longest - len(each)))])
        self._floors = array("d", [*floors[: self.longest], *[floors[-1]] * (self.longest - len(floors))])
        size = self.count * self.longest
        self._numbers = array("q", [*budgets, *[0] * (self.count + 2 * size)])  # then lengths, then tokens
        self._survival = array("d", bytes(16 * size))
        at = self._numbers.buffer_info()[0]
        self.given = (at, self._slots.buffer_info()[0])
        self.floors = self._floors.buffer_info()[0]
        self.made = (at + 16 * self.count, self._survival.buffer_info()[0], at + 8 * self.count)

    def chains(self) -> list[Chain]:
        count, size, survival = self.count, self.count * self.longest, self._survival
        lengths, tokens = self._numbers[count : 2 * count], self._numbers[2 * count :]
        chains = list[Chain]()
        for i, n in zip(range(0, size, max(self.longest, 1)), lengths, strict=True):
            own, other = slice(i, i + n), slice(i + size, i + size + n)
            drafted = Chain(
                tokens[own].tolist(), survival[own].tolist(), tokens[other].tolist(), survival[other].tolist()
            )
            chains.append(drafted)
        return chains


class NativePass(Addresses):
    """The addresses of all weights, in the order of native/pass.h."""

    def __init__(self, model: Any, kernels: native.Kernels) -> None:
        """model: has `config`, `tensors`, `cos`, `sin` and `draft_ids`."""
        super().__init__(model.tensors, model.cos, model.sin)
        every = torch.arange(model.config.vocab_size) if model.draft_ids is None else model.draft_ids
        self.ids = ops.contiguous(every, torch.int64)  # [V] or [D]: of each output row
        self.config, self.tensors, self.kernels, self.length = model.config, model.tensors, kernels, model.cos.shape[0]
        self.half, self._rope = model.cos.shape[1], ops.addresses_of(model.cos, model.sin)
        self._models = {len(self.ids): self._pack_model(len(self.ids))}

    def _with_outputs(self, vocab: int | None) -> tuple[int, int]:
        """The model with its first `vocab` outputs (None: with all), and their number."""
        outputs = min(vocab or len(self.ids), len(self.ids))
        if outputs not in self._models:
            self._models[outputs] = self._pack_model(outputs)
        return self._models[outputs], outputs

    def chains(
        self, rows: Rows, plane: Plane, slots: list[list[int]], budgets: list[int], floor: float, vocab: int | None
    ) -> list[Chain]:
        """As `Model.chains`."""
        inputs, out, at = NativeRows(rows), ChainBuffers(slots, budgets, (floor,)), PlaneAddresses.of(plane)
        model, _ = self._with_outputs(vocab)
        self.kernels.chain(
            model, *inputs.addresses(), 0, 0, 0, at.kv, 0, 0, 0, 0, 0, 0,
            inputs.table.shape[1], inputs.depth, at.slots, inputs.count, out.count, 0, self.config.layers,
            torch.get_num_threads(), self._sources(rows),
            *out.given, self.ids.data_ptr(), out.floors, 0, 0, *out.made, 0, out.longest, 0, 1.0,
        )  # fmt: skip
        return out.chains()

    def __call__(self, rows: Rows, plane: Plane, part: Part, x: Tensor | None, taps: tuple[int, ...]) -> Output:
        c, inputs, at = self.config, NativeRows(rows), PlaneAddresses.of(plane)
        stop = c.layers if part.stop is None else part.stop
        x = None if x is None else x.to(torch.float32).contiguous()
        model, outputs = self._with_outputs(part.vocab)
        wanted = len(inputs.lists[-1]) if part.head else 0
        lent = None if rows.batch is None or part.vocab is not None else rows.batch.logits
        logits = torch.empty(wanted, outputs) if lent is None or not wanted else lent  # [R, V]
        highest, leaders = array("f", bytes(4 * wanted)), array("q", bytes(8 * wanted))
        hidden = {i: torch.empty(inputs.count, c.hidden_size) for i in dict.fromkeys(taps) if part.start <= i < stop}
        tapped = array("q", [hidden[i].data_ptr() if i in hidden else 0 for i in range(stop)]) if hidden else None
        skips, (attention, mlp) = None, (part.skip_attention, part.skip_mlp)
        if attention or mlp:
            skips = array("B", [_SKIP_ATTENTION * (i in attention) + _SKIP_MLP * (i in mlp) for i in range(stop)])
        self.kernels.int8_pass(
            model, *inputs.addresses(), 0 if x is None else x.data_ptr(), 0, 0, at.kv,
            *((logits.data_ptr(), highest.buffer_info()[0], leaders.buffer_info()[0]) if wanted else (0, 0, 0)),
            0 if tapped is None else tapped.buffer_info()[0], at.streams,
            0 if skips is None else skips.buffer_info()[0],
            inputs.table.shape[1], inputs.depth, at.slots, inputs.count, wanted, part.start, stop,
            torch.get_num_threads(), self._sources(rows),
        )  # fmt: skip
        scores = logits if part.head else logits.new_zeros(0)
        return Output(scores, hidden, highest.tolist(), leaders=leaders.tolist())

    def _sources(self, rows: Rows) -> int:
        """The address of the rows' `Sources`; 0: such models read none."""
        return 0

    def _product(self, name: str, outputs: int | None = None) -> tuple[int, ...]:
        """The fields of a product's `Linear`, or of its first outputs."""
        q = quant.product(self.tensors, name, self.config)
        return self._linear(q if outputs is None else replace(q, outputs=outputs))

    def _words(self) -> Words:
        return Words(self.tensors["embedding"].data_ptr())

    def _pack_model(self, ids: int) -> int:
        """The model with the output product of the first `ids` ids, which are its first rows."""
        c, words = self.config, self._words()
        layers = b"".join(self._pack_layer(i) for i in range(c.layers))
        sizes = (c.hidden_size, c.heads, c.kv_heads, c.head_dim, self.half, c.intermediate_size, ids)
        norm = self.tensors.get("norm")
        addresses = (self._keep(layers), *ops.addresses_of(norm), words.embedding, *self._rope)
        rest = (self.length, c.norm_eps, 0, 0, 0, c.vocab_size, *native.NO_LINEAR, 0, *words.elsewhere, self._bart())
        return self._keep(struct.pack(native.MODEL, *addresses, *self._product("head", ids), *sizes, *rest))

    def _bart(self) -> int:
        """The address of the model's `Bart`; 0: its layers are Llama's."""
        return 0

    def _pack_layer(self, i: int) -> bytes:
        prefix, c = f"layers.{i}.", self.config
        names = ("attention_norm", "mlp_norm", "q_norm", "k_norm")
        norms = ops.addresses_of(*(self.tensors.get(prefix + name) for name in names))
        linears = [field for name in PRODUCTS for field in self._product(prefix + name)]
        return struct.pack(native.LAYER, *norms, *linears, i not in c.no_rope_layers, c.window(i))


class NativeBartPass(NativePass):
    """The same for BART and Marian, whose rows attend to a source, too."""

    def __init__(self, model: Int8Decoder, kernels: native.Kernels) -> None:
        self._positions = model.positions
        super().__init__(model, kernels)
        assert model.positions is not None
        self.length = min(self.length, model.positions.shape[0])

    def _sources(self, rows: Rows) -> int:
        s = rows.sources
        if s is None:
            table, each = torch.zeros(1, 1, dtype=torch.int32), [0] * rows.count
        else:
            table, each = ops.contiguous(s.table, torch.int32), s.each
        self._read = table, array("q", each)
        packed = struct.pack(native.SOURCE_TABLE, table.data_ptr(), self._read[1].buffer_info()[0], table.shape[1])
        self._packed_sources = array("B", packed)  # until the next pass
        return self._packed_sources.buffer_info()[0]

    def _bart(self) -> int:
        c, t = self.config, self.tensors
        norm = t.get("embed_norm")
        layers = self._keep(b"".join(self._pack_source_layer(i) for i in range(c.layers)))
        vectors = (self._positions, *((None, None) if norm is None else norm))
        activation = ops.ACTIVATIONS.index(c.activation)
        return self._keep(struct.pack(native.BART, layers, *ops.addresses_of(*vectors), c.embedding_scale, activation))

    def _pack_source_layer(self, i: int) -> bytes:
        at, t = f"layers.{i}.", self.tensors
        biases = (t[f"{at}attention_norm"][1], t[f"{at}mlp_norm"][1], *t[f"{at}cross_norm"])
        linears = (*self._product(f"{at}cross_q"), *self._product(f"{at}cross_out"))
        return struct.pack(native.BART_LAYER, *ops.addresses_of(*biases), *linears)


def suits_bart_pass(c: ModelConfig) -> bool:
    """Whether the native pass knows these layers."""
    usual = c.stream_norm and c.layer_norm and c.encoder is not None and not c.gated and bool(c.positions)
    ordinary = c.heads == c.kv_heads and c.attention_scale == c.head_dim**-0.5 and c.logit_scale == 1.0
    return usual and ordinary and not c.logit_cap and not c.experts


class Int8Decoder(Transformer):
    """A decoder of any family, layer by layer, with int8 products; the native calls know Llama's and BART's layers."""

    exact = True  # every product is row-invariant on every machine

    def __init__(
        self, config: ModelConfig, tensors: Tensors, length: int | None = None, bidirectional: bool = False
    ) -> None:
        """As `Int8Transformer`. bidirectional: an encoder, without a head."""
        self._begin(config, torch.float32, length=length)
        self.dtype, self.tensors, self.embedding = torch.int8, tensors, tensors["embedding"]
        self.add_vectors(tensors, length, bidirectional)
        self.layers = [self._layer(i) for i in range(config.layers)]
        if not bidirectional:
            self.head = int8_product(quant.product(tensors, "head", config))
        if config.encoder is not None:
            own = {name.removeprefix(quant.ENCODER): t for name, t in tensors.items() if name.startswith(quant.ENCODER)}
            self.add_encoder(Int8Decoder(config.encoder, own, config.encoder.context_length, bidirectional=True))
        kernels = ops._loaded().kernels
        self.native = None if kernels is None or not suits_bart_pass(config) else NativeBartPass(self, kernels)
        self.drafts_chains = self.native is not None

    def shorten(self, ids: Tensor) -> bool:
        short = quant.product(self.tensors, "head", self.config).only(ids)
        self.tensors = self.tensors | quant.in_arenas(short.named("head").items())
        self.head, self.draft_ids = int8_product(short), ids
        if self.native is not None:
            self.native = NativeBartPass(self, self.native.kernels)
        return True

    def chains(
        self, rows: Rows, plane: Plane, slots: list[list[int]], budgets: list[int], floor: float, vocab: int | None
    ) -> list[Chain]:
        assert self.native is not None
        plane.count_pass()
        self._read_sources(rows, plane)
        return self.native.chains(rows, plane, slots, budgets, floor, vocab)

    @torch.inference_mode()
    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        if self.native is None:
            return super().forward(rows, plane, part, x, taps)
        plane.count_pass()
        self._read_sources(rows, plane)
        return self.native(rows, plane, part, x, taps)

    def _layer(self, i: int) -> Layer:
        c, at, t = self.config, f"layers.{i}.", self.tensors
        names = PRODUCTS[:2] if c.has_experts(i) and not c.shared_size else PRODUCTS
        products: dict[str, Any] = {name: int8_product(quant.product(t, at + name, c)) for name in names}
        if c.has_experts(i):
            both, back = (
                [int8_product(quant.product(t, f"{at}{name}.{e}", c)) for e in range(c.experts)]
                for name in ("gate_up", "down")
            )
            products = {"gate_up": None, "down": None} | products
            scores = linear(t[f"{at}router.weight"], t.get(f"{at}router.bias"))
            products["experts"] = Experts(Router(scores, routing_of(c), t.get(f"{at}correction.bias")), both, back)
        else:
            products["experts"] = None
        norms: Any = (t[f"{at}q_norm"], t[f"{at}k_norm"], c.norm_eps) if c.qk_norm else None
        around: dict[str, Any] = {name: t.get(at + name) for name in (*quant.NORMS, "sinks")}
        cross = None
        if c.encoder is not None:
            across = (int8_product(quant.product(t, at + name, c)) for name in quant.CROSS)
            cross = Cross(t[f"{at}cross_norm"], *across)
        return Layer(head_norms=norms, **products, **around, **layer_shape(c, i), cross=cross)


def open_int8(
    checkpoint: Checkpoint, length: int | None = None, settings: Settings = quant.DEFAULT, folder: Path | None = None
) -> Int8Transformer | Int8Decoder:
    """From a model's files, or from their quantised form in `folder` (default: our cache)."""
    config = checkpoint.config

    def build() -> quant.NamedTensors:
        ids = calibration_ids(checkpoint, settings.calibration)
        with stage("Quantising the weights") as done:
            yield from quant.calibrate(config, checkpoint.weights, ids, settings, done)

    if checkpoint.path == Path():  # a model in memory: no file tells it from another one of its shape
        tensors, trouble = quant.in_arenas(build()), ""
    else:
        tensors, trouble = quant.stored(quant.identity(checkpoint.path, config, settings), build, folder)
    model = (Int8Transformer if config.llama_like else Int8Decoder)(config, tensors, length)
    model.description = trouble
    return model


def int8_product(q: Quantised) -> Int8Linear | NativeProduct:
    """A product with packed weights: native where there is a compiler."""
    kernels = ops._loaded().kernels
    return Int8Linear(q, q.outputs) if kernels is None else NativeProduct(linear_fields(q), kernels, q)


class TorchProduct(NamedTuple):
    """A product's unpacked weights."""

    highs: Tensor  # [O, N] int8
    lows: Tensor  # [K, N] int8
    scale: Tensor  # [N]
    bias: Tensor | None  # [N]
    outliers: Tensor  # [O]

    @staticmethod
    def of(q: Quantised, gated: bool = False) -> TorchProduct:
        order = torch.arange(q.outputs)
        if gated:  # all gates, then all ups
            order = order.view(-1, 2, quant.HALF).transpose(0, 1).reshape(-1)

        def columns(blocks: Tensor, count: int) -> Tensor:
            flat = blocks.transpose(1, 2).reshape(q.scale.shape[0], -1)[order, :count]
            return (flat.to(torch.int16) - 128).to(torch.int8).T.contiguous()

        highs, lows = columns(q.high, q.outliers.shape[0]), columns(q.weight, q.inputs)
        return TorchProduct(highs, lows, q.scale[order], None if q.bias is None else q.bias[order], q.outliers)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]; every element is computed on its own."""
        highs, lows, scale = quant.quantise_rows(x, self.outliers)
        total = torch._int_mm(lows, self.lows)  # [T, N] int32
        if self.outliers.shape[0]:
            total = total + 256 * torch._int_mm(highs, self.highs)
        y = (total.float() * scale[:, None]) * self.scale
        return y if self.bias is None else y + self.bias


class TorchPass:
    """Layer by layer through `ops`: for machines without a compiler, and as a reference in tests."""

    def __init__(self, model: Int8Transformer) -> None:
        self.config, self.tensors, self.cos, self.sin = model.config, model.tensors, model.cos, model.sin
        names = [f"layers.{i}.{name}" for i in range(model.config.layers) for name in PRODUCTS] + ["head"]
        self.products = {
            name: TorchProduct.of(quant.product(self.tensors, name, self.config), name.endswith("gate_up"))
            for name in names
        }

    @torch.inference_mode()
    def __call__(self, rows: Rows, plane: Plane, part: Part, x: Tensor | None, taps: tuple[int, ...]) -> Output:
        c = self.config
        x = self.tensors["embedding"][rows.tokens].float() if x is None else x.float().clone()  # [T, H]
        hidden: dict[int, Tensor] = {}
        for i in range(part.start, c.layers if part.stop is None else part.stop):
            if i not in part.skip_attention:
                x = x + self._attention(i, x, rows, plane)
            if i not in part.skip_mlp:
                x = x + self._mlp(i, x)
            if i in taps:
                hidden[i] = x.clone()
        if not part.head:
            return Output(x.new_zeros(0), hidden)
        return Output(self.products["head"](self._norm(x[rows.want], "norm"))[:, : part.vocab], hidden)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return ops.add_norm(x, None, self.tensors[name], self.config.norm_eps, torch.float32)

    def _attention(self, i: int, x: Tensor, rows: Rows, plane: Plane) -> Tensor:
        c, at = self.config, f"layers.{i}."
        qkv = self.products[f"{at}qkv"](self._norm(x, f"{at}attention_norm"))
        cos, sin = self.cos[rows.positions], self.sin[rows.positions]
        if i in c.no_rope_layers:
            cos, sin = cos[:, :0], sin[:, :0]
        norms = (self.tensors[f"{at}q_norm"], self.tensors[f"{at}k_norm"], c.norm_eps) if c.qk_norm else None
        q = ops.rope_store(qkv, cos, sin, plane.k[i], plane.v[i], rows.slots, c.heads, c.kv_heads, norms)
        mixed = ops.attend(q, plane.k[i], plane.v[i], rows, c.head_dim**-0.5, torch.float32, c.window(i))
        return self.products[f"{at}out"](mixed)

    def _mlp(self, i: int, x: Tensor) -> Tensor:
        at, wide = f"layers.{i}.", self.config.intermediate_size
        both = self.products[f"{at}gate_up"](self._norm(x, f"{at}mlp_norm"))  # [T, 2I], each half padded
        gate, up = both.chunk(2, 1)
        return self.products[f"{at}down"](ops.gate_mul(torch.cat([gate[:, :wide], up[:, :wide]], 1)))


class Int8Linear:
    """y = x Wᵀ with int8 weights and rows, called like `linear.Linear`. x [T, in] -> [T, out] float32."""

    exact = True

    def __init__(self, packed: Quantised, outputs: int, gates: bool = False) -> None:
        self.packed, self.outputs, self.gates = packed, outputs, gates

    @classmethod
    def of(cls, weight: Tensor, gates: bool = False, bias: Tensor | None = None) -> Int8Linear:
        """From floats [out, in] and [out]; a gated pair has no bias."""
        outputs = weight.shape[0]
        weight = quant.interleave(weight) if gates else weight
        none = torch.zeros(weight.shape[1])
        chunks = [quant.quantise(chunk.float(), None, none, 0) for chunk in weight.split(_CHUNK)]
        packed, high, scale = (torch.cat([getattr(chunk, n) for chunk in chunks]) for n in quant.PARTS[:3])
        bias = None if bias is None else torch.nn.functional.pad(bias.float(), (0, scale.shape[0] - outputs))
        return cls(Quantised(packed, high, scale, bias, chunks[0].outliers, *weight.shape), outputs, gates)

    def as_tensors(self, name: str) -> dict[str, Tensor]:
        """For `quantise.stored`."""
        q = self.packed
        shape = torch.tensor([q.outputs, q.inputs, self.outputs, self.gates])
        return q.named(name) | {f"{name}.shape": shape}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], name: str) -> Int8Linear:
        weight, high, scale, outliers = (tensors[f"{name}.{part}"] for part in quant.PARTS)
        rows, inputs, outputs, gates = tensors[f"{name}.shape"].tolist()
        bias = tensors.get(f"{name}.bias")
        return cls(Quantised(weight, high, scale, bias, outliers, rows, inputs), outputs, bool(gates))

    def __call__(self, x: Tensor) -> Tensor:
        return self._torch(x.float())[:, : self.outputs]

    def with_int16_rows(self, x: Tensor) -> Tensor:
        """The same with two bytes for every input."""
        x, weight = x.float(), self._torch.lows
        scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 32639  # [T, 1]
        whole = (x / scale).round().nan_to_num(0, 0, 0)  # [T, in]
        high = ((whole + 128) / 256).floor()
        low = whole - 256 * high
        y = torch._int_mm(high.to(torch.int8), weight) * 256.0 + torch._int_mm(low.to(torch.int8), weight)
        return (y * scale * self._torch.scale)[:, : self.outputs] + (x * 0).sum(1, keepdim=True)

    def first(self, x: Tensor, outputs: int) -> Tensor:
        """The first outputs only [T, outputs]."""
        return self(x)[:, :outputs]

    def gated(self, x: Tensor, activation: str = SILU) -> Tensor:
        """activation(gate) * up [T, out / 2]."""
        if not self.gates:
            return ops.gate_mul(self(x), activation)
        gate, up = self._torch(x.float()).chunk(2, 1)  # [T, out / 2] each, padded
        wide = self.outputs // 2
        return ops.gate_mul(torch.cat([gate[:, :wide], up[:, :wide]], 1), activation)

    @cached_property
    def _torch(self) -> TorchProduct:
        return TorchProduct.of(self.packed, self.gates)


@cache
def _indices(rows: int) -> tuple[Tensor, Tensor]:
    """Zeros, and the numbers of so many rows. Nobody writes to them."""
    return torch.zeros(rows + 1, dtype=torch.long), torch.arange(rows)


class NativeProduct(Addresses):
    """The same by the native kernels: a model without layers, whose head is this product."""

    exact = True

    def __init__(self, fields: tuple[int, ...], kernels: native.Kernels, *held: object) -> None:
        """fields: of its `Linear` in native/int8.h; held: what they are the addresses of."""
        super().__init__(*held)
        self.fields, self.kernels, self.outputs = fields, kernels, fields[5]
        self._models = {self.outputs: self._pack(self.outputs)}

    def _pack(self, outputs: int) -> int:
        """The model with the first outputs."""
        fields = (*self.fields[:5], outputs, *self.fields[6:])
        sizes = (self.fields[6], 1, 1, 1, 0, 1, outputs, 1)
        model = (0, 0, 0, 0, 0, *fields, *sizes, 0.0, 0, 0, 0, 1, *native.NO_LINEAR, 0, *Words().elsewhere, 0)
        return self._keep(struct.pack(native.MODEL, *model))

    def gated(self, x: Tensor, activation: str = SILU) -> Tensor:
        """activation(gate) * up [T, out / 2]; the first half are gates."""
        return ops.gate_mul(self(x), activation)

    def __call__(self, x: Tensor) -> Tensor:
        return self.first(x, self.outputs)

    def first(self, x: Tensor, outputs: int) -> Tensor:
        """As in `Int8Linear`; the other weights are not read."""
        if outputs not in self._models:
            self._models[outputs] = self._pack(outputs)
        x, rows = x.to(torch.float32).contiguous(), x.shape[0]
        out = torch.empty(rows, outputs)
        zeros, every = _indices(rows)
        inputs = [zeros.data_ptr()] * 5 + [every.data_ptr(), zeros.data_ptr(), 0, x.data_ptr(), 0, 0, 0, out.data_ptr()]
        threads = torch.get_num_threads()
        self.kernels.int8_pass(self._models[outputs], *inputs, 0, 0, 0, 0, 0, 1, 0, 1, rows, rows, 0, 0, threads, 0)
        return out
