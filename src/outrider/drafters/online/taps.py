"""Drafting from the target's last hidden state (a bare tap), and remembering the state behind each drafted token.

A bare tap's row has the last layer's hidden state of position p and the token at p + 1, as a head's row has. Its output
stands for the hidden state of p + 1, which the target's own output turns into scores. No K/V, no pass.

It knows how to draft; when and how to learn is `learner`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...backends.cpu.int8 import Int8Linear
from ...backends.linear import linear, summed
from ...backends.loaded_weights import embedding_of, output_norm, output_rows
from ...engine.cache import Cache
from ...types import Sequence, Step
from .._rollout import DraftVocabularyRollout, Growth, Rollout
from .adapter import Frozen, Weights

Live = Callable[[], Weights]  # the weights that draft now


@dataclass(frozen=True)
class TapConfig:
    """What a rollout asks of a head's configuration."""

    hidden_size: int
    vocab_size: int
    taps: tuple[int, ...]
    kind: str = "eagle3"  # token after token
    block: int = 6


class Tap:
    """The target's last hidden state, its own output over a draft vocabulary, and an adapter between them."""

    def __init__(self, target: Any, ids: Tensor, dtype: torch.dtype) -> None:
        """ids [D]: the draft vocabulary, ascending; dtype of the table's product."""
        c = target.config
        self.config = TapConfig(c.hidden_size, c.vocab_size, (c.layers - 1,))
        self.device = output_norm(target).device
        whole = torch.float32 if dtype is torch.int8 else dtype
        table, eight_bits = output_rows(target, ids).to(whole), dtype is torch.int8
        self.product, self.ids = Int8Linear(table) if eight_bits else linear(table), ids
        self.compute, self.stream = whole, torch.promote_types(whole, torch.float32)
        kept = table if self.device.type == "cuda" else table.to(self.stream)
        norm = output_norm(target).to(self.stream)
        self.frozen = Frozen.of(kept, ids.to(self.device), c.vocab_size, norm, c.norm_eps, embedding_of(target))
        self.live: Live = dict
        self.seen: deque[tuple[Tensor, int]] = deque()

    @torch.inference_mode()
    def guess(self, state: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Scores [n, D] of what follows the tokens [n] after these states [n, H], and the states to go on from."""
        self.seen.extend(zip(state, tokens, strict=True))
        adapted = self.frozen.adapted(self.live(), state, torch.tensor(tokens, device=self.device))
        return summed(self.product(adapted.normed.to(self.compute))).to(self.stream), adapted.stream

    def spread(self, scores: Tensor) -> Tensor:
        """Scores over the draft vocabulary [..., D] as logits over the target's [..., V]."""
        logits = scores.new_full((*scores.shape[:-1], self.config.vocab_size), -torch.inf)
        logits[..., self.ids.to(scores.device)] = scores
        return logits


class Remembering(Rollout):
    """A rollout that remembers the state behind each drafted token. Its network fills `seen`."""

    seen: deque[tuple[Tensor, int]]  # state [H] of each scored row, and the token beside it
    states: dict[int, list[tuple[Tensor, int]]]  # sequence -> for each node, its state [H] and the token beside it

    def _extend(self, growth: Growth, logits: Tensor) -> None:
        super()._extend(growth, logits)
        if self.seen:
            self.states.setdefault(growth.seq.id, []).append(self.seen.popleft())


class TapRollout(Remembering, DraftVocabularyRollout):
    """Drafting from a bare tap: no plane, nothing to catch up with."""

    def __init__(self, tap: Tap, cache: Cache, last: Last) -> None:
        super().__init__(tap, None, cache, None, source="online")
        self.tap, self.last, self.seen = tap, last, tap.seen
        self.outputs: dict[int, dict[int, Tensor]] = {}  # sequence -> node -> [H] what its children go on from
        self.states = {}

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

    def _keep(self, seq: Sequence, nodes: Any) -> None:
        """Nothing: there is no plane."""


class Last:
    """The target's hidden state at each sequence's last position but one."""

    def __init__(self, tap: int) -> None:
        self.tap = tap
        self.states: dict[int, tuple[int, Tensor]] = {}  # sequence -> position, [H]

    def observe(self, step: Step) -> None:
        row = 0
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None and turn.seq.speculate and not turn.seq.done:
                at = row + turn.feed + (verdict.path[-1] if verdict.path else -1)
                # After a prompt the whole pass's states hang on this one: a copy lets them go.
                self.states[turn.seq.id] = (len(turn.seq.tokens) - 2, step.output.hidden[self.tap][at].clone())
            row += turn.feed + len(tree.tokens)

    def knows(self, seq: Sequence, position: int) -> bool:
        return self.states.get(seq.id, (-1, None))[0] == position

    def at(self, seq: Sequence, position: int) -> Tensor:
        assert self.knows(seq, position)
        return self.states[seq.id][1]
