"""Medusa heads and MLP speculators: one small network for each position of a draft, without attention and K/V.

Both begin with the target's last state, after its norm, at the last position that the target has read. Medusa's
networks all read that state; an MLP speculator's hand a state on and read the token that was drafted before.
It knows states and tokens, not rows or sequences; `PerPositionRollout` drafts chains and trees with it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backends import PlaneShape, ops, with_index
from ...backends.linear import linear, summed
from ...engine.cache import Cache, Plane
from ...models.published import MEDUSA, PerPositionConfig
from ...types import Draft, Sequence
from .._rollout import DraftVocabularyRollout, Growth
from .._trained import DraftVocabulary
from .features import FeatureCache

_EPS = 1e-6  # of an MLP speculator's norms


class PerPositionHead(DraftVocabulary):
    """Scores of position after position from a state; its weights are floats."""

    plane_shape = PlaneShape(1, 1, 2, torch.float32)  # nothing is kept between passes

    def __init__(
        self,
        config: PerPositionConfig,
        tensors: dict[str, Tensor],
        norm: Tensor,  # [H] the target's last
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.device = config, with_index(device)
        self.compute = torch.float32 if dtype is torch.int8 else dtype
        self.stream = torch.promote_types(self.compute, torch.float32)
        self.ids, self.vocab_size = tensors["ids"].cpu(), config.vocab_size
        self.norm = norm.to(self.device, self.stream)
        shared: dict[int, Any] = {}  # tied weights are one tensor, and become one product

        def product(name: str) -> Any:
            bias = tensors.get(name.removesuffix("weight") + "bias")
            key = id(tensors[name])
            if key not in shared:
                bias = None if bias is None else bias.to(self.device, self.compute)
                shared[key] = linear(tensors[name].to(self.device, self.compute), bias)
            return shared[key]

        positions = range(config.block)
        if config.kind == MEDUSA:
            self.blocks = [[product(f"blocks.{i}.{j}.weight") for j in range(config.layers)] for i in positions]
            self.outputs = [product(f"lm_heads.{i}.weight") for i in positions]
            return
        self.outputs = [product(f"head.{i}.weight") for i in positions]
        self.projections = [product(f"proj.{i}.weight") for i in positions]
        tables = {id(tensors[f"emb.{i}.weight"]): tensors[f"emb.{i}.weight"] for i in positions}
        tables = {key: table.to(self.device, self.compute) for key, table in tables.items()}
        self.tables = [tables[id(tensors[f"emb.{i}.weight"])] for i in positions]  # [V, inner] each
        self.norms = [
            [tensors[f"ln.{i}.{part}"].to(self.device, self.stream) for part in ("weight", "bias")] for i in positions
        ]

    @torch.inference_mode()
    def begin(self, hidden: Tensor) -> Tensor:
        """States [B, H] from the target's residual stream after its last layer [B, H]."""
        c = self.config
        state = ops.add_norm(hidden.to(self.stream), None, self.norm, c.target_norm_eps, self.stream)
        return _rms(state) / math.sqrt(2) if c.scale_input else state

    @torch.inference_mode()
    def step(self, position: int, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, D] at this position of a draft, and the states [B, h] of the next; tokens [B] are those before."""
        if self.config.kind == MEDUSA:
            x = states
            for block in self.blocks[position]:
                x = x + F.silu(summed(block(x.to(self.compute))).to(self.stream))
        else:
            states = x = self._advance(position, states, tokens.to(self.device))
        return summed(self.outputs[position](x.to(self.compute))).to(self.stream), states

    def _advance(self, i: int, states: Tensor, tokens: Tensor) -> Tensor:
        """The old state and the new token, weighted so that their variances stay balanced over the positions."""
        kept = 0.5 ** (0.5 / self.config.block)
        table = self.tables[i]
        new = math.sqrt((1 - kept**2) * table.shape[1] / 2) / kept
        mixed = summed(self.projections[i](states.to(self.compute))).to(self.stream) + new * table[tokens].to(
            self.stream
        )
        return F.gelu(_rms(mixed) * self.norms[i][0] + self.norms[i][1])


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS)


class PerPositionRollout(DraftVocabularyRollout):
    """Chains and trees of such a head, from the target's state at the last position that it has read."""

    graphs: Any = None  # its passes are not captured
    keeps_kv = False  # there is none

    def __init__(self, head: PerPositionHead, cache: Cache, plane: Plane, features: FeatureCache) -> None:
        super().__init__(head, head, cache, plane, source="head")
        self.head, self.features = head, features
        self.blank = torch.empty(0, head.config.target_hidden_size, dtype=head.stream, device=head.device)  # [0, H]
        self.states: dict[int, dict[int, Tensor]] = {}  # sequence -> node -> [h] what its children continue from
        self.passes_run = 0  # of the current draft

    def chains(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        return super().chains(seqs, [min(k, self.head.config.block) for k in budget])

    def trees(self, seqs: list[Sequence], budget: list[int], width: int, depth: int) -> Draft:
        return super().trees(seqs, budget, width, min(depth, self.head.config.block))

    def _feed(self, seqs: list[Sequence]) -> Tensor:
        hidden = []
        for seq in seqs:
            last = len(seq.tokens) - 2
            hidden.append(self.features.between(seq.id, last, last + 1, self.blank))
            self.plane.advance(seq.id, len(seq.tokens) - 1)
            self.features.forget(seq.id, last)
        states = self.head.begin(torch.cat(hidden))  # [B, H]
        scores, states = self._step(0, states, [seq.tokens[-1] for seq in seqs])
        self.states = {seq.id: {-1: state} for seq, state in zip(seqs, states, strict=True)}
        return scores

    def _run(self, batch: list[tuple[Growth, list[int]]]) -> Tensor:
        growth, nodes = batch[0]
        position = len(growth.path(nodes[0]))  # all nodes of a pass are equally deep
        states, tokens = [], []
        for growth, nodes in batch:
            for node in nodes:
                growth.spare[node] = len(growth.spare)
                states.append(self.states[growth.seq.id][growth.parents[node]])
                tokens.append(growth.tokens[node])
        scores, after = self._step(position, torch.stack(states), tokens)
        rows = iter(after)
        for growth, nodes in batch:
            self.states[growth.seq.id] |= {node: next(rows) for node in nodes}
        return scores

    def _step(self, position: int, states: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        self.passes_run += 1
        scores, states = self.head.step(position, states, torch.tensor(tokens))
        return scores.cpu(), states
