"""An encoder–decoder as a plain torch module, and a smaller decoder that learns from it.

Logits equal those of the serving decoder up to rounding. Nothing here is row-invariant or cached. The smaller model has
the target's encoder and some of its decoder's layers; it learns from the target's own answers to sources. Its encoder,
embeddings and output matrix stay as they are, so that an epoch trains a few layers only.
B texts of L rows, sources of S tokens, H hidden size, h heads of d dimensions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..backends.encoder import distance_bias
from ..backends.machine import multiplies_bfloat16
from ..backends.ops import gated
from ..backends.transformer import WeightSource
from ..models.config import ModelConfig
from ..models.weights import LayerSubset, cut_config, expected
from .batches import Batch
from .decoder import attend, chosen_layers, widened
from .objectives import ModelObjective, at_rows, by_root, divergence, hard_labels, soft_labels

_TABLES = ("embed_tokens.weight", "embed_positions.weight", "lm_head.weight", "lm_head.bias")


class EncoderDecoderNet(nn.Module):
    """An encoder–decoder by its configuration; tensors have Outrider's names, as `expected` lists them."""

    def __init__(
        self, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Frozen."""
        super().__init__()
        self.config = config
        self.ids: Tensor | None = None  # [D] what it can draft; None: every token
        tensors = {name: weights.get(name, dtype).to(device) for name in expected(config)}
        self.tensors = nn.ParameterDict({_key(name): nn.Parameter(t) for name, t in tensors.items()})
        self.requires_grad_(False)

    def get(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor by its name, as a source of weights gives it."""
        tensor: Tensor = self.tensors[_key(name)]
        return tensor if dtype is None else tensor.detach().to("cpu", dtype)

    def has(self, name: str) -> bool:
        return _key(name) in self.tensors

    def trainable(self, embedding: bool) -> EncoderDecoderNet:
        """Make its decoder's layers trainable, and with `embedding` its embedding and output matrix."""
        for key, tensor in self.tensors.items():
            name = key.replace("/", ".")
            tensor.requires_grad_(not name.startswith("encoder.") and (embedding or name not in _TABLES))
        return self

    def states(self, sources: Tensor, lengths: Tensor) -> Tensor:
        """What the decoder reads of sources [B, S] of so many tokens [B]: [B, S, H]."""
        c = self.config.encoder
        assert c is not None
        mask = _seen(lengths, sources.shape[1]) + self._bias("encoder.", c, sources.shape[1], both_ways=True)
        x = self._embed("encoder.", c, sources)
        for i in range(c.layers):
            x = self._layer(f"encoder.layers.{i}.", c, x, mask)
        return x if c.stream_norm else self._norm("encoder.norm", c, x)

    def forward(self, tokens: Tensor, states: Tensor, lengths: Tensor) -> Tensor:
        """tokens [B, L] with the states [B, S, H] of their sources -> the last hidden states [B, L, H]."""
        c, length = self.config, tokens.shape[1]
        later = torch.full((length, length), -torch.inf, device=tokens.device).triu(1)  # [L, L]
        mask, sources = later + self._bias("", c, length, both_ways=False), _seen(lengths, states.shape[1])
        x = self._embed("", c, tokens)
        for i in range(c.layers):
            x = self._layer(f"layers.{i}.", c, x, mask, (states, sources))
        return x if c.stream_norm else self._norm("norm", c, x)

    def logits(self, last: Tensor, ids: Tensor | None = None) -> Tensor:
        """[..., H] -> [..., V], or of these ids [..., D]. A token that the model never emits has the least finite
        value."""
        c, weight, banned = self.config, self.get("lm_head.weight"), self._banned(ids)
        bias = self.get("lm_head.bias") if c.head_bias else None
        if ids is not None:
            weight, bias = weight[ids], None if bias is None else bias[ids]
        logits = F.linear(last.to(weight.dtype), weight, bias) * c.logit_scale
        return logits.index_fill(-1, banned, torch.finfo(logits.dtype).min)

    def _banned(self, ids: Tensor | None) -> Tensor:
        """The columns of logits whose tokens the model never emits."""
        banned = torch.tensor(self.config.banned, dtype=torch.long, device=self.get("lm_head.weight").device)
        return banned if ids is None else torch.isin(ids, banned).nonzero().flatten()

    # ------------------------------------------------------------ parts

    def _layer(
        self, at: str, c: ModelConfig, x: Tensor, mask: Tensor, source: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """source: states [B, S, H] and their mask."""
        x = self._block(f"{at}input_layernorm", c, x, lambda h: self._attention(f"{at}self_attn.", c, h, h, mask))
        if source is not None:
            across = (f"{at}cross_attn.", c)
            x = self._block(f"{at}cross_attention_layernorm", c, x, lambda h: self._attention(*across, h, *source))
        return self._block(f"{at}post_attention_layernorm", c, x, lambda h: self._mlp(f"{at}mlp.", c, h))

    def _block(self, norm: str, c: ModelConfig, x: Tensor, added: Callable[[Tensor], Tensor]) -> Tensor:
        if c.stream_norm:
            return self._norm(norm, c, x + added(x))
        return x + added(self._norm(norm, c, x))

    def _attention(self, at: str, c: ModelConfig, x: Tensor, read: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            self._linear(f"{at}{name}_proj", h).unflatten(-1, (c.heads, -1)).transpose(1, 2)  # [B, h, L or S, d]
            for name, h in (("q", x), ("k", read), ("v", read))
        )
        scale = c.attention_scale * c.head_dim**0.5  # `attend` divides by the root of d
        mixed = attend(q * scale, k, v, mask.to(q.dtype))
        return self._linear(f"{at}o_proj", mixed.transpose(1, 2).flatten(2))

    def _mlp(self, at: str, c: ModelConfig, x: Tensor) -> Tensor:
        up = self._linear(f"{at}up_proj", x)
        inner = gated(self._linear(f"{at}gate_proj", x), up, c.activation) if c.gated else gated(up, 1.0, c.activation)
        return self._linear(f"{at}down_proj", inner)

    def _linear(self, at: str, x: Tensor) -> Tensor:
        weight = self.get(f"{at}.weight")
        return F.linear(x.to(weight.dtype), weight, self.get(f"{at}.bias") if self.has(f"{at}.bias") else None)

    def _norm(self, name: str, c: ModelConfig, x: Tensor) -> Tensor:
        gain, wide = self.get(f"{name}.weight"), widened(x)
        if c.layer_norm:
            bias = self.get(f"{name}.bias")
            return F.layer_norm(wide, wide.shape[-1:], gain.to(wide.dtype), bias.to(wide.dtype), c.norm_eps)
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + c.norm_eps) * gain.to(wide.dtype)

    def _embed(self, at: str, c: ModelConfig, tokens: Tensor) -> Tensor:
        """[B, L] -> [B, L, H] in at least float32"""
        x = widened(self.get(f"{at}embed_tokens.weight")[tokens]) * c.embedding_scale
        if c.positions:
            x = x + self.get(f"{at}embed_positions.weight")[: tokens.shape[1]]
        return self._norm(f"{at}embed_norm", c, x) if c.embedding_norm else x

    def _bias(self, at: str, c: ModelConfig, length: int, both_ways: bool) -> Tensor:
        """What the distance adds to scores [h, L, L] (query, key); 0 where it adds nothing."""
        if not c.distance_buckets:
            return torch.zeros((), device=self.get("embed_tokens.weight").device)
        table = distance_bias(self.get(f"{at}distance_bias.weight"), c, length, both_ways)  # [h, distances]
        rows = torch.arange(length, device=table.device)
        distance = rows[:, None] - rows[None] + (length - 1 if both_ways else 0)  # [L, L]
        return table[:, distance.clamp(min=0)]


class EncoderDecoderObjective(ModelObjective):
    """As for a small model; both decoders read the output of the target's encoder.

    Labels are the target's distribution over the draft vocabulary alone: its other output rows, which are most of a
    pass, are not computed.
    """

    _read: tuple[Batch, Tensor] | None = None  # the last batch, and its sources' states

    @property
    def precision(self) -> torch.dtype | None:
        return torch.bfloat16 if multiplies_bfloat16() else None

    @property
    def _nets(self) -> tuple[EncoderDecoderNet, EncoderDecoderNet]:
        """The smaller model and the target."""
        nets: Any = (self.net, self.target)
        return nets  # type: ignore[no-any-return]

    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        net, target = self._nets
        with torch.no_grad():
            labels = soft_labels(self._scores(target, batch)) if self.soft else hard_labels(batch.next_tokens, net.ids)
        divergences = divergence(labels, self._scores(net, batch))
        return [(divergences, torch.ones_like(divergences))]

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        net, _ = self._nets
        best = self._scores(net, batch).argmax(-1)  # [M]
        guesses = best if net.ids is None else net.ids[best]
        return by_root([at_rows(guesses == batch.next_tokens, batch)] * self.k, batch)

    def _scores(self, net: EncoderDecoderNet, batch: Batch) -> Tensor:
        """Of the draft vocabulary: [M, D]"""
        last = net(batch.tokens[:, 1:], self._states(batch), batch.source_lengths)  # [B, n-1, H]
        return net.logits(last.flatten(0, 1)[batch.rows], self._nets[0].ids)

    @torch.no_grad()
    def _states(self, batch: Batch) -> Tensor:
        _, target = self._nets
        if self._read is None or self._read[0] is not batch:
            self._read = batch, target.states(batch.sources, batch.source_lengths)
        return self._read[1]


def cut_encoder_decoder(
    config: ModelConfig, weights: WeightSource, layers: int, train_embedding: bool, device: torch.device | str
) -> EncoderDecoderNet:
    """A trainable float32 model with so many of the decoder's layers, chosen as `cut_target` does; it drafts every
    token until its `ids` are set."""
    chosen = chosen_layers(config, layers)
    net = EncoderDecoderNet(cut_config(config, chosen), LayerSubset(weights, chosen), torch.float32, device)
    return net.trainable(train_embedding)


def _key(name: str) -> str:
    """A parameter's name must not have dots."""
    return name.replace(".", "/")


def _seen(lengths: Tensor, width: int) -> Tensor:
    """A mask [B, 1, 1, S] that adds minus infinity to padding."""
    padding = torch.arange(width, device=lengths.device) >= lengths[:, None]  # [B, S]
    return torch.zeros(padding.shape, device=lengths.device).masked_fill(padding, -torch.inf)[:, None, None]
