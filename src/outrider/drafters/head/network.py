"""The network of a trained head: a few layers on top of the target's features, over rows and a plane.

Head row p has the token after position p and that position's feature (the target's hidden states there, fused), and
predicts the token after that one. `eagle3` and `eagle1` continue from their own output; `block` fills in masks, all in
one pass. Variants of published heads are in `HeadConfig`.

Promise: a row's scores are the same bits whichever rows share its pass (float32 and bfloat16 on a CPU with oneDNN, and
on a GPU), as in `transformer`. The residual stream is float32 even when weights are bfloat16.
It knows rows and planes, not sequences, drafts or the target's layers.
"""

from __future__ import annotations

import copy
import struct
from array import array
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...backends import Chain, PlaneShape, ops, with_index
from ...backends.cpu import native, quantise
from ...backends.cpu.blocks import GATED, BlockLinear, BlockTransformer, joined
from ...backends.cpu.int8 import Addresses, ChainBuffers, Int8Linear, NativeRows, PlaneAddresses, Words
from ...backends.cpu.native import COLUMNS
from ...backends.cpu.quantise import OUTPUTS
from ...backends.linear import linear, summed
from ...backends.rows import Rows
from ...backends.transformer import tables_of
from ...engine.cache import Plane
from ...models.blocks import BlockTensor
from ...models.config import inverse_frequencies
from ...models.speculators import (
    EAGLE1,
    EAGLE3,
    HeadConfig,
    HeadTensors,
    check_head,
    layer_name,
    read_head,
    target_hash,
    target_ids,
    write_head,
)
from .._trained import DraftVocabulary

Correction = tuple[Tensor, Tensor]  # [r, H] and [H, r]: a state h [H] becomes h + up down h
_TAIL = 16  # columns of drafted ancestors in a GPU's blocks are padded to a multiple of this


@dataclass(frozen=True)
class _Layer:
    attention_norm: Any  # [H]; None in the first layer of eagle1 without layernorms
    qkv: Any  # products, as `linear` makes them
    head_norms: tuple[Tensor, Tensor, float] | None  # of q and k [d], eps
    out: Any
    mlp_norm: Tensor  # [H]
    gate_up: Any
    down: Any


def _products_of(at: str) -> dict[str, tuple[str, ...]]:
    """A layer's products, each with the names of the weights that it joins."""
    joined = {"qkv": ("self_attn.q", "self_attn.k", "self_attn.v"), "out": ("self_attn.o",)}
    joined |= {"gate_up": ("mlp.gate", "mlp.up"), "down": ("mlp.down",)}
    return {field: tuple(f"{at}.{part}_proj.weight" for part in parts) for field, parts in joined.items()}


class Head(DraftVocabulary):
    """A head of either kind. Its only state between passes is the plane."""

    def __init__(
        self,
        config: HeadConfig,
        tensors: HeadTensors,
        embedding: Any,  # [V, H] the target's, or a target in blocks; a narrow head has its own
        dtype: torch.dtype,  # int8 (CPU only): weights are quantised here, or stay in the blocks of their file
        device: torch.device | str = "cpu",
        length: int | None = None,  # number of positions; default: the context length
        stored_as: str | None = None,  # the name of its int8 weights on disk; None: they are not kept
        output: Any = None,  # the target's output product, for a head that has none
    ) -> None:
        check_head(config, tensors, "The head")
        self.config, self.device, self.int8 = config, with_index(device), dtype is torch.int8
        self.compute = dtype = torch.float32 if self.int8 else dtype
        self.stream = torch.promote_types(dtype, torch.float32)  # dtype of the residual stream
        own = tensors.get("embed_tokens.weight")
        self.embedding = embedding if own is None else own.to(self.device, dtype)
        self._tensors = tensors
        self._kernels = ops._loaded().kernels if self.int8 else None
        kinds = {tensor.kind for tensor in tensors.values() if isinstance(tensor, BlockTensor)}
        if stored_as is not None and self._kernels is not None and kinds:
            stored_as = "-".join([stored_as, *sorted(kinds)])  # output rows may be the target's, of any kind
        if self.int8 and stored_as is not None:
            self._packed = quantise.stored(stored_as, self._quantised).tensors
        else:
            self._packed = dict(self._quantised()) if self.int8 else {}
        self.fc: Any = self._product("fc", "fc.weight") if "fc.weight" in tensors else None
        names = ["midlayer.hidden_norm.weight", "norm.weight", "fc.bias", "input_norm.weight", "feature_norm.weight"]
        names += ["embedding_layernorm.weight", "hidden_layernorm.weight"]
        vectors: list[Any] = [self._vector(name) if name in tensors else None for name in names]
        self.hidden_norm, self.norm, self.fc_bias, self.input_norm, self.feature_norm = vectors[:5]
        self.embedding_norm, self.state_norm = vectors[5:]
        self.fc_norms = [self._vector(f"fc_norm.{i}.weight") for i in range(len(config.taps) * config.fc_norm)]
        self.layers = [self._layer(i) for i in range(config.layers)]
        self.head = self._product("head", "lm_head.weight") if output is None else output
        self.shares_output = output is not None  # with the target: its rows are not to be changed
        self.ids, self.vocab_size = target_ids(tensors["d2t"].cpu()), config.vocab_size  # [D]
        self.device_ids = self.ids.to(self.device)  # [D] the same
        self._other_rows: OtherRows | None = None
        self.vocabulary: Any = None  # who replaces ids
        self.correction: Correction | None = None  # learnt while serving (`learning.py`), on a CPU
        self._own_rows: Tensor | None = None  # [D, H] on a GPU: the output rows, where `head` has a correction inside
        self._folded: Correction | None = None
        self.masks = [self._vector(n) for n in ("mask_embedding", "mask_hidden")] if config.kind == "block" else []
        self._tensors, self._packed = {}, {}
        self._scratch: Any = None
        self._prepare(length or config.context_length)

    def _prepare(self, length: int) -> None:
        """What depends on the configuration alone: rope for so many positions, and the native form."""
        self.cos, self.sin = self._rope(length)
        self.native = None if self._kernels is None else Int8Head(self, self._kernels)

    def read_as(self, config: HeadConfig) -> Head:
        """The same weights under another reading of their conventions."""
        twin = copy.copy(self)
        twin.config = config
        twin._prepare(self.cos.shape[0])
        return twin

    def replace_ids(self, places: Tensor, ids: Tensor, rows: Tensor) -> None:
        """Map draft ids [n] to other target ids [n], with these output rows [n, H]."""
        self.ids[places] = ids
        if self.device.type != "cpu":
            self.device_ids[places.to(self.device)] = ids.to(self.device)
        if ops.on_gpu(self.cos):
            rows = rows.to(self.device, self.compute)
            if self._own_rows is not None:
                self._own_rows[places.to(self.device)] = rows
            self.head.weight[places.to(self.device)] = rows if self._folded is None else folded(rows, self._folded)
            return
        self._other_rows = self._other_rows or OtherRows(self.config.hidden_size, ops._loaded().kernels)
        self._other_rows.put(places.tolist(), rows)

    # ------------------------------------------------------------ a learnt correction

    @property
    def folds(self) -> bool:
        """Whether a correction goes into the output rows: on a GPU, where passes are recorded."""
        return bool(ops.on_gpu(self.cos))

    def keep_output_rows(self) -> Tensor:
        """On a GPU: the output rows [D, H] as they are, from now on kept apart from those that are multiplied with."""
        if self._own_rows is None:
            self._own_rows = self.head.weight.clone()
        return self._own_rows

    def fold_output_rows(self, correction: Correction | None) -> None:
        """Put a correction into the output rows, in place: recorded passes read them where they are."""
        rows, self._folded = self.keep_output_rows(), correction
        self.head.weight.copy_(rows if correction is None else folded(rows, correction))

    def output_scores(self, normed: Tensor) -> Tensor:
        """Scores [n, D] of states after the norm [n, H], without a correction."""
        scores: Tensor = summed(self.head(normed.to(self.compute))).to(self.stream)
        if self._other_rows is not None:
            self._other_rows.score(normed, scores)
        return scores

    def _corrected_scores(self, x: Tensor) -> Tensor:
        """Scores [R, D] of outputs x [R, H], with the correction."""
        assert self.correction is not None
        down, up = self.correction
        h = ops.add_norm(x.contiguous(), None, self.norm, self.config.norm_eps, self.stream)  # [R, H]
        return self.output_scores(h + (h @ down.T) @ up.T)

    @property
    def plane_shape(self) -> PlaneShape:
        dtype = self.compute if self.device.type == "cuda" else self.stream
        return PlaneShape(self.config.layers, self.config.kv_heads, self.config.head_dim, dtype)

    @property
    def exact(self) -> bool:
        """Whether every product is row-invariant on this machine."""
        return bool(self.head.exact)

    @torch.inference_mode()
    def fuse(self, taps: list[Tensor]) -> Tensor:
        """Features [T, H] from the target's hidden states after each tap, [T, target's H] each."""
        joined = self._normed(torch.cat(taps, 1) if len(taps) > 1 else taps[0])  # [T, taps * H]
        return self._fc(joined) if self._fuses else joined.to(self.stream)

    def _normed(self, joined: Tensor) -> Tensor:
        """The tapped states [T, taps * H] after the norms that this variant has."""
        c = self.config
        if c.normed:
            return ops.add_norm(joined.to(self.stream), None, self.feature_norm, c.target_norm_eps, self.stream)
        if self.fc_norms:
            parts = (part.contiguous() for part in joined.to(self.stream).split(c.target_hidden_size, 1))
            pairs = zip(parts, self.fc_norms, strict=True)
            joined = torch.cat([ops.add_norm(part, None, w, c.norm_eps, self.stream) for part, w in pairs], 1)
        if self.input_norm is not None:
            joined = ops.add_norm(joined.to(self.stream), None, self.input_norm, c.norm_eps, self.stream)
        return joined

    def _fc(self, joined: Tensor) -> Tensor:
        x: Tensor = self.fc.with_int16_rows(joined) if self.int8 else summed(self.fc(joined.to(self.compute)))
        return x.to(self.stream) if self.fc_bias is None else x.to(self.stream) + self.fc_bias

    @torch.inference_mode()
    def read(self, rows: Rows, plane: Plane, hidden: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`scores` of rows with the target's hidden states after all taps [T, taps * H], not fused yet."""
        if self._fuses_natively:
            return self._native_pass(rows, plane, self._normed(hidden), masked, fused=False)
        return self.scores(rows, plane, self.fuse([hidden]), masked)

    @property
    def _fuses(self) -> bool:
        """Whether `fc` makes features of the target's states; else the last state is the feature."""
        return self.fc is not None and self.config.kind != EAGLE1

    @property
    def _fuses_natively(self) -> bool:
        return self.native is not None and self._fuses and self.fc_bias is None

    @property
    def reads_slots(self) -> bool:
        """Whether `chains` reads hidden states where they are: nothing is done to them before they are fused."""
        return self._fuses_natively and self.input_norm is None and not self.fc_norms

    @property
    def drafts_chains(self) -> bool:
        """Whether `chains` runs a whole draft in one native call."""
        return self.native is not None and self.config.kind == EAGLE3 and self.correction is None

    def keep(self, rows: Rows, plane: Plane, hidden: Tensor) -> None:
        """Write the K/V of rows with the target's hidden states [T, taps * H]; no more is computed than that takes."""
        if self.native is not None and self.config.kind != EAGLE1:
            self.chains(rows, plane, hidden, [], [], (0.0,))
        else:
            self.read(rows, plane, hidden)

    def chains(
        self, rows: Rows, plane: Plane, hidden: Tensor | int, slots: list[list[int]], budgets: list[int],
        floors: Listing[float],
    ) -> list[Chain]:  # fmt: skip
        """Write the K/V of committed rows with the target's hidden states [T, taps * H], or with what is in their slots
        (`FeatureCache.in_slots`, where it `reads_slots`); then, after each wanted one, the likeliest tokens,
        budgets[i] at most, fed into slots[i], until the survival of a chain of 1, 2, … tokens is below floors[0],
        floors[1], …; the last one holds for longer chains."""
        assert self.native is not None
        if isinstance(hidden, int):
            return self.native.chains(rows, plane, (0, 0, hidden), self, slots, budgets, floors)
        features = self._normed(hidden) if self._fuses_natively else self.fuse([hidden])
        features = features.to(torch.float32).contiguous()
        shown = (0, features.data_ptr(), 0) if self._fuses_natively else (features.data_ptr(), 0, 0)
        return self.native.chains(rows, plane, shown, self, slots, budgets, floors)

    def forward(
        self, rows: Rows, plane: Plane, features: Tensor, masked: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits of the wanted rows over the target's ids [R, V], and each row's output [T, H]."""
        scores, outputs = self.scores(rows, plane, features, masked)
        return self.spread(scores), outputs

    @torch.inference_mode()
    def scores(self, rows: Rows, plane: Plane, features: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The same over the draft vocabulary: [R, D], and the outputs [T, H].

        features [T, H]; masked [T] bool: rows that have neither token nor feature (`block`).
        """
        if self.native is not None:
            if self.config.kind == EAGLE1:
                features = self._beside_token(self.embedding[rows.tokens].to(self.stream), features)
            return self._native_pass(rows, plane, features, masked)
        rows = self._on_device(rows)
        x = features.to(self.stream, copy=True)  # [T, H] the residual stream; the next norm adds `delta`
        e = self.embedding[rows.tokens].to(self.stream)  # [T, H]
        if masked is not None:
            hidden = masked.to(self.device)[:, None]  # [T, 1]
            e, x = torch.where(hidden, self.masks[0], e), torch.where(hidden, self.masks[1], x)
        rope, eps = (self.cos[rows.positions], self.sin[rows.positions]), self.config.norm_eps  # [T, d/2]
        delta: Any = None
        if self.config.kind == EAGLE1:
            x = self._beside_token(e, x)
        for i, layer in enumerate(self.layers):
            if layer.attention_norm is None:
                h = x.to(self.compute)
            elif i > 0 or self.hidden_norm is None:
                h = ops.add_norm(x, delta, layer.attention_norm, eps, self.compute)
            else:  # the token beside the feature
                token = ops.add_norm(e, None, layer.attention_norm, eps, self.compute)
                kept = self.config.norm_before_residual
                feature = ops.add_norm(x, None, self.hidden_norm, eps, self.stream if kept else self.compute)
                h = torch.cat([token, feature.to(self.compute)], 1)  # [T, 2H]
                x = feature if kept else x
            delta = self._attention(i, h, rows, (plane.k[i], plane.v[i]), rope)
            delta = layer.down(layer.gate_up.gated(ops.add_norm(x, delta, layer.mlp_norm, eps, self.compute)))
        if self.norm is None:
            x = x + summed(delta)
            h = x.to(self.compute)
        else:
            h = ops.add_norm(x, delta, self.norm, eps, self.compute)
        if not rows.want.shape[0]:
            return self._outcome(rows.want, x.new_zeros(0, self.config.draft_vocab_size), x)
        if self.correction is not None:
            return self._corrected_scores(x[rows.want]), x
        return self._outcome(rows.want, summed(self.head(h[rows.want])).to(self.stream), x)

    def _native_pass(
        self, rows: Rows, plane: Plane, features: Tensor, masked: Tensor | None, fused: bool = True
    ) -> tuple[Tensor, Tensor]:
        assert self.native is not None
        if self.correction is None or not rows.want.shape[0]:
            return self._outcome(rows.want, *self.native(rows, plane, features, masked, fused))
        outputs = self.native(rows, plane, features, masked, fused, scored=False)[1]
        return self._corrected_scores(outputs[rows.want]), outputs

    def _beside_token(self, e: Tensor, features: Tensor) -> Tensor:
        """eagle1: the residual stream [T, H] from the tokens' embeddings and the features."""
        parts, norms = (e, features.to(self.stream)), (self.embedding_norm, self.state_norm)
        eps, kind = self.config.norm_eps, self.stream
        pairs = zip(parts, norms, strict=True)
        return self._fc(torch.cat([x if w is None else ops.add_norm(x, None, w, eps, kind) for x, w in pairs], 1))

    def _outcome(self, want: Tensor, scores: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Scaled scores [R, D] of the wanted rows [R], and what drafted tokens continue from [T, H]."""
        c = self.config
        if self._other_rows is not None and want.shape[0]:
            normed = ops.add_norm(outputs[want], None, self.norm, c.norm_eps, self.stream)  # [R, H]
            self._other_rows.score(normed, scores)
        if c.norm_output:
            outputs = ops.add_norm(outputs, None, self.norm, c.norm_eps, self.stream)
        return scores if c.logit_scale == 1.0 else scores * c.logit_scale, outputs

    def _attention(self, i: int, h: Tensor, rows: Rows, kv: tuple[Tensor, Tensor], rope: tuple[Tensor, Tensor]) -> Any:
        c, layer = self.config, self.layers[i]
        q = ops.rope_store(layer.qkv(h), *rope, *kv, rows.slots, c.heads, c.kv_heads, layer.head_norms)
        return layer.out(ops.attend(q, *kv, rows, c.head_dim**-0.5, self.compute, c.window(i)))

    def _vector(self, name: str) -> Tensor:
        vector: Tensor = self._tensors[name].to(self.device, self.stream)
        return vector

    def _quantised(self) -> quantise.NamedTensors:
        """Every product in int8, or in pieces. It takes half a second, so that it is kept on disk."""
        alone = {"fc": ("fc.weight",), "head": ("lm_head.weight",)}
        products: dict[str, tuple[str, ...]] = {key: names for key, names in alone.items() if names[0] in self._tensors}
        for at in map(layer_name, range(self.config.layers)):
            products |= {f"{at}.{field}": names for field, names in _products_of(at).items()}
        for key, names in products.items():
            if self._stays_in_blocks(names):
                yield from joined(key, [(self._tensors[n].raw, self._tensors[n].kind) for n in names]).items()
                continue
            parts = [self._tensors[name].to(self.device) for name in names]
            weight = torch.cat(parts) if len(parts) > 1 else parts[0]
            quantised = Int8Linear.of(weight, gates=key.endswith(GATED), bias=self._bias(names))
            yield from quantised.as_tensors(key).items()

    def _stays_in_blocks(self, names: tuple[str, ...]) -> bool:
        """Whether kernels multiply by these matrices as they are stored."""
        return self._kernels is not None and all(isinstance(self._tensors[name], BlockTensor) for name in names)

    def _bias(self, names: tuple[str, ...]) -> Tensor | None:
        """The joined biases of these products; that of `fc` is added apart."""
        biases = [name.removesuffix("weight") + "bias" for name in names]
        if biases[0] not in self._tensors or biases[0] == "fc.bias":
            return None
        return torch.cat([self._tensors[bias].to(self.device, self.compute) for bias in biases])

    def _product(self, key: str, *names: str) -> Any:
        if self._stays_in_blocks(names):
            assert self._kernels is not None
            outputs, inputs = sum(self._tensors[name].shape[0] for name in names), self._tensors[names[0]].shape[1]
            if key.endswith(GATED):
                outputs = -(-outputs // OUTPUTS) * OUTPUTS
            return BlockLinear(self._packed, key, outputs, inputs, self._kernels)
        if self.int8:
            return Int8Linear.from_tensors(self._packed, key)
        weight = torch.cat([self._tensors[name].to(self.device, self.compute) for name in names])
        return linear(weight, self._bias(names))

    def _layer(self, i: int) -> _Layer:
        at, c = layer_name(i), self.config
        first, norms = f"{at}.input_layernorm.weight", None
        if c.qk_norm:
            q, k = (self._vector(f"{at}.self_attn.{name}_norm.weight") for name in "qk")
            norms = (q, k, c.norm_eps)
        return _Layer(
            attention_norm=self._vector(first) if first in self._tensors else None,
            head_norms=norms,
            mlp_norm=self._vector(f"{at}.post_attention_layernorm.weight"),
            **{field: self._product(f"{at}.{field}", *names) for field, names in _products_of(at).items()},
        )

    def _rope(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin for every position [L, d/2]."""
        c = self.config
        frequencies = inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)  # [d/2]
        factor = c.rope_scaling.attention_factor if c.rope_scaling else 1.0
        return tables_of(frequencies, factor, length, self.stream, self.device)

    def _on_device(self, rows: Rows) -> Rows:
        """Rows on the head's device; for eager passes on a GPU, with attention blocks of one row each."""
        if rows.blocks is not None or not ops.on_gpu(self.embedding):
            return rows
        from ...backends.cuda.kernels.attention import Blocks, Scratch

        c, count, device = self.config, rows.slots.shape[0], self.device
        lines, line = torch.unique(rows.lines.cpu(), return_inverse=True)  # only these are copied
        table = rows.table[lines.to(rows.table.device)].to(device, torch.int32).contiguous()  # [lines, length]
        deep = 0 if rows.ancestors is None else rows.ancestors.shape[1]
        tail = torch.zeros(count, -(-max(deep, 1) // _TAIL) * _TAIL, dtype=torch.int32)  # [T, D]
        info = torch.zeros(count, 8, dtype=torch.int32)
        keys = rows.context.cpu().long()  # [T]
        if rows.ancestors is not None:
            tail[:, :deep] = rows.ancestors.cpu().clamp(min=0)
            keys = keys + (rows.ancestors.cpu() >= 0).sum(1)
        for column, values in enumerate((torch.arange(count), torch.ones(count), line, rows.context.cpu(), keys)):
            info[:, column] = values
        if self._scratch is None:
            self._scratch = Scratch(256, c.heads, c.head_dim, rows.table.shape[1], device)
        blocks = Blocks(info.to(device), tail.to(device), table, self._scratch)
        tokens, positions, slots, want = (t.to(device) for t in (rows.tokens, rows.positions, rows.slots, rows.want))
        return Rows(tokens, positions, slots, slots, slots, table, None, want, blocks=blocks)


def folded(rows: Tensor, correction: Correction) -> Tensor:
    """Output rows [n, H] that score a state as `rows` score the corrected one."""
    down, up = correction
    return torch.addmm(rows, rows @ up, down)


class OtherRows:
    """Output rows beside a CPU's packed weights: multiplied separately, their scores replace the packed ones."""

    def __init__(self, hidden: int, kernels: native.Kernels | None) -> None:
        self.kernels = kernels
        self.index: dict[int, int] = {}  # draft id -> row
        self.places = torch.zeros(64, dtype=torch.long)  # [n or more]
        self.rows = torch.zeros(64 // COLUMNS, hidden, COLUMNS)  # [blocks, H, 16]: row i is column i % 16 of its block
        self.addresses = [0, 0]  # of rows and places

    def put(self, places: list[int], rows: Tensor) -> None:
        """rows [n, H] of these draft ids, new or known."""
        at = torch.tensor([self.index.setdefault(place, len(self.index)) for place in places])
        while len(self.index) > len(self.places):
            self.places, self.rows = torch.cat([self.places, self.places]), torch.cat([self.rows, self.rows])
        self.places[at], self.rows[at // COLUMNS, :, at % COLUMNS] = torch.tensor(places), rows.to(self.rows.dtype)
        self.addresses = ops.addresses_of(self.rows, self.places)

    def score(self, normed: Tensor, scores: Tensor) -> None:
        """normed [R, H]; scores [R, D] are corrected in place."""
        count, normed = len(self.index), normed.float().contiguous()
        if self.kernels is None:
            own = (normed @ self.rows).transpose(0, 1).flatten(1)[:, :count]  # [R, n]
        else:
            own = torch.empty(normed.shape[0], count)
            addresses = ops.addresses_of(normed, self.rows, None, own)
            self.kernels.product(*addresses, normed.shape[0], count, normed.shape[1], 0, torch.get_num_threads())
        scores[:, self.places[:count]] = own.to(scores.dtype)


class Int8Head(Addresses):
    """The int8 head on a CPU: `Head.scores` in one native call, with all weights' addresses in the order of pass.h.

    Weights are in the blocks of their file, or quantised without calibration and outliers: errors cost acceptance only.
    The target's hidden states do have outliers, so `fc` reads them with 16 bits. Without a compiler, `Int8Linear`
    products do the same in torch.
    """

    def __init__(self, head: Head, kernels: native.Kernels) -> None:
        weights = (head.layers, head.head, head.fc, head.norm, head.hidden_norm, head.masks)
        super().__init__(*weights, head.cos, head.sin)
        self.kernels, self.layers, self.width = kernels, head.config.layers, head.config.hidden_size
        self.outputs, self.embedding = head.config.draft_vocab_size, head.embedding
        self._model = self._pack(head)

    def _words(self) -> Words:
        """The target's own embedding where its passes are native, else a copy in bfloat16."""
        if isinstance(self.embedding, BlockTransformer):
            return self.embedding.words
        self._held.append(words := self.embedding.to(torch.bfloat16).contiguous())
        return Words(words.data_ptr())

    def __call__(
        self, rows: Rows, plane: Plane, features: Tensor, masked: Tensor | None, fused: bool = True, scored: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Scores of the wanted rows [R, D] (none, unless `scored`), and every row's output [T, H].

        features [T, H]; with `fused` false, hidden states [T, taps * H].
        """
        inputs = NativeRows(rows)
        lists, count, length = inputs.lists, inputs.count, inputs.table.shape[1]
        lists[5] = lists[5] if scored else []
        if masked is not None:
            lists[0] = [-1 if mask else token for mask, token in zip(masked.tolist(), lists[0], strict=True)]
        wanted = len(lists[5])
        features, at = features.to(torch.float32).contiguous(), PlaneAddresses.of(plane)
        scores, outputs = torch.empty(wanted, self.outputs), torch.empty(count, self.width)
        taps = array("q", [0] * (self.layers - 1) + [outputs.data_ptr()])
        self.kernels.int8_pass(
            self._model, *inputs.addresses(),
            features.data_ptr() if fused else 0, 0 if fused else features.data_ptr(), 0, at.kv,
            scores.data_ptr() if wanted else 0, 0, 0, taps.buffer_info()[0], 0, 0,
            length, inputs.depth, at.slots, count, wanted, 0, self.layers, torch.get_num_threads(),
            0,
        )  # fmt: skip
        return scores, outputs

    def chains(
        self, rows: Rows, plane: Plane, shown: tuple[int, int, int], head: Head, slots: list[list[int]],
        budgets: list[int], floors: Listing[float],
    ) -> list[Chain]:  # fmt: skip
        """As `Head.chains`. shown: the address of features [T, H], of hidden states [T, taps * H], or of the addresses
        of each tap's [S, H]; the others are 0."""
        inputs, out, others = NativeRows(rows), ChainBuffers(slots, budgets, floors), head._other_rows
        at = PlaneAddresses.of(plane)
        self.kernels.chain(
            self._model, *inputs.addresses(), *shown, at.kv,
            0, 0, 0, 0, 0, 0, inputs.table.shape[1], inputs.depth, at.slots,
            inputs.count, out.count, 0, self.layers, torch.get_num_threads(), 0,
            *out.given, head.ids.data_ptr(), out.floors,
            *((0, 0) if others is None else others.addresses),
            *out.made, 0 if others is None else len(others.index), out.longest, head.config.norm_output,
            head.config.logit_scale,
        )  # fmt: skip
        return out.chains()

    def _pack(self, head: Head) -> int:
        c, words = head.config, self._words()
        layers = b"".join(self._pack_layer(layer, c.window(i)) for i, layer in enumerate(head.layers))
        masks = [mask.data_ptr() for mask in head.masks] or [0, 0]
        sizes = (c.hidden_size, c.heads, c.kv_heads, c.head_dim, head.cos.shape[1], c.intermediate_size, self.outputs)
        fields = (
            self._keep(layers),
            *(*ops.addresses_of(head.norm), words.embedding, *ops.addresses_of(head.cos, head.sin)),
            *self._fields(head.head),
            *(*sizes, head.cos.shape[0], c.norm_eps),
            *(*ops.addresses_of(head.hidden_norm), *masks, c.vocab_size),
            *(native.NO_LINEAR if head.fc is None else self._fields(head.fc)),
            *(c.norm_before_residual, *words.elsewhere, 0),
        )
        return self._keep(struct.pack(native.MODEL, *fields))

    def _pack_layer(self, layer: Any, window: int) -> bytes:
        norms = ops.addresses_of(layer.attention_norm, layer.mlp_norm, *(layer.head_norms or (None, None))[:2])
        products = (layer.qkv, layer.out, layer.gate_up, layer.down)
        linears = [field for product in products for field in self._fields(product)]
        return struct.pack(native.LAYER, *norms, *linears, True, window)

    def _fields(self, product: Any) -> tuple[int, ...]:
        return product.fields if isinstance(product, BlockLinear) else self._linear(product.packed)


__all__ = ["Head", "HeadConfig", "read_head", "target_hash", "write_head"]
