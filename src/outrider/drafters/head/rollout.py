"""Drafting with a trained head: chains and trees, eagerly or as captured graphs.

An eagle3 head continues from its own outputs, one pass for each depth; a block head fills in masks, all in one pass.
It knows a head, its plane and feature cache.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...backends import Chain
from ...backends.rows import rows_of
from ...engine.cache import Cache, Plane
from ...types import Draft, Sequence, Tree, chain
from .._rollout import DraftVocabularyRollout, Growth, Ranking
from .features import CommittedRows, FeatureCache, HeadBatch

if TYPE_CHECKING:
    from .captured import HeadGraphs
    from .network import Head
    from .phrases import PhraseMemory


class HeadRollout(DraftVocabularyRollout):
    """A head over its plane, drafting chains or trees as its kind does."""

    keeps_kv = False  # drafted rows are fed again with the target's features

    def __init__(
        self, head: Head, cache: Cache, plane: Plane, features: FeatureCache, graphs: HeadGraphs | None = None
    ) -> None:
        super().__init__(head, head, cache, plane, source="head")
        self.head, self.graphs = head, graphs
        self.committed = CommittedRows(head, cache, plane, features)
        self.outputs: dict[int, dict[int, Tensor]] = {}  # sequence -> node -> [H] the feature of its children
        self.node_scores: dict[int, dict[int, Tensor]] = {}  # sequence -> node -> [D], where they are kept
        self._keeps: Callable[[Sequence], bool] | None = None
        self.memory: PhraseMemory | None = None  # may put another token in the place of the head's, in chains
        self.passes_run = 0  # eager passes of the current draft
        self.others_above = math.inf  # survival from which on the second-likeliest tokens are drafted too, in chains
        self.in_order = False  # a block's scores depend on the tokens chosen before

    def keep_states(self, of: Callable[[Sequence], bool]) -> None:
        """Keep what tokens are chosen from, for these sequences: scores, or on a GPU every row's output in its slot."""
        self._keeps = of
        if self.graphs is not None:
            self.graphs.keep_outputs()

    def chains(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        block = self.head.config.parallel
        budget = [min(k, self.head.config.block) for k in budget] if block else budget
        if self.graphs is not None and self.graphs.suits(seqs):
            draft = self.graphs.chains(seqs, self._starts(seqs), budget)
            self._all_fed(seqs)
            return draft
        if self._drafts_natively(seqs):
            drafted = self.committed.chains(seqs, budget, [max(floor, self.stop_below) for floor in self.floors])
            self.passes_run += max(len(each.tokens) for each in drafted)
            if self.memory is not None:
                agreed = [self.memory.agrees(seq, *each[:2]) for seq, each in zip(seqs, drafted, strict=True)]
                if not all(agreed):  # what follows the memory's token is the head's again: token by token
                    return super().chains(seqs, budget)
            return Draft.pack(map(self._with_others, seqs, budget, drafted))
        if not block:
            return super().chains(seqs, budget)
        grown = [Growth(seq, k) for seq, k in zip(seqs, budget, strict=True)]
        for growth, rows in zip(grown, self._blocks(seqs, budget), strict=True):
            fast = growth.seq.rule == "match" and growth.seq.params.plain and not self._records_guesses(growth.seq)
            if fast and not self.in_order:
                for token, confidence in self._likeliest(rows):
                    growth.add(token, len(growth.tokens) - 1, confidence)
            else:
                for row in self._in_order(rows, growth.seq, growth.tokens):
                    self._extend(growth, row)
        return Draft.pack(g.tree(self.source) for g in grown)

    def _with_others(self, seq: Sequence, budget: int, drafted: Chain) -> Tree:
        """A chain, with the second-likeliest tokens that are likely enough: these cost a row each, and no pass. Guides
        continue chains alone, and a memory learns from them."""
        chains_only = seq.matcher is not None or self.memory is not None
        if chains_only or max(drafted.others_survival) < self.others_above:
            return chain(drafted.tokens, drafted.survival, source=self.source)
        return with_others(drafted, self.others_above, budget)._replace(source=self.source)

    def _drafts_natively(self, seqs: list[Sequence]) -> bool:
        """Whether one native call drafts for these: where nothing but the likeliest token of each pass is needed."""
        return (
            self.head.drafts_chains
            and self._keeps is None
            and all(seq.rule == "match" and seq.params.plain and not self._records_guesses(seq) for seq in seqs)
        )

    def trees(self, seqs: list[Sequence], budget: list[int], width: int, depth: int) -> Draft:
        captured = self.graphs is not None and self.graphs.suits_trees(seqs, width, depth)
        if not self.head.config.parallel:
            grow = self._captured_trees if captured else super().trees
            return grow(seqs, budget, width, depth)
        depths = [min(k, depth, self.head.config.block) for k in budget]
        rankings = (self._captured_rankings if captured else self._rankings)(seqs, depths, width)
        grown = [Growth(seq, k) for seq, k in zip(seqs, budget, strict=True)]
        for growth, levels in zip(grown, rankings, strict=True):
            best_first(growth, levels)
        return Draft.pack(growth.tree(self.source) for growth in grown)

    # ------------------------------------------------------------ captured

    def _captured_trees(self, seqs: list[Sequence], budget: list[int], width: int, depth: int) -> Draft:
        assert self.graphs is not None
        trees = self.graphs.trees(seqs, self._starts(seqs), width, depth)
        self._all_fed(seqs)
        grown = []
        for seq, k, (tokens, parents, survival) in zip(seqs, budget, trees, strict=True):
            possible = max(sum(probability > 0 for probability in survival), 1)
            grown.append(Growth(seq, min(k, possible), tokens, parents, survival))
        return Draft.pack(self._best(growth) for growth in grown)

    def _captured_rankings(self, seqs: list[Sequence], lengths: list[int], width: int) -> list[list[Ranking]]:
        assert self.graphs is not None
        rankings = self.graphs.rankings(seqs, self._starts(seqs), lengths, width)
        self._all_fed(seqs)
        return rankings

    def _starts(self, seqs: list[Sequence]) -> list[int]:
        """The first committed row of each that the plane lacks; never past the last one, whose scores are needed."""
        return [min(self.cache.sync(seq, self.plane), len(seq.tokens) - 2) for seq in seqs]

    def _all_fed(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.committed.advance(seq, len(seq.tokens) - 1)

    # ------------------------------------------------------------ eager

    def _rankings(self, seqs: list[Sequence], lengths: list[int], width: int) -> list[list[Ranking]]:
        """The likeliest tokens at each of a sequence's next positions, given the best ones before them."""
        rankings = []
        for seq, rows in zip(seqs, self._blocks(seqs, lengths), strict=True):
            levels, best = list[Ranking](), list[int]()
            for row in self._in_order(rows, seq, best):
                levels.append(self._ranked(row, seq, best, width))
                best.append(levels[-1][0][0])
            rankings.append(levels)
        return rankings

    def _blocks(self, seqs: list[Sequence], lengths: list[int]) -> list[Tensor]:
        """Scores of each sequence's next positions, [lengths[i], D] each."""
        scores, _ = self._forward_committed(seqs, [k - 1 for k in lengths])
        return list(scores.split(lengths))

    def _in_order(self, rows: Tensor, seq: Sequence, chosen: list[int]) -> Iterator[Tensor]:
        """A block's scores at each position [D], given the tokens chosen before, which the caller adds in between."""
        return iter(rows)

    def _feed(self, seqs: list[Sequence]) -> Tensor:
        """Bring the plane up to date with every sequence; scores of the next token. [B, D]"""
        scores, outputs = self._forward_committed(seqs, [0] * len(seqs))
        self.outputs = {seq.id: {-1: output} for seq, output in zip(seqs, outputs, strict=True)}
        if self._keeps is not None:
            rows = zip(seqs, scores, strict=True)
            self.node_scores = {seq.id: {-1: row} for seq, row in rows if self._keeps(seq)}
        return scores

    def _run(self, batch: list[tuple[Growth, list[int]]]) -> Tensor:
        """Feed these nodes, each with its parent's output as its feature; scores after each. [sum of nodes, D]"""
        packed, features = HeadBatch(self.cache), []
        for growth, nodes in batch:
            for node in nodes:
                growth.spare[node] = len(growth.spare)
                packed.drafted(growth.seq, growth.tokens[node], [growth.spare[n] for n in growth.path(node)])
                features.append(self.outputs[growth.seq.id][growth.parents[node]])
        self.passes_run += 1
        scores, outputs = self.head.scores(rows_of(packed), self.plane, torch.stack(features))
        rows, scored = iter(outputs), iter(scores)
        for growth, nodes in batch:
            self.outputs[growth.seq.id] |= {node: next(rows) for node in nodes}
            named = {node: next(scored) for node in nodes}
            if growth.seq.id in self.node_scores:
                self.node_scores[growth.seq.id] |= named
        return scores.cpu()

    def _choices(self, growth: Growth, node: int, logits: Tensor, width: int) -> Ranking:
        choices = super()._choices(growth, node, logits, width)
        if self.memory is None or width != 1:
            return choices
        drafted = [growth.tokens[n] for n in growth.path(node)]
        return [self.memory.choose(growth.seq, drafted, *choices[0])]

    def _forward_committed(self, seqs: list[Sequence], masks: list[int]) -> tuple[Tensor, Tensor]:
        """As `CommittedRows.read`, with the scores on the host."""
        self.passes_run += 1
        scores, outputs = self.committed.read(seqs, masks)
        return scores.cpu(), outputs


def with_others(drafted: Chain, least: float, most: int) -> Tree:
    """A chain and the second-likeliest tokens beside it that survive this often, the likeliest first, `most` in all."""
    nodes = [(-s, depth, False, token) for depth, (token, s) in enumerate(zip(*drafted[:2], strict=True))]
    others = enumerate(zip(*drafted[2:], strict=True))
    nodes += [(-s, depth, True, token) for depth, (token, s) in others if s >= least]
    nodes = sorted(nodes)[:most]  # of equal ones the first in the chain: parents come before children
    number = {-1: -1}  # depth in the chain -> node
    number |= {depth: node for node, (_, depth, other, _) in enumerate(nodes) if not other}
    return Tree([n[3] for n in nodes], [number[n[1] - 1] for n in nodes], [-n[0] for n in nodes])


def best_first(growth: Growth, levels: list[Ranking]) -> None:
    """Grow the likeliest paths through the positions' rankings (DDTree)."""
    heap = [(-math.log(levels[0][0][1]), 0, -1, 0)]  # cost, tie-break, parent, rank: cheapest first
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
