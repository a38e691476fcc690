"""Drafting with a trained head: chains and trees, from what it has been fed with (`models.head_feed`).

It knows a head and a plane; the text is safe from all of it.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends.rows import rows_of
from ...engine.cache import Cache, Plane
from ...types import Draft, Sequence
from .._rollout import DraftVocabularyRollout, Growth
from .features import Features, HeadBatch, Kept, TrueRows

if TYPE_CHECKING:
    from .network import Head
    from .recorded import Heads

Ranking = list[tuple[int, float]]  # tokens with their chances, best first


class HeadRollout(DraftVocabularyRollout):
    """A head over its plane, drafting chains or trees as its kind does."""

    def __init__(
        self, head: Head, cache: Cache, plane: Plane, features: Features | Kept, drafts: Heads | None = None
    ) -> None:
        super().__init__(head, head, cache, plane, source="head")
        self.head, self.drafts = head, drafts
        self.true = TrueRows(head, cache, plane, features)
        self.outputs: dict[int, dict[int, Tensor]] = {}  # sequence -> node -> [H] what its children go on from
        self.runs = 0  # passes of the draft at hand

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

    def leaves_unread(self, seqs: list[Sequence]) -> bool:
        """Whether chains after these would stay on the device, so that nobody waits for them."""
        return self.drafts is not None and self.drafts.suits(seqs)

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
            self.true.fed(seq, len(seq.tokens) - 1)

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

    # ------------------------------------------------------------ running

    def _feed(self, seqs: list[Sequence]) -> Tensor:
        """Bring the plane up to date with every sequence; scores of what comes next. [B, D]"""
        scores, outputs = self._forward_true(seqs, [0] * len(seqs))
        self.outputs = {seq.id: {-1: output} for seq, output in zip(seqs, outputs, strict=True)}
        return scores

    def _run(self, batch: list[tuple[Growth, list[int]]]) -> Tensor:
        """Feed these nodes, each going on from its parent's output; scores after each. [sum of nodes, D]"""
        packed, features = HeadBatch(self.cache), []
        for growth, nodes in batch:
            for node in nodes:
                growth.places[node] = len(growth.places)
                packed.guessed(growth.seq, growth.tokens[node], _places(growth, node))
                features.append(self.outputs[growth.seq.id][growth.parents[node]])
        self.runs += 1
        scores, outputs = self.head.scores(rows_of(packed), self.plane, torch.stack(features))
        rows = iter(outputs)
        for growth, nodes in batch:
            self.outputs[growth.seq.id] |= {node: next(rows) for node in nodes}
        return scores.cpu()

    def _forward_true(self, seqs: list[Sequence], masks: list[int]) -> tuple[Tensor, Tensor]:
        """Feed what is committed, and masks behind it: the wanted rows' scores [R, D] and outputs [R, H]."""
        self.runs += 1
        scores, outputs = self.true.read(seqs, masks)
        return scores.cpu(), outputs

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
