"""Drafting with a model: feed what its plane lacks, then choose token after token, for all sequences at once.

Shared by every drafter that runs layers; they differ in the model, the part of it and the plane. Tokens are chosen with
the target's parameters and noise, so that a good model is right even at high temperature. Under the rules `reject` and
`block` they are drawn from q with separate noise, and the tree carries q.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence as Listing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends import WHOLE, Model, Part, Passes, RecordedChains, ops
from ..backends.rows import rows_of
from ..engine.batch import BatchBuilder
from ..engine.cache import Cache, Plane
from ..engine.sampling import DRAFT, distribution, draw, key, ranked, widened
from ..errors import ConfigError
from ..types import Draft, Sequence, Tree, chain
from ._trained import DraftVocabulary

CHUNK = 512  # rows of one pass while catching up with a long prompt
GUESSES = 5  # alternatives recorded per node
Ranking = list[tuple[int, float]]  # tokens with their probabilities, best first


@dataclass
class Growth:
    """One sequence's tree while it grows. Nodes are numbered in the order in which they are added."""

    seq: Sequence
    budget: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    q: list[Tensor] = field(default_factory=list)  # [V] each
    spare: dict[int, int] = field(default_factory=dict)  # fed node -> index of its spare slot, in feeding order
    guesses: dict[int, Callable[[], Ranking]] = field(default_factory=dict)  # by parent

    def path(self, node: int) -> list[int]:
        return path_to(node, self.parents)

    def add(self, token: int, parent: int, confidence: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.survival.append(confidence * (self.survival[parent] if parent >= 0 else 1.0))
        return len(self.tokens) - 1

    def tree(self, source: str) -> Tree:
        q = torch.stack(self.q) if self.q else None
        return Tree(self.tokens, self.parents, self.survival, q, source, self.guesses or None)


class Rollout:
    """A model over a plane, drafting chains or trees."""

    again = 2  # committed tokens that a recorded draft feeds once more
    stop_below = 0.0  # a node with a lower survival is not extended
    record_guesses = False  # record each node's likeliest alternatives
    keeps_kv = True  # what a draft writes counts as the sequence's K/V; False: nothing does, verification writes it

    def __init__(
        self,
        model: Model,
        cache: Cache,
        plane: Plane,
        part: Part = WHOLE,
        source: str = "model",
        passes: Passes | None = None,
    ) -> None:
        self.model, self.cache, self.plane, self.part, self.source = model, cache, plane, part, source
        self.passes = passes
        self._keeps_whole = self.keeps_kv and replace(part, vocab=None) == WHOLE  # all layers run, and their K/V counts
        self.recorded = None if passes is None else passes.chains(part, self.again, source)

    def chains(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        """budget[i] tokens after each sequence, one pass for each depth."""
        if self.recorded is not None and self.recorded.suits(seqs):
            return self._record(self.recorded, seqs, budget)
        if self._drafts_at_once(seqs):
            return self._at_once(seqs, budget)
        grown = [Growth(seq, k) for seq, k in zip(seqs, budget, strict=True)]
        logits = self._feed([g.seq for g in grown])  # [B, V]
        live = grown
        while live:
            for growth, row in zip(live, logits, strict=True):
                self._extend(growth, row)
            live = [g for g in live if len(g.tokens) < g.budget and self._goes_on(g)]
            if live:
                logits = self._run([(g, [len(g.tokens) - 1]) for g in live])
        for growth in grown:
            self._keep(growth.seq, growth.spare)  # a chain's nodes are fed in order: node n is in spare slot n
        return Draft.pack(g.tree(self.source) for g in grown)

    def _drafts_at_once(self, seqs: list[Sequence]) -> bool:
        """Whether one call of the model drafts for these: where nothing but the likeliest token of each pass counts."""
        return (
            self._keeps_whole
            and self.model.drafts_chains
            and all(seq.rule == "match" and seq.params.plain and not self._records_guesses(seq) for seq in seqs)
        )

    def _at_once(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        packed = self._lacking(seqs)
        slots = [self.cache.spare(seq)[: room - 1] for seq, room in zip(seqs, budget, strict=True)]
        drafted = self.model.chains(rows_of(packed), self.plane, slots, budget, self.stop_below, self.part.vocab)
        for seq, each in zip(seqs, drafted, strict=True):
            self._hold(seq, len(seq.tokens))
            self._keep(seq, range(len(each.tokens) - 1))
        return Draft.pack(chain(each.tokens, each.survival, source=self.source) for each in drafted)

    def trees(self, seqs: list[Sequence], budget: list[int], width: int, depth: int) -> Draft:
        """Level by level: the `width` likeliest nodes of each get `width` children; the best `budget` are kept."""
        grown = [Growth(seq, k) for seq, k in zip(seqs, budget, strict=True)]
        for growth, row in zip(grown, self._feed(seqs), strict=True):
            self._branch(growth, -1, row, width)
        frontier = [(g, list(range(len(g.tokens)))) for g in grown]
        for _ in range(depth - 1):
            chosen = [(g, self._worth_feeding(g, nodes, width)) for g, nodes in frontier]
            chosen = [(g, nodes) for g, nodes in chosen if nodes]
            if not chosen:
                break
            rows = iter(self._run(chosen))
            frontier = [(g, [c for n in nodes for c in self._branch(g, n, next(rows), width)]) for g, nodes in chosen]
        return Draft.pack(self._best(g) for g in grown)

    def _record(self, recorded: RecordedChains, seqs: list[Sequence], budget: list[int]) -> Draft:
        """The same with all passes in one graph on the device; the host reads no token."""
        self._catch_up_together(seqs)
        for seq, room in zip(seqs, budget, strict=True):
            self._hold(seq, len(seq.tokens))
            self._keep(seq, range(room - 1))
        return recorded.draft(seqs, budget)

    def _catch_up_together(self, seqs: list[Sequence]) -> None:
        """Feed what the plane lacks, all but the tokens that the draft itself begins with, CHUNK rows at a time."""
        packed = BatchBuilder(self.cache)
        for seq in seqs:
            start, stop = self.cache.sync(seq, self.plane), len(seq.tokens) - self.again
            while start < stop:
                end = min(stop, start + CHUNK - len(packed.tokens))
                packed.pending(seq, start, end, want=False)
                start = end
                if len(packed.tokens) == CHUNK:
                    self._read(packed)
                    packed = BatchBuilder(self.cache)
        if packed.tokens:
            self._read(packed)

    # ------------------------------------------------------------ choosing

    def _goes_on(self, growth: Growth) -> bool:
        """Whether one more token at the end of this chain may be worth a pass.

        Only under `match`: where tokens are drawn from q, the length must not depend on the draw.
        """
        return growth.seq.rule != "match" or growth.survival[-1] >= self.stop_below

    def _extend(self, growth: Growth, logits: Tensor) -> None:
        """One more token at the end of a chain. logits [V]."""
        seq, last = growth.seq, len(growth.tokens) - 1
        if seq.rule == "match":
            token, confidence = self._choices(growth, last, logits, 1)[0]
        else:
            q = self._distribution(logits, seq, growth.tokens)
            token = draw(q, key(seq.seed, len(growth.tokens), DRAFT, len(seq.tokens)))
            confidence = float(q[token])
            growth.q.append(q)
        growth.add(token, last, confidence)

    def _branch(self, growth: Growth, node: int, logits: Tensor, width: int) -> list[int]:
        children = self._choices(growth, node, logits, width)
        return [growth.add(token, node, confidence) for token, confidence in children]

    def _records_guesses(self, seq: Sequence) -> bool:
        """Only under `match`: elsewhere q is the distribution, and no ranking under noise describes it."""
        return (self.record_guesses or seq.shows_logits) and seq.rule == "match"

    def _choices(self, growth: Growth, node: int, logits: Tensor, width: int) -> Ranking:
        """The likeliest tokens after a node, best first; alternatives are recorded where requested."""
        seq, emitted = growth.seq, [growth.tokens[n] for n in growth.path(node)]
        if not self._records_guesses(seq):
            return self._ranked(logits, seq, emitted, width)
        if seq.params.greedy:  # ranking more takes longer, so it is deferred until after the timed step
            snapshot = replace(seq)  # with a copy of its tokens: the sequence itself grows
            growth.guesses[node] = partial(self._ranked, logits.clone(), snapshot, emitted, GUESSES)
            return self._ranked(logits, seq, emitted, width)
        best = self._ranked(logits, seq, emitted, width, max(GUESSES - width, 0))  # noise was computed for them anyway
        growth.guesses[node] = partial(list, best[:GUESSES])
        return best[:width]

    def _ranked(self, logits: Tensor, seq: Sequence, emitted: list[int], width: int, spare: int = 0) -> Ranking:
        return ranked(logits, seq, emitted, width, spare)

    def _distribution(self, logits: Tensor, seq: Sequence, emitted: list[int]) -> Tensor:
        return distribution(logits, seq, emitted)

    def _worth_feeding(self, growth: Growth, nodes: list[int], width: int) -> list[int]:
        """The likeliest nodes of a level, as many as there are spare slots left for."""
        room = min(width, len(self.cache.spare(growth.seq)) - len(growth.spare))
        nodes = [n for n in nodes if growth.survival[n] >= self.stop_below]
        return sorted(heapq.nlargest(max(room, 0), nodes, key=lambda n: growth.survival[n]))

    def _best(self, growth: Growth) -> Tree:
        """The likeliest nodes, best first. A child never survives more often than its parent, so this is a tree."""
        order = sorted(range(len(growth.tokens)), key=lambda n: (-growth.survival[n], n))[: growth.budget]
        number = {node: i for i, node in enumerate(order)} | {-1: -1}
        # The engine expects node i in spare slot i: only K/V that happens to be there can be kept.
        self._keep(growth.seq, (index for node, index in growth.spare.items() if number.get(node) == index))
        return Tree(
            [growth.tokens[n] for n in order],
            [number[growth.parents[n]] for n in order],
            [growth.survival[n] for n in order],
            None,
            self.source,
            {number[n]: guess for n, guess in growth.guesses.items() if n in number} or None,
        )

    # ------------------------------------------------------------ running

    def _feed(self, seqs: list[Sequence]) -> Tensor:
        """Bring the plane up to date with every sequence; logits after each one's last token. [B, V]"""
        logits = self._forward(self._lacking(seqs), self.part)
        for seq in seqs:
            self._hold(seq, len(seq.tokens))
        return logits

    def _lacking(self, seqs: list[Sequence]) -> BatchBuilder:
        """The last tokens of each sequence that the plane lacks, at least one; those before are fed."""
        starts = [catch_up(self.cache, self.plane, seq, self._read) for seq in seqs]
        packed = BatchBuilder(self.cache)
        for seq, start in zip(seqs, starts, strict=True):
            packed.pending(seq, start, len(seq.tokens), want=True)
        return packed

    def _read(self, packed: BatchBuilder) -> None:
        """A pass that writes K/V only."""
        self._forward(packed, replace(self.part, head=False))

    def _forward(self, packed: BatchBuilder, part: Part) -> Tensor:
        """Logits of the wanted rows [R, V], on the host."""
        if self.passes is not None:
            return widened(self.passes.logits(packed, part).cpu(), self.model.config.vocab_size)
        return widened(self.model.forward(rows_of(packed), self.plane, part).logits, self.model.config.vocab_size)

    def _run(self, batch: list[tuple[Growth, list[int]]]) -> Tensor:
        """Feed these nodes, each seeing its own ancestors; logits after each. [sum of nodes, V]"""
        packed = BatchBuilder(self.cache)
        for growth, nodes in batch:
            for node in nodes:
                growth.spare[node] = len(growth.spare)
            packed.nodes(growth.seq, growth.tokens, growth.parents, nodes, growth.spare)
        return self._forward(packed, self.part)

    def _hold(self, seq: Sequence, tokens: int) -> None:
        """The plane now holds this many tokens of the sequence."""
        if self.keeps_kv:
            self.plane.advance(seq.id, tokens)

    def _keep(self, seq: Sequence, nodes: Iterable[int]) -> None:
        """The plane holds these drafted nodes in the spare slots in which the engine expects them."""
        if self.keeps_kv:
            self.plane.wrote(seq.id, nodes)


class DraftVocabularyRollout(Rollout):
    """A rollout whose scores cover a draft vocabulary [D] instead of the target's [V]."""

    def __init__(self, network: DraftVocabulary, model: Any, cache: Cache, plane: Any, source: str = "") -> None:
        super().__init__(model, cache, plane, source=source)
        self.network = network
        self.floors: Listing[float] = (0.0,)  # survival below which a chain of 1, 2, … tokens, or of more, ends

    def _goes_on(self, growth: Growth) -> bool:
        floor = self.floors[min(len(growth.tokens), len(self.floors)) - 1]
        above = growth.seq.rule != "match" or growth.survival[-1] >= floor
        return above and super()._goes_on(growth)

    def _ranked(self, logits: Tensor, seq: Sequence, emitted: list[int], width: int, spare: int = 0) -> Ranking:
        """As `sampling.ranked`; scores [D] are not spread over [V] where nothing depends on the other ids."""
        if seq.params.plain and width + spare == 1:
            return self._likeliest(logits[None])
        if seq.params.plain:
            confidence, index = torch.softmax(logits, -1).topk(min(width + spare, logits.shape[-1]))
            choices = list(zip(self.network.ids[index].tolist(), confidence.tolist(), strict=True))
        else:
            choices = ranked(self.network.spread(logits), seq, emitted, width, spare)
        return [choices[0], *(choice for choice in choices[1:] if choice[1] > 0)]

    def _likeliest(self, rows: Tensor) -> Ranking:
        """The best token of each row of scores [R, D], with its probability."""
        indices, shares = ops.top_shares(rows)
        return list(zip(self.network.ids[indices].tolist(), shares.tolist(), strict=True))

    def _distribution(self, logits: Tensor, seq: Sequence, emitted: list[int]) -> Tensor:
        return distribution(self.network.spread(logits), seq, emitted)


def path_to(node: int, parents: list[int]) -> list[int]:
    """The nodes from the root's child down to this node."""
    nodes: list[int] = []
    while node >= 0:
        nodes.append(node)
        node = parents[node]
    return nodes[::-1]


def draft_vocab(space: Any, size: int) -> int | None:
    """The option of that name: only so many of the first ids are drafted; None: all `size` of them."""
    vocab = int(space.option("draft_vocab", default=0)) or None
    if vocab is not None and not 0 < vocab <= size:
        raise ConfigError(f"draft_vocab is {vocab}, but it must be between 1 and {size}, or 0 for all.")
    return vocab


def catch_up(cache: Cache, plane: Plane, seq: Sequence, run: Callable[[BatchBuilder], object]) -> int:
    """Feed all but the last chunk of what the plane lacks; returns where the rest begins (never past the end)."""
    start = min(cache.sync(seq, plane), len(seq.tokens) - 1)
    while len(seq.tokens) - start > CHUNK:
        packed = BatchBuilder(cache)
        packed.pending(seq, start, start + CHUNK, want=False)
        run(packed)
        start += CHUNK
        plane.advance(seq.id, start)
    return start
