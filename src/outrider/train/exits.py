"""An early exit's adapter as a trainable module, and what it learns from.

Promise: `state_dict` has exactly the names of the adapter's file, and logits equal those of `models.exit` up to
rounding. The target's first layers stay as they are: from the stream they leave at a position, the adapter says which
token comes next. Layers run on true tokens are what a chain that goes on has run, so every hit of a chain is a hit of
one position. It knows batches and nets; steps and files are the loop's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..models.speculators import HeadConfig
from .batches import Batch
from .blocks import Block, Mlp, Norm, product
from .features import TargetNet
from .net import fit, sizes_of
from .objectives import HeadStudent, diagonal
from .teacher import divergence


class Bump(nn.Module):
    """A block without attention."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(sizes_of(config))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> [..., H]"""
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


class ExitNet(nn.Module):
    """Blocks, then a head of its own over a reduced vocabulary, or the target's."""

    d2t: Tensor  # [draft_vocab] target id - draft id; only where the vocabulary is reduced
    t2d: Tensor  # [vocab] whether a target id is in the draft vocabulary

    def __init__(self, config: HeadConfig, ids: Tensor, target: TargetNet) -> None:
        """ids [draft_vocab]: the draft vocabulary's target ids, ascending."""
        super().__init__()
        self.config, self._target = config, (target,)  # in a tuple: its weights are not this module's
        self.blocks = nn.ModuleList(Bump(config) for _ in range(config.layers))
        self.reduced = config.draft_vocab_size < config.vocab_size
        if self.reduced:
            self.norm = Norm(config.hidden_size, config.norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.register_buffer("d2t", ids - torch.arange(len(ids)))
            self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True))
        self.begin(ids)

    @torch.no_grad()
    def begin(self, ids: Tensor) -> None:
        """From what the target knows: blocks that do nothing yet, in the shape of its last layers, and its head."""
        target = self._target[0]
        layers = [layer for layer in target.layers if isinstance(layer, Block)][-len(self.blocks) :]
        for mine, its in zip(self.blocks, layers, strict=False):
            assert isinstance(mine, Bump)
            mine.norm.weight.copy_(its.post_attention_layernorm.weight)
            for name in ("gate_proj", "up_proj"):
                weight = getattr(mine.mlp, name).weight
                weight.copy_(fit(getattr(its.mlp, name).weight, weight))
        for block in self.blocks:
            assert isinstance(block, Bump)
            block.mlp.down_proj.weight.zero_()
        if self.reduced:
            self.norm.weight.copy_(target.norm.weight)
            table = target.embed_tokens.weight if target.lm_head is None else target.lm_head.weight  # [V, H]
            self.lm_head.weight.copy_(table[ids.to(table.device)])

    @property
    def ids(self) -> Tensor:
        """[draft_vocab] the target id of each draft id"""
        device = next(self.blocks.parameters()).device
        here = torch.arange(self.config.draft_vocab_size, device=device)
        return here + self.d2t if self.reduced else here

    def logits(self, x: Tensor) -> Tensor:
        """The stream after the first layers [..., H] -> [..., draft_vocab]"""
        for block in self.blocks:
            x = block(x)
        if self.reduced:
            return product(self.lm_head, self.norm(x))
        target = self._target[0]
        return target.logits(target.norm(x))


class Exits(HeadStudent):
    """One position at a time: what the stream after the first layers says is next."""

    net: ExitNet  # type: ignore[assignment]

    def importance(self, position: int) -> float:
        return 1.0

    @torch.no_grad()
    def _exits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The stream after the first layers and the last one, of position p + 1 in row p: [B, n-1, H] both."""
        exits, last = self.target(batch.tokens, self.net.config.taps)
        return exits[:, 1:], last[:, 1:]

    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        exits, last = self._exits(batch)
        logits = self.net.logits(exits.flatten(0, 1)[batch.rows])  # [M, D]
        return [(divergence(self._teacher(batch, last), logits), torch.ones_like(batch.depth, dtype=torch.float))]

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        exits, _ = self._exits(batch)
        return diagonal([self._right(batch, exits)] * self.k, batch)
