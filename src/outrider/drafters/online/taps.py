"""The drafters that can learn: a trained head with an adapter behind it, and a bare tap with one.

Both draft chains as `_head` does and remember, for every token they draft, the state it was chosen from: that is what
learning needs when the target has spoken. They know how to draft; when and how to learn is `learn.learner`'s.

A bare tap's row has the last layer's hidden state of position p and the token at p + 1, as a head's row; what it makes
of them stands for the hidden state of p + 1, which the target's own output turns into words. No K/V, no pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends.linear import linear
from ...backends.output import embedding_of, output_norm, output_rows, product_rows
from ...engine.cache import Cache
from ...types import Rows, Sequence, Step
from .._rollout import Growth, Rollout
from ..head.features import Features, Kept
from ..head.int8 import EightBits
from ..head.rollout import HeadRollout
from .adapter import Frozen, Weights

if TYPE_CHECKING:
    from ..head.network import Head

Live = Callable[[], Weights]  # the weights that draft now


class AdaptedHead:
    """A trained head whose last output is corrected before its words are scored. All else is the head's own."""

    def __init__(self, head: Head) -> None:
        self.bare = head
        c, ids = head.config, head.ids.to(head.device)
        table = product_rows(head.head, c.hidden_size, head.compute, head.device, None)
        kept = table if head.device.type == "cuda" else table.to(head.stream)
        self.frozen = Frozen.of(kept, ids, c.vocab_size, head.norm, c.norm_eps, None)
        self.live: Live = dict
        self.seen: deque[tuple[Tensor, int]] = deque()  # state [H] of each wanted row, and the token beside it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)

    def read(self, rows: Rows, plane: Any, shown: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Head.read`."""
        return self.scores(rows, plane, self.bare.fuse([shown]), masked)

    @torch.inference_mode()
    def scores(self, rows: Rows, plane: Any, features: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Head.scores`: [R, D] and [T, H]."""
        _, x = self.bare.scores(_unwanted(rows), plane, features, masked)
        if not rows.want.shape[0]:
            return x.new_zeros(0, self.config.draft_vocab_size), x
        state = x[rows.want.to(x.device)]  # [R, H]
        self.seen.extend((each, 0) for each in state)
        normed = self.frozen.adapted(self.live(), state, state.new_zeros(0, dtype=torch.long)).normed
        return _summed(self.bare.head(normed.to(self.compute))).to(self.stream), x


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
        self.product, self.ids = EightBits(table) if eight_bits else linear(table), ids
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
        return _summed(self.product(adapted.normed.to(self.compute))).to(self.stream), adapted.stream

    def spread(self, scores: Tensor) -> Tensor:
        """Scores over the draft vocabulary [..., D] as logits over the target's [..., V]."""
        logits = scores.new_full((*scores.shape[:-1], self.config.vocab_size), -torch.inf)
        logits[..., self.ids.to(scores.device)] = scores
        return logits


class Remembering(HeadRollout):
    """A head's rollout that remembers the state behind each drafted token."""

    states: dict[int, list[tuple[Tensor, int]]]  # sequence -> for each node, its state [H] and the token beside it

    def _extend(self, growth: Growth, logits: Tensor) -> None:
        super()._extend(growth, logits)
        if self.head.seen:  # type: ignore[attr-defined]
            seen = self.head.seen.popleft()  # type: ignore[attr-defined]
            self.states.setdefault(growth.seq.id, []).append(seen)


class TapRollout(Remembering):
    """Drafting from a bare tap: no plane, nothing to catch up with."""

    def __init__(self, tap: Tap, cache: Cache, last: Last) -> None:
        nothing: Any = None
        Rollout.__init__(self, nothing, cache, nothing, source="online")
        self.head: Any = tap
        self.last = last
        self.outputs, self.states, self.drafts = {}, {}, None
        self.floor, self.runs, self.words = 0.0, 0, tap.ids.tolist()

    def _feed(self, seqs: list[Sequence]) -> Tensor:
        state = torch.stack([self.last.at(seq, len(seq.tokens) - 2) for seq in seqs])  # [B, H]
        scores, outputs = self.head.guess(state, [seq.tokens[-1] for seq in seqs])
        self.outputs = {seq.id: {-1: output} for seq, output in zip(seqs, outputs, strict=True)}
        return _home(scores)

    def _run(self, batch: list[tuple[Growth, list[int]]]) -> Tensor:
        rows = [(growth, node) for growth, nodes in batch for node in nodes]
        state = torch.stack([self.outputs[growth.seq.id][growth.parents[node]] for growth, node in rows])
        scores, outputs = self.head.guess(state, [growth.tokens[node] for growth, node in rows])
        for (growth, node), output in zip(rows, outputs, strict=True):
            self.outputs[growth.seq.id][node] = output
        return _home(scores)


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


def head_rollout(head: AdaptedHead, cache: Cache, plane: Any, features: Features | Kept) -> Remembering:
    bare: Any = head
    rollout = Remembering(bare, cache, plane, features)
    rollout.source, rollout.states = "online", {}
    return rollout


def _unwanted(r: Rows) -> Rows:
    """The same rows, with nobody asking for scores."""
    return Rows(
        r.tokens, r.positions, r.slots, r.lines, r.context, r.table, r.ancestors, r.want[:0], blocks=r.blocks
    )  # fmt: skip


def _home(scores: Tensor) -> Tensor:
    """Where choices are made."""
    return scores.cpu()


def _summed(parts: Any) -> Tensor:
    total: Tensor = parts if isinstance(parts, Tensor) else parts.total()
    return total
