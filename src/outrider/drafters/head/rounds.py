"""Chains and trees of a trained head in a device's rounds: recorded passes at the beginning of each round.

The first pass feeds the committed rows that the head lacks, with the features that the target's passes have left in
their slots; each later one feeds the tokens that the pass before it chose. Drafted rows live in scratch slots behind
the cache; the next round replaces them by committed rows. The best nodes of a tree are selected on the device. It knows
a head and lines of device state, not the host's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...backends.cuda.graphs import SAMPLING
from ...backends.cuda.kernels import rounds as kernels, sampling
from ...backends.cuda.kernels.rounds import DEPTH, DRAFT
from ...backends.cuda.kernels.sampling import Laws
from ...backends.cuda.rounds import CHAIN, ReplayAll, Rounds, row_tensors
from ...backends.cuda.state import F64, I32, I64, lanes_for
from ...engine.cache import Row
from ...engine.sampling import filters
from ...types import Sequence, Turn
from .captured import FEEDS, LANE, HeadGraphs, HeadShape, TreePass, feed_size

FEW_ROWS = 4  # of a sequence, which a first pass usually feeds: those of the latest step


@dataclass(frozen=True)
class DraftShape:
    """Everything that a recorded draft depends on."""

    lanes: int  # sequences that there is room for
    rows: int  # of the first pass
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
        self._trees: dict[DraftShape, Any] = {}
        self._chains: dict[tuple[int, bool], HeadChains] = {}  # by lanes, and whether some sequence has a filter
        self._reading: Any = None
        self._backlog: dict[int, int] = {}  # line -> at most so many committed rows that the head lacks

    def join(self, seq: Sequence, row: Row) -> int:
        read = min(self.plane.holds(seq.id), max(len(seq.tokens) - 2, 0))
        self._backlog[row.line] = len(seq.tokens) - 1 - read
        return read

    def has_read(self, seq: Sequence, tokens: int) -> None:
        self.plane.advance(seq.id, tokens)

    def warm(self, lanes: int) -> None:
        for rows in FEEDS:
            self._recorded(DraftShape(lanes, rows, False), CHAIN)
        self._read_more()

    def recorded(self, lanes: int, tokens: int) -> Any:
        return self._recorded(DraftShape(lanes, feed_size(FEW_ROWS * lanes), False), tokens)

    def passes(self, turns: Listing[Turn], rows: list[Row], asks: list[int]) -> list[tuple[str, Any, int]]:
        """A sequence whose prompt ends with this round has no features yet: it is drafted for in the next one."""
        ready = [asked if turn.feed == 1 else 0 for turn, asked in zip(turns, asks, strict=True)]
        passes: list[tuple[str, Any, int]] = []
        backlog = sum(self._backlog[row.line] for row, asked in zip(rows, ready, strict=True) if asked)
        if backlog > FEEDS[-1]:
            passes.append(("read", self._read_more(), -(-backlog // FEEDS[-1])))
            backlog = sum(asked > 0 for asked in ready)
        if any(ready):
            greedy = all(turn.seq.params.greedy for turn in turns)
            drawn = not greedy if self.width else any(filters(turn.seq) for turn in turns)
            shape = DraftShape(lanes_for(sum(asked > 0 for asked in asks)), feed_size(backlog), drawn)
            passes.append(("draft", self._recorded(shape, max(ready)), 1))
        for turn, row, asked in zip(turns, rows, ready, strict=True):
            if turn.whole:
                self._backlog[row.line] = (0 if asked else self._backlog[row.line]) + turn.budget + 1
        return passes

    def _recorded(self, shape: DraftShape, length: int) -> Any:
        if not self.width:
            key = shape.lanes, shape.drawn
            if key not in self._chains:
                self._chains[key] = HeadChains(self, *key)
            return self._chains[key].upto(shape.rows, min(length, DRAFT))
        if shape not in self._trees:
            tree = RoundTree(self, shape)
            self._trees[shape] = self.rounds.record(tree.draft)
        return self._trees[shape]

    def tensors(self, lanes: int, branches: int, length: int) -> dict[str, Tensor]:
        """What the passes of a draft lay out and choose for B sequences: the first pass's rows aside."""
        device, each = self.rounds.state.device, lanes * branches
        out = {"want": torch.zeros(lanes, dtype=I64, device=device)}
        out |= {"drafts": torch.zeros(lanes, dtype=I32, device=device)}
        out |= {"later_positions": torch.zeros(length, each, dtype=I64, device=device)}
        out |= {"later_info": torch.zeros(length, each, 8, dtype=I32, device=device)}
        out |= {name: torch.zeros(lanes, dtype=dtype, device=device) for name, dtype in SAMPLING.items()}
        return out | {
            name: torch.zeros(length, lanes, dtype=I64, device=device) for name in ("position", "key", "drafted")
        }

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

    def _read_more(self) -> Any:
        if self._reading is None:
            out = self.rows(FEEDS[-1], self.rounds.capacity)

            def work() -> None:
                self.feed(self.rounds.inputs.device, out, last=2)

            self._reading = self.rounds.record(work)
        return self._reading

    def rows(self, rows: int, lanes: int) -> dict[str, Tensor]:
        """A first pass's rows."""
        blocks = min(rows, lanes + rows // self.heads.graphs.rows_per_block)
        return row_tensors(rows, blocks, self.rounds.state.device)


class HeadChains:
    """The passes that draft chains for so many sequences: first ones by their rows, each later one recorded once."""

    def __init__(self, owner: HeadRounds, lanes: int, drawn: bool) -> None:
        self.owner, self.lanes, self.drawn = owner, lanes, drawn
        self.inputs, self.out = owner.rounds.inputs_for(lanes), owner.tensors(lanes, 1, DRAFT)
        head, device = owner.heads.head, owner.rounds.state.device
        self.outputs = torch.zeros(
            lanes, head.config.hidden_size, dtype=head.compute, device=device
        )  # of the last pass
        self.first: dict[int, Any] = {}  # by rows
        self.later: list[Any] = []
        self.keep = owner.rounds.record(self._keep)

    def upto(self, rows: int, length: int) -> ReplayAll:
        """What drafts chains of this length, after a first pass over so many rows."""
        record = self.owner.rounds.record
        if rows not in self.first:
            self.first[rows] = record(partial(self._first, self.owner.rows(rows, self.lanes)))
        for j in range(len(self.later) + 1, length):
            self.later.append(record(partial(self._later, j)))
        return ReplayAll([self.first[rows], *self.later[: length - 1], self.keep])

    def _first(self, rows: dict[str, Tensor]) -> None:
        owner, out = self.owner, self.out
        scores, outputs = owner.feed(self.inputs, out | rows, last=1, most=DRAFT)
        kernels.lay_out_behind(owner.rounds.lines.numbers, self.inputs["lines"], out["drafts"], out)
        self.outputs.copy_(outputs[out["want"]])
        self._choose(scores, 0)

    def _later(self, j: int) -> None:
        """Pass j feeds the token that the last one chose, with that one's output as its feature."""
        heads, out, b = self.owner.heads, self.out, self.lanes
        where = (out["later_positions"][j], heads.columns[j - 1, :b], heads.every[:b], out["later_info"][j])
        scores, outputs = heads.run(out["drafted"][j - 1], *where, heads.tails[:b], self.outputs)
        self.outputs.copy_(outputs)
        self._choose(scores, j)

    def _keep(self) -> None:
        lines, out = self.owner.rounds.lines, self.out
        kernels.keep_chain(
            lines.numbers, lines.draft, self.inputs["lines"], out["drafts"], out["drafted"], kernels.HEAD
        )

    def _choose(self, scores: Tensor, j: int) -> None:
        """Every sequence's token j [B]. scores [B, D]."""
        out, heads = self.out, self.owner.heads
        laws = Laws(*(out[name][j] if name == "position" else out[name] for name in SAMPLING))
        tokens, _, _ = sampling.choose(heads.logits(scores), laws, self.drawn)
        out["drafted"][j].copy_(tokens)


class RoundTree(TreePass):
    """The tree of `TreePass` from lines of device state; its best nodes become the sequences' drafts."""

    def __init__(self, owner: HeadRounds, shape: DraftShape) -> None:
        b, w, depth, device = shape.lanes, owner.width, owner.depth, owner.rounds.state.device
        self.owner, self.heads, self.inputs = owner, owner.heads, owner.rounds.inputs_for(b)
        self.out = owner.tensors(b, w, depth) | owner.rows(shape.rows, b)
        self.shape = HeadShape("tree", shape.rows, b, depth, w, shape.drawn)
        nodes = (b, w + (depth - 1) * w**2)
        types = {"tokens": I64, "parents": I64, "survival": F64}
        self.nodes = {name: torch.zeros(nodes, dtype=dtype, device=device) for name, dtype in types.items()}
        self.form, self.reply = SimpleNamespace(device=self.out), SimpleNamespace(device=self.nodes)  # type: ignore[assignment]

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
        kept = (state.numbers, state.draft, state.parents, state.survival)
        kernels.keep_tree(*kept, lines, self.out["drafts"], best, kernels.HEAD)
