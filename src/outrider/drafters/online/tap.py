"""Drafting from the target's last hidden state (a bare tap), and keeping the state behind each drafted token.

A tap's row has the last layer's hidden state of position p and the token at p + 1, as a head's row has. Its output
approximates the hidden state of p + 1, which the target's own output turns into scores. No K/V, no pass of layers.
It knows how to draft, not how to learn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...backends.cpu.int8 import Int8Linear
from ...backends.linear import linear, summed
from ...backends.loaded_weights import embedding_of, output_norm, output_rows
from ...engine.cache import Cache
from ...errors import ConfigError
from ...types import Draft, Sequence, Step
from .. import Drafter, DraftRequest, Traits, Workspace
from .._learning.adapter import FrozenOutput, Weights
from .._rollout import DraftVocabularyRollout, Growth
from .._trained import DraftVocabulary

Live = Callable[[], Weights]  # the weights that draft now
_VOCABULARY = {"cpu": 8192, "cuda": 32768}  # ids that a bare tap drafts: the first ones, the most frequent tokens


class Tap(DraftVocabulary):
    """The target's last hidden state, an adapter, and the target's output over a draft vocabulary."""

    def __init__(self, target: Any, ids: Tensor, dtype: torch.dtype) -> None:
        """ids [D]: the draft vocabulary, ascending; dtype of the table's product."""
        c = target.config
        self.ids, self.vocab_size, self.layer = ids, c.vocab_size, c.layers - 1
        self.device = output_norm(target).device
        self.compute = torch.float32 if dtype is torch.int8 else dtype
        self.stream = torch.promote_types(self.compute, torch.float32)
        table = output_rows(target, ids).to(self.compute)
        self.product = Int8Linear.of(table) if dtype is torch.int8 else linear(table)
        frozen = table if self.device.type == "cuda" else table.to(self.stream)
        norm = output_norm(target).to(self.stream)
        self.frozen = FrozenOutput.of(frozen, ids.to(self.device), c.vocab_size, norm, c.norm_eps, embedding_of(target))
        self.live: Live = dict
        self.scored: deque[tuple[Tensor, int]] = deque()

    @torch.inference_mode()
    def guess(self, state: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Scores [n, D] after these states [n, H] and tokens [n], and the states to continue from [n, H]."""
        self.scored.extend(zip(state, tokens, strict=True))
        adapted = self.frozen.adapt(self.live(), state, torch.tensor(tokens, device=self.device))
        return summed(self.product(adapted.normed.to(self.compute))).to(self.stream), adapted.stream


class TapRollout(DraftVocabularyRollout):
    """Drafting from a bare tap, without a plane. It keeps the state behind each drafted token."""

    keeps_kv = False  # there is none

    def __init__(self, tap: Tap, cache: Cache, last: LastStates) -> None:
        super().__init__(tap, None, cache, None, source="online")
        self.tap, self.last = tap, last
        self.scored = tap.scored  # state [H] of each scored row, and the token before it
        self.states: dict[int, list[tuple[Tensor, int]]] = {}  # the same by sequence, for each of its nodes
        self.outputs: dict[int, dict[int, Tensor]] = {}  # sequence -> node -> [H] the state of its children

    def _extend(self, growth: Growth, logits: Tensor) -> None:
        super()._extend(growth, logits)
        if self.scored:
            self.states.setdefault(growth.seq.id, []).append(self.scored.popleft())

    def _feed(self, seqs: list[Sequence]) -> Tensor:
        state = torch.stack([self.last.at(seq, len(seq.tokens) - 2) for seq in seqs])  # [B, H]
        scores, outputs = self.tap.guess(state, [seq.tokens[-1] for seq in seqs])
        self.outputs = {seq.id: {-1: output} for seq, output in zip(seqs, outputs, strict=True)}
        return scores.cpu()

    def _run(self, batch: list[tuple[Growth, list[int]]]) -> Tensor:
        rows = [(growth, node) for growth, nodes in batch for node in nodes]
        state = torch.stack([self.outputs[growth.seq.id][growth.parents[node]] for growth, node in rows])
        scores, outputs = self.tap.guess(state, [growth.tokens[node] for growth, node in rows])
        for (growth, node), output in zip(rows, outputs, strict=True):
            self.outputs[growth.seq.id][node] = output
        return scores.cpu()


class LastStates:
    """The target's hidden state at each sequence's last position but one."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.states: dict[int, tuple[int, Tensor]] = {}  # sequence -> position, [H]

    def observe(self, step: Step) -> None:
        row = 0
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None and turn.seq.speculate and not turn.seq.done:
                at = row + turn.feed + (verdict.path[-1] if verdict.path else -1)
                # A view would keep the states of the whole pass in memory.
                self.states[turn.seq.id] = (len(turn.seq.tokens) - 2, step.output.hidden[self.layer][at].clone())
            row += turn.feed + len(tree.tokens)

    def has(self, seq: Sequence, position: int) -> bool:
        return self.states.get(seq.id, (-1, None))[0] == position

    def at(self, seq: Sequence, position: int) -> Tensor:
        assert self.has(seq, position)
        return self.states[seq.id][1]


class BareTap(Drafter):
    """Drafts from the target's last hidden state."""

    name = "tap"

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        tap = Tap(space.target, _vocabulary(space), space.target.compute)
        self.last = LastStates(tap.layer)
        self.rollout = TapRollout(tap, space.cache, self.last)
        self.traits = Traits(taps=(tap.layer,))

    def draft(self, request: DraftRequest) -> Draft:
        pairs = enumerate(zip(request.seqs, request.budgets, strict=True))
        ready = [i for i, (seq, budget) in pairs if budget > 0 and self.last.has(seq, len(seq.tokens) - 2)]
        return request.answer(ready, lambda part: self.rollout.chains(part.seqs, part.budgets))

    def observe(self, step: Step) -> None:
        self.last.observe(step)
        for seq_id in [seq_id for seq_id in self.last.states if seq_id not in self.space.cache.rows]:
            del self.last.states[seq_id]

    def end(self, seq: Sequence) -> None:
        self.last.states.pop(seq.id, None)


def _vocabulary(space: Workspace) -> Tensor:
    """The draft vocabulary of a bare tap [D]: the first ids, which are the most frequent tokens, and end tokens."""
    c = space.target.config
    size = int(space.option("draft_vocab", default=0)) or _VOCABULARY.get(space.target.device.type, _VOCABULARY["cpu"])
    if not size >= 1:
        raise ConfigError(f"draft_vocab is {size}, but it must be at least 1, or 0 for the default.")
    return torch.tensor(sorted({*range(min(size, c.vocab_size)), *(i for i in c.eos_ids if i < c.vocab_size)}))
