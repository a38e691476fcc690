"""Drafting with a trained head: feed the committed rows that its plane lacks, then guess.

Head row p has the token at p + 1 and the feature of position p, lives in the slot of position p, and says what comes at
p + 2. With n committed tokens, rows 0 … n-2 are true; guesses begin with what row n-2 says:

    positions   0 ................ n-2 │ n-1        │ spare
    rows        [ held ][   fed now   ] │ 1st guess │ later guesses
                  true rows             │ scratch: fed again when the target has spoken

A prefix that another sequence has fed is used as it is (its last row may have another token: the price is a little
acceptance). Features that nobody has seen are zeros. It knows a head and a plane; the text is safe from all of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..cache import Cache, Packing, Plane
from ..models import ops
from ..sampling import law, ranked
from ..types import Draft, Sequence, Step
from . import RecordedHeads
from ._rollout import CHUNK, Growth, Rollout

if TYPE_CHECKING:
    from ..models.head import Head

_MOST_KEPT = 256  # sequences whose end nobody has told us
Ranking = list[tuple[int, float]]  # tokens with their chances, best first


@dataclass
class Features:
    """The target's hidden states at committed positions, until the head has been fed with them."""

    taps: tuple[int, ...]
    pieces: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)  # sequence -> (position, [m, taps * H])

    def observe(self, step: Step) -> None:
        """Copy what the step has shown of positions that are committed now."""
        packing, at = step.rows.packing, 0
        positions = step.rows.positions.tolist() if packing is None else packing.positions
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            path = [] if verdict is None else verdict.path
            if turn.seq.speculate and not turn.seq.done:
                rows: Any = [*range(at, at + turn.feed), *(at + turn.feed + node for node in path)]
                if rows[-1] - at == len(rows) - 1:
                    rows = slice(at, at + len(rows))  # a chain: no need to look for them one by one
                shown = torch.cat([step.output.hidden[tap][rows] for tap in self.taps], 1)  # [m, taps * H]
                self.pieces.setdefault(turn.seq.id, []).append((positions[at], shown))
            at += turn.feed + len(tree.tokens)

    def known(self, name: int, position: int) -> bool:
        return any(at <= position < at + piece.shape[0] for at, piece in reversed(self.pieces.get(name, ())))

    def between(self, name: int, start: int, stop: int, like: Tensor) -> Tensor:
        """Hidden states of positions start … stop-1 [m, taps * H]; zeros where nothing was seen."""
        pieces = self.pieces.get(name, [])
        if len(pieces) == 1 and pieces[0][0] <= start and stop <= pieces[0][0] + pieces[0][1].shape[0]:
            return pieces[0][1][start - pieces[0][0] : stop - pieces[0][0]]
        found = like.new_zeros(stop - start, like.shape[1])
        for at, piece in pieces:
            low, high = max(at, start), min(at + piece.shape[0], stop)
            if low < high:
                found[low - start : high - start] = piece[low - at : high - at]
        return found

    def forget(self, name: int, before: int) -> None:
        """The head has been fed with these; the one of the last row may be asked for once more."""
        self.pieces[name] = [(at, piece) for at, piece in self.pieces.get(name, ()) if at + piece.shape[0] > before]

    def drop(self, name: int) -> None:
        self.pieces.pop(name, None)

    def tidy(self, alive: Set[int]) -> None:
        """Not everybody's end is told."""
        if len(self.pieces) > _MOST_KEPT:
            for name in self.pieces.keys() - alive:
                self.drop(name)


class Kept:
    """The same where the target's passes leave their streams in the slots of their rows: nothing is ever missed."""

    def __init__(self, taps: tuple[int, ...], cache: Cache, plane: Plane) -> None:
        self.cache, self.streams = cache, [plane.streams[tap] for tap in taps]  # [S, H] each

    def observe(self, step: Step) -> None:
        """Nothing to copy."""

    def known(self, name: int, position: int) -> bool:
        """Whoever asks knows that the target has been there."""
        return True

    def between(self, name: int, start: int, stop: int, like: Tensor) -> Tensor:
        slots = torch.tensor(self.cache.rows[name].slots[start:stop]).to(like.device)  # [m]
        return torch.cat([stream[slots] for stream in self.streams], 1).to(like.dtype)  # [m, taps * H]

    def forget(self, name: int, before: int) -> None:
        """A slot's next owner overwrites it."""

    def drop(self, name: int) -> None:
        """The same."""

    def tidy(self, alive: Set[int]) -> None:
        """Nothing is kept by name."""


class HeadPacking(Packing):
    """Rows of a head: each has the token after its position."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self.masked: list[bool] = []

    def true(self, seq: Sequence, start: int, stop: int, want: bool) -> None:
        """Rows start … stop-1 of what is committed."""
        slots = self.cache.rows[seq.id].slots
        for p in range(start, stop):
            self._add(seq, seq.tokens[p + 1], p, slots[p], p + 1, [])
        self.masked += [False] * (stop - start)
        if want:
            self.want.append(len(self.tokens) - 1)

    def guessed(self, seq: Sequence, token: int, places: list[int], masked: bool = False) -> None:
        """A row after the last true one, in the last of these places; it sees those before it."""
        row, n = self.cache.rows[seq.id], len(seq.tokens)
        tail = [row.slots[n - 1] if place == 0 else row.spare[place - 1] for place in places]
        self._add(seq, token, n - 2 + len(places), tail[-1], n - 1, tail)
        self.masked.append(masked)
        self.want.append(len(self.tokens) - 1)


class HeadRollout(Rollout):
    """A head over its plane, drafting chains or trees as its kind does."""

    def __init__(
        self, head: Head, cache: Cache, plane: Plane, features: Features | Kept, drafts: RecordedHeads | None = None
    ) -> None:
        model: Any = head  # Rollout only keeps it: what runs it is overridden here
        super().__init__(model, cache, plane, source="head")
        self.head, self.features, self.drafts = head, features, drafts
        self.outputs: dict[int, dict[int, Tensor]] = {}  # sequence -> node -> [H] what its children go on from
        width = head.config.hidden_size * len(head.config.taps)
        self.blank = torch.empty(0, width, dtype=head.stream, device=head.device)  # [0, taps * H]
        self.floor = 0.0  # survival below which a chain ends
        self.runs = 0  # passes since somebody last set this to 0
        self.words: list[int] = head.ids.tolist()  # [D] the target's id of each of the head's
        self.fed: dict[int, int] = {}  # slot -> the token that its true row was last fed with

    # ------------------------------------------------------------ block: all in one pass

    def chains(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        block = self.head.config.kind == "block"
        budget = [min(k, self.head.config.block) for k in budget] if block else budget
        if self.drafts is not None and self.drafts.suits(seqs):
            draft = self.drafts.chains(seqs, self._starts(seqs), budget)
            self._all_fed(seqs)
            return draft
        if not block:
            return super().chains(seqs, budget)
        grown = [Growth(seq, k) for seq, k in zip(seqs, budget, strict=True)]
        for growth, rows in zip(grown, self._blocks(seqs, budget), strict=True):
            if growth.seq.rule == "match" and growth.seq.params.plain and not self._shows(growth.seq):
                for token, confidence in self._likeliest(rows):
                    growth.add(token, len(growth.tokens) - 1, confidence)
            else:
                for row in rows:
                    self._extend(growth, row)
        return Draft.pack(g.tree(self.source) for g in grown)

    def trees(self, seqs: list[Sequence], budget: list[int], width: int, depth: int) -> Draft:
        recorded = self.drafts is not None and self.drafts.suits_trees(seqs, width, depth)
        if self.head.config.kind == "eagle3":
            grow = self._recorded_trees if recorded else super().trees
            return grow(seqs, budget, width, depth)
        depths = [min(k, depth, self.head.config.block) for k in budget]
        rankings = (self._recorded_rankings if recorded else self._rankings)(seqs, depths, width)
        grown = [Growth(seq, k) for seq, k in zip(seqs, budget, strict=True)]
        for growth, levels in zip(grown, rankings, strict=True):
            best_first(growth, levels)
        return Draft.pack(growth.tree(self.source) for growth in grown)

    # ------------------------------------------------------------ the same as one graph, on a device that has them

    def _recorded_trees(self, seqs: list[Sequence], budget: list[int], width: int, depth: int) -> Draft:
        assert self.drafts is not None
        found = self.drafts.trees(seqs, self._starts(seqs), width, depth)
        self._all_fed(seqs)
        grown = []
        for seq, k, (tokens, parents, survival) in zip(seqs, budget, found, strict=True):
            likely = max(sum(chance > 0 for chance in survival), 1)
            grown.append(Growth(seq, min(k, likely), tokens, parents, survival))
        return Draft.pack(self._best(growth) for growth in grown)

    def _recorded_rankings(self, seqs: list[Sequence], lengths: list[int], width: int) -> list[list[Ranking]]:
        assert self.drafts is not None
        found = self.drafts.rankings(seqs, self._starts(seqs), lengths, width)
        self._all_fed(seqs)
        return found

    def _starts(self, seqs: list[Sequence]) -> list[int]:
        """The first true row of each that the plane lacks; never past the last one, whose word is needed."""
        return [min(self.cache.sync(seq, self.plane), len(seq.tokens) - 2) for seq in seqs]

    def _all_fed(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self._fed(seq, len(seq.tokens) - 1)

    # ------------------------------------------------------------ what the host ranks itself

    def _rankings(self, seqs: list[Sequence], lengths: list[int], width: int) -> list[list[Ranking]]:
        """The likeliest tokens at each of a sequence's next positions, ranked as if the best had been said before."""
        found = []
        for seq, rows in zip(seqs, self._blocks(seqs, lengths), strict=True):
            levels: list[Ranking] = []
            for row in rows:
                levels.append(self._ranked(row, seq, [level[0][0] for level in levels], width))
            found.append(levels)
        return found

    def _blocks(self, seqs: list[Sequence], lengths: list[int]) -> list[Tensor]:
        """Scores of each sequence's next positions, [lengths[i], D] each."""
        scores, _ = self._forward_true(seqs, [k - 1 for k in lengths])
        return list(scores.split(lengths))

    # ------------------------------------------------------------ choosing, without the words a head does not know

    def _goes_on(self, growth: Growth) -> bool:
        own = growth.seq.rule != "match" or growth.survival[-1] >= self.floor
        return own and super()._goes_on(growth)

    def _ranked(
        self, logits: Tensor, seq: Sequence, emitted: list[int], width: int, spare: int = 0
    ) -> list[tuple[int, float]]:
        """As `sampling.ranked`; scores [D] stay as short as they are where nothing depends on the others."""
        if seq.params.plain and width + spare == 1:
            return self._likeliest(logits[None])
        if seq.params.plain:
            confidence, place = torch.softmax(logits, -1).topk(min(width + spare, logits.shape[-1]))
            choices = list(zip(self.head.ids[place].tolist(), confidence.tolist(), strict=True))
        else:
            choices = ranked(self.head.spread(logits), seq, emitted, width, spare)
        return [choices[0], *(choice for choice in choices[1:] if choice[1] > 0)]

    def _likeliest(self, rows: Tensor) -> list[tuple[int, float]]:
        """The best word of each row of scores [R, D], with its confidence."""
        places, shares = ops.top_shares(rows)
        return [(self.words[place], share) for place, share in zip(places.tolist(), shares.tolist(), strict=True)]

    def _law(self, logits: Tensor, seq: Sequence, emitted: list[int]) -> Tensor:
        return law(self.head.spread(logits), seq, emitted)

    # ------------------------------------------------------------ running

    def _feed(self, seqs: list[Sequence]) -> Tensor:
        """Bring the plane up to date with every sequence; scores of what comes next. [B, D]"""
        scores, outputs = self._forward_true(seqs, [0] * len(seqs))
        self.outputs = {seq.id: {-1: output} for seq, output in zip(seqs, outputs, strict=True)}
        return scores

    def _run(self, batch: list[tuple[Growth, list[int]]]) -> Tensor:
        """Feed these nodes, each going on from its parent's output; scores after each. [sum of nodes, D]"""
        packed, features = HeadPacking(self.cache), []
        for growth, nodes in batch:
            for node in nodes:
                growth.places[node] = len(growth.places)
                packed.guessed(growth.seq, growth.tokens[node], _places(growth, node))
                features.append(self.outputs[growth.seq.id][growth.parents[node]])
        self.runs += 1
        scores, outputs = self.head.scores(packed.rows(), self.plane, torch.stack(features))
        rows = iter(outputs)
        for growth, nodes in batch:
            self.outputs[growth.seq.id] |= {node: next(rows) for node in nodes}
        return scores.cpu()

    def _forward_true(self, seqs: list[Sequence], masks: list[int]) -> tuple[Tensor, Tensor]:
        """Feed what is committed, and masks behind it: the wanted rows' scores [R, D] and outputs [R, H]."""
        packed, features = HeadPacking(self.cache), []
        for seq, more in zip(seqs, masks, strict=True):
            start, stop = self._catch_up(seq), len(seq.tokens) - 1
            packed.true(seq, start, stop, want=True)
            features.append(self.features.between(seq.id, start, stop, self.blank))
            for j in range(more):
                packed.guessed(seq, 0, list(range(j + 1)), masked=True)
            if more:
                features.append(self.blank.new_zeros(more, self.blank.shape[1]))
        self.runs += 1
        masked = torch.tensor(packed.masked) if any(packed.masked) else None  # [T]
        scores, outputs = self.head.read(packed.rows(), self.plane, torch.cat(features), masked)
        for seq in seqs:
            self._fed(seq, len(seq.tokens) - 1)
        return scores.cpu(), outputs[packed.want]

    def _catch_up(self, seq: Sequence) -> int:
        """Feed all but the last chunk of the true rows that the plane lacks; returns where the rest begins."""
        start, stop = self.cache.sync(seq, self.plane), len(seq.tokens) - 1
        slots = self.cache.rows[seq.id].slots
        while start < stop and not self.features.known(seq.id, start):
            if self.fed.get(slots[start]) != seq.tokens[start + 1]:
                break
            start += 1  # somebody who shares the slot has fed it, and knew its feature
        start = min(start, stop - 1)
        while stop - start > CHUNK:
            packed = HeadPacking(self.cache)
            packed.true(seq, start, start + CHUNK, want=False)
            shown = self.features.between(seq.id, start, start + CHUNK, self.blank)
            self.head.read(packed.rows(), self.plane, shown)
            self._fed(seq, start + CHUNK)
            start += CHUNK
        return start

    def _fed(self, seq: Sequence, rows: int) -> None:
        """The plane holds this many true rows now."""
        before, slots = self.plane.held.get(seq.id, 0), self.cache.rows[seq.id].slots
        for p in range(before, rows):
            self.fed[slots[p]] = seq.tokens[p + 1]
        self.plane.held[seq.id] = rows
        self.features.forget(seq.id, rows - 1)

    def _keep(self, seq: Sequence, nodes: Any) -> None:
        """Nothing: what was guessed is fed again with true features."""


def _places(growth: Growth, node: int) -> list[int]:
    """Where a node's ancestors live, itself last."""
    places: list[int] = []
    while node >= 0:
        places.append(growth.places[node])
        node = growth.parents[node]
    return places[::-1]


def best_first(growth: Growth, levels: list[Ranking]) -> None:
    """Grow the likeliest paths through the positions' rankings (DDTree)."""
    heap = [(-math.log(levels[0][0][1]), 0, -1, 0)]  # cost, order, parent, rank: cheapest first
    depth = {-1: 0}
    while heap and len(growth.tokens) < growth.budget:
        cost, _, parent, rank = heapq.heappop(heap)
        level = levels[depth[parent]]
        node = growth.add(level[rank][0], parent, level[rank][1])
        depth[node], base = depth[parent] + 1, cost + math.log(level[rank][1])
        if rank + 1 < len(level):
            heapq.heappush(heap, (base - math.log(level[rank + 1][1]), 2 * node, parent, rank + 1))
        if depth[node] < len(levels):
            heapq.heappush(heap, (cost - math.log(levels[depth[node]][0][1]), 2 * node + 1, node, 0))
