"""The target's own layer for further tokens (MTP) as a head: it continues from its own output, as EAGLE does.

Head row p has the token after position p and the target's state there, after the target's last norm; the block is one
more layer of the target's family, run by whoever runs the target, experts included. Beside the built-in decoder rows
are invariant as the decoder's are; beside transformers they are not, which costs acceptance at most.
It knows rows and planes, not sequences or files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends import Model, Part, PlaneShape, ops, with_index
from ...backends.cpu.int8 import Int8Linear, int8_product
from ...backends.linear import linear, summed
from ...backends.loaded_weights import embedding_of, output_norm, output_product
from ...backends.rows import Rows
from ...backends.transformer import Loader, Transformer
from ...backends.transformers.mtp import ForeignBlock, ForeignMtpLayer
from ...engine.cache import Plane
from ...errors import ConfigError
from ...models.mtp import BuiltInMtpLayer, MtpLayer
from ...models.published import Reading
from ...models.speculators import MTP, HeadConfig
from .network import Head

_BLOCK = Part(stop=1, head=False)


def mtp_readings(layer: MtpLayer, target: Model) -> tuple[Reading, ...]:
    """Engines differ in what a drafted token continues from: the output after the last norm, or before it."""
    c = layer.config
    config = HeadConfig(
        kind=MTP, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, heads=c.heads, kv_heads=c.kv_heads,
        head_dim=c.head_dim, vocab_size=c.vocab_size, draft_vocab_size=c.vocab_size, taps=(target.config.layers - 1,),
        norm_eps=c.norm_eps, rope_theta=c.rope_theta, context_length=c.context_length, own_output=False,
        norm_output=True, normed=True, target_norm_eps=c.norm_eps,
    )  # fmt: skip
    after = Reading(config, "drafts continue from the output after its norm")
    return after, Reading(replace(config, norm_output=False), "drafts continue from the output before its norm")


def mtp_head(layer: MtpLayer, config: HeadConfig, target: Model, dtype: torch.dtype, length: int) -> MtpHead:
    """The head that such a layer is. dtype int8: weights are quantised here; length: number of positions."""
    layer.check()
    if isinstance(layer, ForeignMtpLayer):
        return ForeignMtpHead(layer, config, target, dtype)
    assert isinstance(layer, BuiltInMtpLayer)
    return MtpHead(layer, config, target, dtype, length)


@dataclass(frozen=True)
class _RoundedLoader(Loader):
    """Products in int8, quantised without calibration: errors cost acceptance only."""

    def product(self, name: str, weight: Tensor, bias: Tensor | None) -> Any:
        return int8_product(Int8Linear.of(weight, bias=bias).packed)


class MtpHead(Head):
    """A block of the target's family behind two norms and a product. Its only state between passes is the plane."""

    block: Transformer | ForeignBlock

    def __init__(
        self, layer: BuiltInMtpLayer, config: HeadConfig, target: Model, dtype: torch.dtype, length: int
    ) -> None:
        self._begin(layer, config, target, dtype)
        self.block = Transformer.without_weights(layer.config, length, self.compute, self.device)
        load = _RoundedLoader if self.int8 else Loader
        self.block.layers = [load(layer.config, layer.block, self.compute, self.stream, self.device, False).layer(0)]
        vectors = [layer.own(part, self.stream).to(self.device) for part in (0, 1, 3)]
        self.embedding_norm, self.hidden_norm, self.norm = vectors
        self.feature_norm = output_norm(target).to(self.device, self.stream)
        weight = layer.own(2, self.compute).to(self.device)
        self.fc: Any = Int8Linear.of(weight) if self.int8 else linear(weight)
        self.embedding = embedding_of(target)
        self.head = output_product(target, dtype)
        if isinstance(self.head, Int8Linear):
            self.head = int8_product(self.head.packed)

    def _begin(self, layer: MtpLayer, config: HeadConfig, target: Model, dtype: torch.dtype) -> None:
        """What depends on configurations only, and what a head of this kind has not."""
        self.config, self.device, self.int8 = config, with_index(target.device), dtype is torch.int8
        self.compute = torch.float32 if self.int8 else dtype
        self.stream = torch.promote_types(self.compute, torch.float32)
        self.state_first, self.native, self.masks, self.fc_bias = layer.layout.state_first, None, [], None
        self._other_rows, self.vocabulary, self._scratch = None, None, None
        self.ids, self.vocab_size = torch.arange(config.vocab_size), config.vocab_size
        self.device_ids = self.ids.to(self.device)

    def _prepare(self, length: int) -> None:
        """Nothing depends on the reading."""

    @property
    def cos(self) -> Tensor:  # type: ignore[override]
        return self.block.cos

    @property
    def plane_shape(self) -> PlaneShape:
        return self.block.plane_shape

    def fuse(self, taps: list[Tensor]) -> Tensor:
        """The target's last states after its last norm [T, H]."""
        state = taps[0].to(self.stream)
        return ops.add_norm(state, None, self.feature_norm, self.config.target_norm_eps, self.stream)

    def read(self, rows: Rows, plane: Plane, hidden: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.scores(rows, plane, self.fuse([hidden]))

    @torch.inference_mode()
    def scores(self, rows: Rows, plane: Plane, features: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As in `Head`. features [T, H]: states after the target's last norm, or outputs of rows before."""
        rows, eps = self._on_device(rows), self.config.norm_eps
        token = ops.add_norm(self.embedding[rows.tokens].to(self.stream), None, self.embedding_norm, eps, self.stream)
        state = ops.add_norm(features.to(self.stream, copy=True), None, self.hidden_norm, eps, self.stream)
        x = self._fc(torch.cat([state, token] if self.state_first else [token, state], 1))  # [T, H]
        outputs = self.block.forward(rows, plane, _BLOCK, x, taps=(0,)).hidden[0]
        if not rows.want.shape[0]:
            return self._outcome(rows.want, outputs.new_zeros(0, self.config.vocab_size), outputs)
        normed = ops.add_norm(outputs[rows.want], None, self.norm, eps, self.compute)
        return self._outcome(rows.want, summed(self.head(normed)).to(self.stream), outputs)


class ForeignMtpHead(MtpHead):
    """The same beside a target that transformers runs, with the target's own embedding, last norm and output product.

    Products run where the target's weights are. Rows, K/V and results are on a CPU, as the target's.
    """

    def __init__(self, layer: ForeignMtpLayer, config: HeadConfig, target: Model, dtype: torch.dtype) -> None:
        if dtype is torch.int8:
            raise ConfigError(
                "A layer for further tokens (MTP) runs in floats beside a target that transformers runs: leave "
                "draft_dtype out."
            )
        self._begin(layer, config, target, dtype)
        self.block, module = layer.block(dtype), layer.module
        self.embedding, self.last_norm, self.head = (
            module.get_input_embeddings(), module.get_decoder().norm, module.get_output_embeddings()
        )  # fmt: skip
        self.place = self.embedding.weight.device
        vectors = [layer.own(part, self.stream).to(self.place) for part in (0, 1, 3)]
        self.embedding_norm, self.hidden_norm, self.norm = vectors
        self.fc = layer.own(2, dtype).to(self.place)  # [H, 2 H]

    @torch.inference_mode()
    def fuse(self, taps: list[Tensor]) -> Tensor:
        state = taps[0]
        if self.config.normed:
            state = self.last_norm(state.to(self.place, self.last_norm.weight.dtype))
        return state.to(self.device, self.stream)

    @torch.inference_mode()
    def scores(self, rows: Rows, plane: Plane, features: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        token = self._normed_by(self.embedding_norm, self.embedding(rows.tokens.to(self.place)))
        state = self._normed_by(self.hidden_norm, features.to(self.place))
        joined = torch.cat([state, token] if self.state_first else [token, state], 1)  # [T, 2 H]
        x = F.linear(joined.to(self.compute), self.fc)  # [T, H]
        outputs = self.block.forward(rows, plane, _BLOCK, x, taps=(0,)).hidden[0]
        normed = self._normed_by(self.norm, outputs)  # [T, H]
        scores = self.head(normed[rows.want.to(self.place)].to(self.head.weight.dtype))  # [R, V]
        after = normed if self.config.norm_output else outputs
        return scores.to(self.device, self.stream), after.to(self.device, self.stream)

    def _normed_by(self, gains: Tensor, x: Tensor) -> Tensor:
        x = x.to(self.stream)
        return gains * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.norm_eps)
