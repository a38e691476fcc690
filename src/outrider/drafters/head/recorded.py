"""Drafts of a trained head, each as one graph: what it is fed, all of its passes, and every choice among its words.

Features are never handed over: the target's passes leave its streams in the slots of their rows, and a head's true row
finds its feature in the slot that it is fed to itself. Guesses live in scratch slots behind everybody's, one lane for
each sequence of a draft, and are forgotten: true rows are fed when the target has spoken.

Chains stay on the device (*unread*). A tree's shape depends on what was found, so trees are brought back, in one copy.
It knows a head, its plane and where sequences stand; what the drafter's plane holds is told to it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ...backends.cuda.graphs import BATCHES, CHEAP_ROWS, LENGTHS, Graphs, padded_size
from ...backends.cuda.kernels.attention import Blocks
from ...backends.cuda.state import DEPTHS
from ...backends.rows import Rows
from ...engine.batch import BatchBuilder
from ...engine.cache import Plane
from ...engine.sampling import adjusts, filters
from ...types import Draft, Sequence, Tree
from .passes import Chain, First, HeadShape, Masks, Rankings, Reading
from .trees import Growing, Grown

PLACES = DEPTHS[-1]  # scratch slots of one sequence's guesses
FEEDS = (16, 32, 64, 128, 256, 512)  # rows of a first pass: fewer than the first cost as much
READINGS = (64, 512)  # rows of a pass that only reads: prompts have all lengths, and every size is a recording
STEPS = (4, 8, 16, 32, 64)  # lengths of chains that are recorded after the first
RECORDING = 400  # recording a pass takes the host about as long as a device takes to run so many: a head's are short
FEW = 16  # true rows of a sequence that are fed on the way to a draft; more are read ahead of it
Ranking = list[tuple[int, float]]  # tokens with their chances, best first
Kind = TypeVar("Kind", bound=First)


class HeadRows(BatchBuilder):
    """Rows of a head, packed: each has the token after its position."""

    def true(self, seq: Sequence, start: int, stop: int, want: bool = False) -> None:
        """Rows start … stop-1 of what is committed; with `want`, the last one's scores are needed."""
        slots = self.cache.rows[seq.id].slots
        for p in range(start, stop):
            self._add(seq, seq.tokens[p + 1], p, slots[p], p + 1, [])
        if want:
            self.want.append(len(self.tokens) - 1)

    def masks(self, seq: Sequence, lane: list[int]) -> None:
        """Rows without a token behind the last true one, in these slots; all are wanted."""
        known = len(seq.tokens) - 1
        for j, slot in enumerate(lane):
            self._add(seq, 0, known + j, slot, known, lane[: j + 1])
            self.want.append(len(self.tokens) - 1)


class Heads:
    """One head over its plane."""

    def __init__(self, graphs: Graphs, shown: Plane, source: str) -> None:
        self.graphs, self.state, self.source = graphs, graphs.state, source
        self.head = cast(Any, graphs.model)
        self.streams = [shown.streams[tap] for tap in self.head.config.taps]  # [S, H] each
        self.at = self.state.claim()  # of its tokens among the unread
        first, device = graphs.plane.add_scratch(self.state.lanes * PLACES), self.state.device
        self.lanes = first + torch.arange(self.state.lanes * PLACES, device=device).view(-1, PLACES)  # [lanes, PLACES]
        self.tails, self.columns = self.lanes.int(), self.lanes.T.contiguous()  # [lanes, PLACES], [PLACES, lanes]
        self.slots: list[list[int]] = self.lanes.tolist()  # the same on the host
        self.every = torch.arange(self.state.lanes * PLACES, device=device)  # row numbers
        self.ids: Tensor = self.head.ids.to(self.state.device)  # [D]
        self.recorded: dict[HeadShape, First] = {}
        self.missed: dict[HeadShape, int] = {}

    def suits(self, seqs: list[Sequence]) -> bool:
        """Whether a recorded chain can stand in for one that looks at scores on the host."""
        return all(seq.rule == "match" and not adjusts(seq) for seq in seqs)

    def suits_trees(self, seqs: list[Sequence], width: int, depth: int) -> bool:
        """The same for trees: rankings here know temperature and noise, but no filters."""
        grows = self.head.config.kind == "block" or (depth - 1) * width <= PLACES
        return grows and self.suits(seqs) and not any(filters(seq) for seq in seqs)

    # ------------------------------------------------------------ the drafts

    def chains(self, seqs: list[Sequence], starts: list[int], budget: list[int]) -> Draft:
        """budget[i] tokens after each sequence, whose true rows from starts[i] on the plane lacks."""
        starts, filtered = self._read_ahead(seqs, starts), any(filters(seq) for seq in seqs)
        budget = [min(k, LENGTHS[-1]) for k in budget]
        if self.head.config.kind == "block":
            places = self._masks(seqs, starts, budget, filtered)
        else:
            places = self._chain(seqs, starts, budget, filtered)
        trees = (Tree([-1 - at for at in some], list(range(-1, len(some) - 1)), source=self.source) for some in places)
        return Draft.pack(trees, self.state.unread)

    def _chain(self, seqs: list[Sequence], starts: list[int], budget: list[int], filtered: bool) -> list[list[int]]:
        """Where each sequence's tokens are among the unread."""
        packed = self._true_rows(seqs, starts)
        longest = next(n for n in LENGTHS if n >= max(budget))
        wished = HeadShape("chain", feed(len(packed.tokens)), lanes_for(len(seqs)), longest, drawn=filtered)
        step = self._recorded(wished, Chain)
        step.fill(packed, seqs, budget)
        share = max(budget) / step.shape.length  # a longer one may stand in for what is not recorded yet
        self.state.replay("draft", step.recording, step.form, min(share, 1.0))
        return [[self.at + j * step.shape.wanted + i for j in range(k)] for i, k in enumerate(budget)]

    def _masks(self, seqs: list[Sequence], starts: list[int], budget: list[int], filtered: bool) -> list[list[int]]:
        packed = self._masked_rows(seqs, starts, budget)
        wished = HeadShape("masks", feed(len(packed.tokens)), padded_size(len(packed.want)), drawn=filtered)
        step = self._recorded(wished, Masks)
        step.fill(packed, seqs, budget)
        self.state.replay("draft", step.recording, step.form)
        at = iter(range(self.at, self.at + len(packed.want)))
        return [[next(at) for _ in range(k)] for k in budget]

    def rankings(self, seqs: list[Sequence], starts: list[int], lengths: list[int], width: int) -> list[list[Ranking]]:
        """A block's likeliest tokens at each of a sequence's next lengths[i] positions."""
        packed = self._masked_rows(seqs, self._read_ahead(seqs, starts), lengths)
        drawn = any(not seq.params.greedy for seq in seqs)
        width = min(width, self.ids.shape[0])
        wished = HeadShape(
            "rankings", feed(len(packed.tokens)), padded_size(len(packed.want)), width=width, drawn=drawn
        )
        step = self._recorded(wished, Rankings)
        step.fill(packed, seqs, lengths)
        self.state.replay("draft", step.recording, step.form)
        rows = iter(step.read(len(packed.want)))
        return [[next(rows) for _ in range(k)] for k in lengths]

    def trees(self, seqs: list[Sequence], starts: list[int], width: int, depth: int) -> list[Grown]:
        """All nodes of each sequence's tree, in the order in which they were found."""
        packed = self._true_rows(seqs, self._read_ahead(seqs, starts))
        drawn = any(not seq.params.greedy for seq in seqs)
        width = min(width, self.ids.shape[0])
        wished = HeadShape("tree", feed(len(packed.tokens)), lanes_for(len(seqs)), depth, width, drawn)
        step = self._recorded(wished, Growing)
        step.fill(packed, seqs, [])
        self.state.replay("draft", step.recording, step.form)
        return step.read(len(seqs))

    # ------------------------------------------------------------ what is fed

    def _read_ahead(self, seqs: list[Sequence], starts: list[int]) -> list[int]:
        """Feed a prompt's true rows, all but the last one; returns where each sequence's draft begins."""
        packed, after = HeadRows(self.state.cache), []
        for seq, start in zip(seqs, starts, strict=True):
            stop = len(seq.tokens) - 2
            if stop + 1 - start <= FEW:
                after.append(start)
                continue
            while start < stop:
                end = min(stop, start + FEEDS[-1] - len(packed.tokens))
                packed.true(seq, start, end)
                start = end
                if len(packed.tokens) == FEEDS[-1]:
                    self._read(packed)
                    packed = HeadRows(self.state.cache)
            after.append(stop)
        if packed.tokens:
            self._read(packed)
        return after

    def _read(self, packed: HeadRows) -> None:
        size = next((n for n in READINGS if n >= len(packed.tokens)), feed(len(packed.tokens)))
        step = self._recorded(HeadShape("reading", size, 0), Reading)
        step.fill(packed, [], [])
        self.state.replay("read", step.recording, step.form)

    def _true_rows(self, seqs: list[Sequence], starts: list[int]) -> HeadRows:
        packed = HeadRows(self.state.cache)
        for seq, start in zip(seqs, starts, strict=True):
            packed.true(seq, start, len(seq.tokens) - 1, want=True)
        return packed

    def _masked_rows(self, seqs: list[Sequence], starts: list[int], lengths: list[int]) -> HeadRows:
        """True rows, and behind them masks in the sequence's lane; lengths[i] of them are wanted."""
        packed = HeadRows(self.state.cache)
        for seq, start, length, lane in zip(seqs, starts, lengths, self.slots, strict=False):
            packed.true(seq, start, len(seq.tokens) - 1, want=True)
            packed.masks(seq, lane[: length - 1])
        return packed

    # ------------------------------------------------------------ running

    def run(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, want: Tensor, info: Tensor, tail: Tensor,
        features: Tensor, masked: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Scores of the wanted rows [R, D] and every row's output [T, H]. tokens … [T], want [R], features [T, H]."""
        blocks = Blocks(info, tail, self.state.table, self.state.scratch(self.head))
        rows = Rows(tokens, positions, slots, slots, slots, self.state.table, None, want, blocks=blocks)
        scores, outputs = self.head.scores(rows, self.graphs.plane, features, masked)
        return scores, outputs

    def _recorded(self, shape: HeadShape, kind: type[Kind]) -> Kind:
        """The pass of this shape; or a larger one, until what it does in vain has cost as much as recording would."""
        if shape not in self.recorded:
            self.missed[shape] = missed = self.missed.get(shape, 0) + 1
            larger = [known for known in self.recorded if known.holds(shape, CHEAP_ROWS)]
            nearest = min(larger, key=lambda known: (known.length, known.rows, known.wanted), default=None)
            if nearest is None:
                shape = self._roomy(shape)
            elif missed * (nearest.length - shape.length) <= RECORDING * max(shape.length, 1):
                shape = nearest
            if shape not in self.recorded:
                self.recorded[shape] = kind(self, shape)
        return cast(Kind, self.recorded[shape])

    def _roomy(self, shape: HeadShape) -> HeadShape:
        """The first chain is recorded as it is asked for, it may stay the only one. If not, the next lengths will be
        asked for soon: a controller tries them all."""
        if shape.kind != "chain" or not any(known.kind == "chain" for known in self.recorded):
            return shape
        return replace(shape, length=next(n for n in STEPS if n >= shape.length))


def feed(rows: int) -> int:
    """The size that a first pass is padded to."""
    return next((size for size in FEEDS if size >= rows), padded_size(rows))


def lanes_for(sequences: int) -> int:
    return next((n for n in BATCHES if n >= sequences), padded_size(sequences))
