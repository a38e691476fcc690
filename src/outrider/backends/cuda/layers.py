"""A decoder's layers in five kernels each, for passes of up to sixteen rows; with more rows, the same bits in eight.

The five: q, k and v with rope and K/V stores; attention; output product and residual sum; gate and up with activation;
down and residual sum. Whoever adds to the stream also prepares what the next block reads of it (`Entering`).
It suits pre-norm decoders with gated blocks in bfloat16, whose weights are plain (`suits`). Which models those are does
not depend on the rows of a pass. It knows layers and rows, not sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...engine.cache import Plane
from ...models.config import GELU, SILU, ModelConfig
from .. import Part
from ..rows import Rows
from .kernels import attention, elementwise, fused
from .kernels.launching import can_start_early
from .kernels.matmul import Parts, Product, Tiling, product

MOST_WEIGHTS = 1 << 25  # of the gate, as measured on an H200: 1536 × 8960 is faster so, 4608 × 13824 is not
SUMMED_ROWS = 128  # from here on the programs of a product add up its parts, which then fill the card anyway


@dataclass(frozen=True)
class Entering:
    """What a block reads of the stream: its norm in two parts."""

    h: Tensor  # [T, H]: stream * gain; packed in a small pass
    squares: Tensor  # [T, H / 16]: sums of the stream's squares
    scale: Tensor | None  # [T]: 1 / rms; None in a small pass, whose kernels compute it


def prepared(model: Any) -> FusedLayers | None:
    """The fused form of a `Transformer`'s layers; None where it is impossible or slower. Products may start early."""
    for follows_small in (model.head, *(p for layer in model.layers for p in (layer.qkv, layer.out))):
        if isinstance(follows_small, Product):
            follows_small.early = True
    if not (suits(model) and pays(model.config) and can_start_early()):
        return None
    made = FusedLayers(model)
    return made if made.agrees() else None


def suits(model: Any) -> bool:
    """Whether a `Transformer` can run so."""
    c, layers = model.config, model.layers
    plain = c.pre_norm and not (c.post_norm or c.stream_norm or c.layer_norm or c.qk_norm or c.distance_buckets)
    whole = c.encoder is None and c.gated and c.activation in (SILU, GELU) and c.residual_scale == 1.0
    rotates = not c.no_rope_layers and c.rotary_dim == c.head_dim and c.head_dim % 16 == 0
    embeds = not c.positions and not c.embedding_norm
    if not (plain and whole and rotates and embeds and model.compute is fused.DTYPE):
        return False
    return c.hidden_size % 32 == 0 and all(_suits(layer) for layer in layers)


def pays(c: ModelConfig) -> bool:
    """Whether a pass is faster with fused layers: large products are bound by memory, not by latency."""
    return c.hidden_size * c.intermediate_size <= MOST_WEIGHTS


def _suits(layer: Any) -> bool:
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    whole = all(type(p) is Product and p.scale is None and p.in_features % 32 == 0 for p in products)
    return whole and layer.experts is None and layer.gate_up.bias is None


class FusedLayers:
    """The embedding and the layers of one model: a `Transformer`."""

    def __init__(self, model: Any) -> None:
        self.config, self.layers, self.ropes, self.embedding = model.config, model.layers, model.ropes, model.embedding
        self._scale_embedding: float = model.scale_embedding
        self.most_rows = fused.MOST_ROWS  # of a small pass
        self._slices = {
            name: fused.slices(weight.out_features, weight.in_features)
            for name, weight in ((name, getattr(self.layers[0], name)) for name in ("qkv", "out", "down"))
        }
        self._slices["gate_up"] = fused.gate_slices(self.config.intermediate_size, self.config.hidden_size)

    def run(
        self, x: Tensor | None, rows: Rows, plane: Plane, part: Part, after: Callable[[int, Tensor], None]
    ) -> Tensor:
        """The stream after these layers [T, H] float32: from x, which is overwritten, or from the rows' tokens.

        after(i, x) is called after layer i.
        """
        small, eps, dtype = rows.count <= self.most_rows, self.config.norm_eps, self.embedding.dtype
        gains = self._gains(part)
        first = next(gains)
        first = self.layers[0].attention_norm if first is None else first  # without blocks it is not read
        if x is None:
            x, gained = elementwise.embed_gain(rows.tokens, self.embedding, self._scale_embedding, first, eps, small)
        else:
            gained = elementwise.add_gain(x, None, first, eps, dtype, small)
        entering = Entering(*gained)
        blocks = _SmallBlocks(self, x, rows, plane) if small else _WideBlocks(self, x, rows, plane)
        for i in range(part.start, self.config.layers if part.stop is None else part.stop):
            if i not in part.skip_attention:
                entering = blocks.attention(i, entering, next(gains))
            if i not in part.skip_mlp:
                entering = blocks.mlp(i, entering, next(gains))
            after(i, x)
        return x

    def agrees(self) -> bool:
        """Whether small and wide passes have the same bits on this device: on another one a warp's matrix instructions
        may not add as those of a warp group do, or not all of their sixteen inputs at once."""
        gain, eps, dtype = self.layers[0].mlp_norm, self.config.norm_eps, self.embedding.dtype
        x = torch.linspace(-2, 2, fused.MOST_ROWS * self.config.hidden_size, device=gain.device).sin()
        x = x.view(fused.MOST_ROWS, -1)
        results = []
        for kind, small in ((_SmallBlocks, True), (_WideBlocks, False)):
            stream = x.clone()
            entering = Entering(*elementwise.add_gain(stream, None, gain, eps, dtype, small))
            kind(self, stream, None, None).mlp(0, entering, gain)
            results.append(stream)
        return torch.equal(*results)

    def _gains(self, part: Part) -> Iterator[Tensor | None]:
        """The gain of every block's norm, then None."""
        for i in range(part.start, self.config.layers if part.stop is None else part.stop):
            if i not in part.skip_attention:
                yield self.layers[i].attention_norm
            if i not in part.skip_mlp:
                yield self.layers[i].mlp_norm
        yield None


class _SmallBlocks:
    def __init__(self, layers: FusedLayers, x: Tensor, rows: Any, plane: Any) -> None:
        self.of, self.x, self.rows, self.plane = layers, x, rows, plane

    def attention(self, i: int, entering: Entering, gain: Tensor | None) -> Entering:
        c, layer, kv, rows = self.of.config, self.of.layers[i], (self.plane.k[i], self.plane.v[i]), self.rows
        cos, sin = self.of.ropes[layer.local]
        q = fused.rotated(
            entering.h, entering.squares, c.norm_eps, layer.qkv.weight, layer.qkv.bias, self.of._slices["qkv"],
            cos, sin, rows.positions, rows.slots, *kv, c.heads,
        )  # fmt: skip
        mixed = attention.attend(
            q, *kv, rows.blocks, c.attention_scale, layer.window, c.score_cap, layer.sinks, packs=True
        )
        return self._added(mixed, layer.out, self.of._slices["out"], gain)

    def mlp(self, i: int, entering: Entering, gain: Tensor | None) -> Entering:
        c, layer = self.of.config, self.of.layers[i]
        middle = fused.activated(
            entering.h, entering.squares, c.norm_eps, layer.gate_up.weight, self.of._slices["gate_up"], c.activation
        )
        return self._added(middle, layer.down, self.of._slices["down"], gain)

    def _added(self, x: Tensor, by: Product, slices: fused.Slices, gain: Tensor | None) -> Entering:
        return Entering(*fused.added(x, by.weight, by.bias, slices, self.x, gain), None)


class _WideBlocks:
    def __init__(self, layers: FusedLayers, x: Tensor, rows: Any, plane: Any) -> None:
        self.of, self.x, self.rows, self.plane = layers, x, rows, plane

    @cached_property
    def ropes(self) -> list[tuple[Tensor, Tensor]]:
        """cos and sin of the rows [T, d/2] each."""
        return [(cos[self.rows.positions], sin[self.rows.positions]) for cos, sin in self.of.ropes]

    def attention(self, i: int, entering: Entering, gain: Tensor | None) -> Entering:
        c, layer, kv, rows = self.of.config, self.of.layers[i], (self.plane.k[i], self.plane.v[i]), self.rows
        qkv = Parts(self._parts(entering.h, layer.qkv, "qkv"), layer.qkv.bias, entering.scale)
        cos, sin = self.ropes[layer.local]
        q = elementwise.rope_store(qkv, cos, sin, *kv, rows.slots, c.heads, c.kv_heads)
        mixed = attention.attend(q, *kv, rows.blocks, c.attention_scale, layer.window, c.score_cap, layer.sinks)
        return self._added(mixed, layer.out, "out", gain)

    def mlp(self, i: int, entering: Entering, gain: Tensor | None) -> Entering:
        c, layer = self.of.config, self.of.layers[i]
        tiling = self._tiling(layer.gate_up, "gate_up")
        middle = product(entering.h, layer.gate_up.weight, tiling, None, True, c.activation, entering.scale, early=True)
        return self._added(middle, layer.down, "down", gain)

    def _parts(self, x: Tensor, by: Product, name: str) -> Tensor:
        return product(x, by.weight, self._tiling(by, name), summed=x.shape[0] > SUMMED_ROWS, early=name != "down")

    def _tiling(self, by: Product, name: str) -> Tiling:
        return Tiling(by.tiling.outputs, self.of._slices[name].parts, by.tiling.stages, by.tiling.warps)

    def _added(self, x: Tensor, by: Product, name: str, gain: Tensor | None) -> Entering:
        delta = Parts(self._parts(x, by, name), by.bias)
        if gain is None:  # the last block: nothing reads what is prepared
            gain = self.of.layers[0].attention_norm
        return Entering(*elementwise.add_gain(self.x, delta, gain, self.of.config.norm_eps, x.dtype))
