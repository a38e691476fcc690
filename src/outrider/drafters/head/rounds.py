"""Chains and trees of a trained head in a device's rounds: recorded passes at the beginning of each round.

The first pass feeds the committed rows that the head lacks, with the features that the target's passes have left in
their slots; each later one feeds the tokens that the pass before it chose. Drafted rows live in scratch slots behind
the cache; the next round replaces them by committed rows. The best nodes of a tree are selected on the device. It knows
a head and lines of device state, not the host's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...backends.cuda.graphs import LENGTHS, SAMPLING
from ...backends.cuda.kernels import rounds as kernels, sampling
from ...backends.cuda.kernels.rounds import DEPTH, DRAFT
from ...backends.cuda.kernels.sampling import Laws
from ...backends.cuda.rounds import Rounds, RoundShape
from ...backends.cuda.state import F64, I32, I64
from ...engine.cache import Row
from ...types import Sequence, Turn
from .captured import FEEDS, LANE, HeadGraphs, HeadShape, TreePass, feed_size


@dataclass(frozen=True)
class DraftShape:
    """Everything that a recorded draft depends on."""

    batch: int
    rows: int  # of the first pass
    length: int  # tokens of each chain, levels of each tree
    drawn: bool  # some row has filters (chains) or noise (trees), which the passes otherwise leave out


def fits(width: int, depth: int) -> bool:
    """Whether a tree of this shape fits into a sequence's lane of scratch slots and into a draft."""
    return (depth - 1) * width <= LANE and depth <= DEPTH


class HeadRounds:
    """Recorded drafts of one head (`backends.cuda.rounds.RecordedDrafts`): trees of this width and depth, or chains."""

    source = "head"

    def __init__(self, rounds: Rounds, heads: HeadGraphs, width: int = 0, depth: int = 0) -> None:
        self.rounds, self.heads, self.plane = rounds, heads, heads.graphs.plane
        self.width, self.depth = min(width, heads.ids.shape[0]), depth
        rounds.trees = rounds.trees or width > 0
        self._drafts: dict[DraftShape, Any] = {}
        self._readings: dict[int, Any] = {}  # by batch
        self._backlog: dict[int, int] = {}  # line -> at most so many committed rows that the head lacks

    def join(self, seq: Sequence, row: Row) -> int:
        read = min(self.plane.holds(seq.id), max(len(seq.tokens) - 2, 0))
        self._backlog[row.line] = len(seq.tokens) - 1 - read
        return read

    def has_read(self, seq: Sequence, tokens: int) -> None:
        self.plane.advance(seq.id, tokens)

    def passes(
        self, turns: Listing[Turn], rows: list[Row], asks: list[int], shape: RoundShape
    ) -> list[tuple[str, Any, int]]:
        """A sequence whose prompt ends with this round has no features yet: it is drafted for in the next one."""
        ready = [asked if turn.feed == 1 else 0 for turn, asked in zip(turns, asks, strict=True)]
        passes: list[tuple[str, Any, int]] = []
        backlog = sum(self._backlog[row.line] for row, asked in zip(rows, ready, strict=True) if asked)
        if backlog > FEEDS[-1]:
            passes.append(("read", self._reading(shape.batch), -(-backlog // FEEDS[-1])))
            backlog = sum(asked > 0 for asked in ready)
        if any(ready):
            greedy = all(turn.seq.params.greedy for turn in turns)
            length = self.depth if self.width else next(n for n in LENGTHS if n >= max(ready))
            drawn = not greedy if self.width else shape.filtered
            draft = DraftShape(shape.batch, feed_size(backlog), length, drawn)
            passes.append(("draft", self._recorded(draft), 1))
        for turn, row, asked in zip(turns, rows, ready, strict=True):
            if turn.whole:
                self._backlog[row.line] = (0 if asked else self._backlog[row.line]) + turn.budget + 1
        return passes

    def _recorded(self, shape: DraftShape) -> Any:
        if shape not in self._drafts:
            inputs, b, k = self.rounds.inputs_for(shape.batch), shape.batch, shape.length
            device, out = self.rounds.state.device, self._rows(shape.rows, b)
            each = b * max(self.width, 1)  # rows of a later pass
            out |= {
                "want": torch.zeros(b, dtype=I64, device=device),
                "drafts": torch.zeros(b, dtype=I32, device=device),
            }
            out |= {"later_positions": torch.zeros(k, each, dtype=I64, device=device)}
            out |= {"later_info": torch.zeros(k, each, 8, dtype=I32, device=device)}
            out |= {name: torch.zeros(b, dtype=dtype, device=device) for name, dtype in SAMPLING.items()}
            out |= {name: torch.zeros(k, b, dtype=I64, device=device) for name in ("position", "key", "drafted")}
            tree = RoundTree(self, shape, inputs.device, out) if self.width else None

            def work() -> None:
                self._draft(shape, inputs.device, out) if tree is None else tree.draft()

            self._drafts[shape] = self.rounds.record(b, work)
        return self._drafts[shape]

    def _draft(self, shape: DraftShape, d: dict[str, Tensor], out: dict[str, Tensor]) -> None:
        lines, heads, b = self.rounds.lines, self.heads, shape.batch
        scores, outputs = self.feed(d, out, last=1, most=shape.length)
        kernels.lay_out_behind(lines.numbers, d["lines"], out["drafts"], out)
        outputs, tokens = outputs[out["want"]], self._choose(shape, out, scores, 0)  # [B, H], [B]
        slots, tail, every = heads.columns[:, :b], heads.tails[:b], heads.every[:b]  # [LANE, B], [B, LANE], [B]
        for j in range(1, shape.length):
            where = (out["later_positions"][j], slots[j - 1], every, out["later_info"][j], tail)
            scores, outputs = heads.run(tokens, *where, outputs)
            tokens = self._choose(shape, out, scores, j)
        kernels.keep_chain(lines.numbers, lines.draft, d["lines"], out["drafts"], out["drafted"], kernels.HEAD)

    def feed(self, d: dict[str, Tensor], out: dict[str, Tensor], last: int, most: int = 0) -> tuple[Tensor, Tensor]:
        """Committed rows, all but the `last` positions: scores of the wanted rows [B, D], every row's output [T, H]."""
        lines, state, heads = self.rounds.lines, self.rounds.state, self.heads
        kernels.patch(d["place"], d["slot"], state.table)
        kernels.lay_out_reading(
            lines.numbers, lines.tokens, state.table, d, out, state.padding, heads.graphs.rows_per_block, last, 1, most
        )
        features = heads.head.fuse([stream[out["slots"]] for stream in heads.streams])  # [T, H]
        want = out["want"] if "want" in out else out["tokens"][:0]
        rows = (out["tokens"], out["positions"], out["slots"], want, out["info"], state.no_tail)
        return heads.run(*rows, features)

    def _choose(self, shape: DraftShape, out: dict[str, Tensor], scores: Tensor, j: int) -> Tensor:
        """Every sequence's token j [B]. scores [B, D]."""
        wide = scores.new_full((scores.shape[0], self.heads.head.config.vocab_size), -torch.inf)
        logits = wide.index_copy_(1, self.heads.ids, scores)  # [B, V]
        laws = Laws(*(out[name][j] if name == "position" else out[name] for name in SAMPLING))
        tokens, _, _ = sampling.choose(logits, laws, shape.drawn)
        out["drafted"][j].copy_(tokens)
        return tokens

    def _reading(self, batch: int) -> Any:
        if batch not in self._readings:
            inputs, out = self.rounds.inputs_for(batch), self._rows(FEEDS[-1], batch)

            def work() -> None:
                self.feed(inputs.device, out, last=2)

            self._readings[batch] = self.rounds.record(batch, work)
        return self._readings[batch]

    def _rows(self, rows: int, batch: int) -> dict[str, Tensor]:
        device, blocks = self.rounds.state.device, min(rows, batch + rows // self.heads.graphs.rows_per_block)
        made = {name: torch.zeros(rows, dtype=I64, device=device) for name in ("tokens", "positions", "slots")}
        return made | {"info": torch.zeros(blocks, 8, dtype=I32, device=device)}


class RoundTree(TreePass):
    """The tree of `TreePass` from lines of device state; its best nodes become the sequences' drafts."""

    def __init__(self, owner: HeadRounds, shape: DraftShape, inputs: dict[str, Tensor], out: dict[str, Tensor]) -> None:
        self.owner, self.heads, self.inputs, self.out = owner, owner.heads, inputs, out
        b, w, depth, device = shape.batch, owner.width, shape.length, owner.rounds.state.device
        self.shape = HeadShape("tree", shape.rows, b, depth, w, shape.drawn)
        nodes = (b, w + (depth - 1) * w**2)
        types = {"tokens": I64, "parents": I64, "survival": F64}
        self.nodes = {name: torch.zeros(nodes, dtype=dtype, device=device) for name, dtype in types.items()}
        self.form, self.reply = SimpleNamespace(device=out), SimpleNamespace(device=self.nodes)  # type: ignore[assignment]

    def _first(self) -> tuple[Tensor, Tensor]:
        return self.owner.feed(self.inputs, self.out, last=1, most=DRAFT)

    def draft(self) -> None:
        rounds, lines = self.owner.rounds, self.inputs["lines"]
        kernels.lay_out_levels(rounds.lines.numbers, lines, self.out, rounds.state.cache.length)
        self._work()
        # A child never survives more often than its parent, and has a higher number: the best nodes are a tree.
        survival, order = torch.sort(self.nodes["survival"], dim=1, descending=True, stable=True)  # [B, M]
        numbers = torch.arange(order.shape[1], device=order.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, numbers)  # [B, M] of each node
        parents = self.nodes["parents"].gather(1, order)
        parents = torch.where(parents < 0, -1, rank.gather(1, parents.clamp(min=0)))
        best = (self.nodes["tokens"].gather(1, order), parents.contiguous(), survival)
        state = rounds.lines
        kernels.keep_tree(state.numbers, state.draft, state.parents, lines, self.out["drafts"], best, kernels.HEAD)
