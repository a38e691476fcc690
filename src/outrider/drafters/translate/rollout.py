"""Drafting with a model that has another tokenizer than the target.

Two ways. *Token-level intersection* (TLI): the draft model may say only what both vocabularies have, so each of its
tokens is one of the target's; logits are carried over to the target's ids, and choices are made there, under the
sequence's parameters, its guide and its noise, exactly as with a common vocabulary. Trees, q and every rule work.
*String-level exact match* (SLEM): the draft model says what it likes, and the text is spelled in the target's tokens
afterwards. Its choices follow the same parameters and noise as far as they can: a draft token counts as the target
token that it begins with. Chains only, without q. (Both: arXiv 2502.05202.) A text may end within what the draft model
knows as one token; such a token may then be drafted in place of the last one, and the rest of it is what is new.

Neither can change the text: what comes out is a draft like any other.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...backends import WHOLE, Model
from ...engine.batch import BatchBuilder
from ...engine.sampling import DRAFT, draw, key, law, ranked
from ...errors import ConfigError
from ...types import Draft, Sequence, Tree, chain
from .. import Workspace
from .._rollout import Growth, Rollout, catch_up
from .alignment import NONE, Dictionary, Words, bytes_of, dictionary
from .draft_cache import SPARE, Shadow, ShadowCache, Shadows
from .retokenise import Mapped, Pair, Retold, ends_of

WAYS = ("auto", "tli", "slem")
ENOUGH = 0.9  # of the target's tokens must be the draft model's for TLI: it can propose no others
NEVER = 1e-30  # a chance that is none; the logarithm of zero takes ten times as long
LONGER = 2  # draft tokens for each target token, at most


class Translated(Rollout, ABC):
    """What both ways have in common: shadows, drafted for as if they were sequences."""

    way = ""
    drafts: Tensor  # [C] draft ids that may be said

    def __init__(self, model: Model, space: Workspace, pair: Pair) -> None:
        slots, lines = space.cache.slots, space.cache.table.shape[0]
        length = min(longest_of(model), LONGER * space.cache.length)
        cache = ShadowCache(max(slots, length + SPARE), lines, length, model.device)
        plane = cache.add_plane(*model.plane_shape)
        super().__init__(model, cache, plane, WHOLE, "model")
        self.passes = space.passes(model, plane, cache)  # one captured pass at a time: choices are the host's
        self.pair = pair
        self.shadows = Shadows(cache, plane, self._context)
        self.of: dict[int, Shadow] = {}  # by sequence, in this draft

    @abstractmethod
    def _context(self) -> Any:
        """What a new shadow reads a text with."""

    def nodes_for(self, budget: int) -> int:
        """How many draft tokens may be drafted for so many target tokens."""
        return budget

    def propose(self, seqs: list[Sequence], budget: list[int], width: int = 0, depth: int = 0) -> Draft:
        """Trees with a width, else chains; empty for sequences that there is no room for."""
        shadows = self.shadows.follow(seqs, [self.nodes_for(k) for k in budget])
        self.of = {shadow.seq.id: shadow for shadow in shadows if shadow is not None}
        at = [i for i, shadow in enumerate(shadows) if shadow is not None and self.drafts.numel()]
        trees = [Tree([], [])] * len(seqs)
        if at:
            told, room = [self.of[seqs[i].id].seq for i in at], [budget[i] for i in at]
            draft = self.trees(told, room, width, depth) if width else self.chains(told, room)
            for i, tree in zip(at, draft.trees, strict=True):
                trees[i] = self._translated(self.of[seqs[i].id], tree)
        return Draft.pack(trees)

    @abstractmethod
    def _translated(self, shadow: Shadow, tree: Tree) -> Tree:
        """A tree of draft tokens as one of the target's."""

    def _forward(self, packed: Any, part: Any) -> Tensor:
        return super()._forward(packed, part).cpu()


class Intersection(Translated):
    """Only what both vocabularies have."""

    way = "tli"

    def __init__(self, model: Model, space: Workspace, pair: Pair) -> None:
        super().__init__(model, space, pair)
        self.drafts, self.targets = pair.known.pairs  # [C] each
        self.back = dict(zip(self.targets.tolist(), self.drafts.tolist(), strict=True))
        self.forth = dict(zip(self.drafts.tolist(), self.targets.tolist(), strict=True))
        self.size = len(pair.known.to_draft)  # V

    def _context(self) -> Mapped:
        return Mapped(self.pair)

    def _translated(self, shadow: Shadow, tree: Tree) -> Tree:
        shadow.drafted, shadow.parents = tree.tokens, tree.parents
        return tree._replace(tokens=[self.forth[i] for i in tree.tokens])

    def _wide(self, logits: Tensor) -> tuple[Tensor, float]:
        """Logits [D] over the target's ids [V], and how much of q can be said there at all."""
        logits = logits.float()
        wide = torch.full((self.size,), -math.inf)
        wide[self.targets] = logits[self.drafts]
        return wide, float(torch.softmax(logits, -1)[self.drafts].sum())

    def _said(self, seq: Sequence, emitted: list[int]) -> tuple[Sequence, list[int]]:
        return self.of[seq.id].origin, [self.forth[i] for i in emitted]

    def _ranked(
        self, logits: Tensor, seq: Sequence, emitted: list[int], width: int, spare: int = 0
    ) -> list[tuple[int, float]]:
        wide, inside = self._wide(logits)
        found = ranked(wide, *self._said(seq, emitted), width, spare)
        return [(self.back[i], inside * chance) for i, chance in found if chance > 0 and i in self.back]

    def _extend(self, growth: Growth, logits: Tensor) -> None:
        last = len(growth.tokens) - 1
        if growth.seq.rule == "match":
            found = self._ranked(logits, growth.seq, growth.tokens, 1)
            if found:
                growth.add(found[0][0], last, found[0][1])
            else:
                growth.budget = len(growth.tokens)  # there is nothing that both could say
            return
        origin, emitted = self._said(growth.seq, growth.tokens)
        q = law(self._wide(logits)[0], origin, emitted)  # [V]
        token = draw(q, key(origin.seed, len(emitted), DRAFT, len(origin.tokens)))
        if token in self.back:
            growth.q.append(q)
            growth.add(self.back[token], last, float(q[token]))
        else:
            growth.budget = len(growth.tokens)


@dataclass
class Telling(Growth):
    """A chain in the draft model's tokens, and what it is in the target's so far."""

    said: list[int] = field(default_factory=list)  # target ids
    enough: int = 0  # target tokens that were asked for
    half: bytes = b""  # what the target has said already, and the chain says once more
    over: bool = False  # a control token was drafted: nothing follows it


class Retelling(Translated):
    """Text for text."""

    way = "slem"

    def __init__(self, model: Model, space: Workspace, pair: Pair) -> None:
        super().__init__(model, space, pair)
        begins = pair.known.begins
        self.drafts = torch.nonzero(begins != NONE).flatten()  # [C] draft ids with a target token to begin with
        self.targets = begins[self.drafts]  # [C]
        self.size = len(pair.known.to_draft)  # V

    def _context(self) -> Retold:
        return Retold(self.pair)

    def nodes_for(self, budget: int) -> int:
        return LONGER * budget

    def chains(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        grown = [Telling(seq, self.nodes_for(k), enough=k) for seq, k in zip(seqs, budget, strict=True)]
        live = grown
        for growth, (before, last) in zip(grown, self._feed_ends(seqs), strict=True):
            self._begin(growth, before, last)
        while live := [g for g in live if len(g.tokens) < g.budget and self._goes_on(g)]:
            logits = self._run([(g, [len(g.tokens) - 1]) for g in live])  # [B, D]
            for growth, row in zip(live, logits, strict=True):
                self._extend(growth, row)
        for growth in grown:
            self._keep(growth.seq, growth.spare)
        return Draft.pack(self._told(growth) for growth in grown)

    def trees(self, seqs: list[Sequence], budget: list[int], width: int, depth: int) -> Draft:
        return self.chains(seqs, budget)

    def _translated(self, shadow: Shadow, tree: Tree) -> Tree:
        return tree

    def _goes_on(self, growth: Growth) -> bool:
        assert isinstance(growth, Telling)
        return not growth.over and len(growth.said) < growth.enough and super()._goes_on(growth)

    # ------------------------------------------------------------ where the target's last token ends

    def _feed_ends(self, seqs: list[Sequence]) -> list[tuple[Tensor | None, Tensor]]:
        """Logits after each sequence's last token, and after the one before it, where there is one. [D] each"""
        starts = [min(catch_up(self.cache, self.plane, seq, self._read), max(len(seq.tokens) - 2, 0)) for seq in seqs]
        packed = BatchBuilder(self.cache)
        for seq, start in zip(seqs, starts, strict=True):
            last = len(seq.tokens) - 1
            if last:
                packed.pending(seq, start, last, want=True)
            packed.pending(seq, last, last + 1, want=True)
        rows = iter(self._forward(packed, self.part))
        for seq in seqs:
            self._hold(seq, len(seq.tokens))
        return [(next(rows) if len(seq.tokens) > 1 else None, next(rows)) for seq in seqs]

    def _begin(self, growth: Telling, before: Tensor | None, last: Tensor) -> None:
        """The first draft token: after the last one, or instead of it, as a longer one that the target cannot say.

        What comes next has the law of both: as likely as the last token was against the longer ones, it is said after
        it; else it is the rest of one of those.
        """
        shadow = self.of[growth.seq.id]
        assert isinstance(shadow.context, Retold)
        growth.half, token = shadow.context.half, growth.seq.tokens[-1]
        begin = b"" if self.pair.draft.is_special(token) else self.pair.draft.id_to_bytes(token)
        longer, rests = self.pair.known.longer.of(begin)  # [E] each
        if before is None or growth.half or not longer.numel():
            return self._extend(growth, last)
        q = torch.softmax(before.float(), -1)  # [D]
        whole = q[token] + q[longer].sum()
        after = torch.softmax(last.float(), -1)[self.drafts] * (q[token] / whole)  # [C]
        after = torch.zeros(self.size).index_add_(0, self.targets, after)  # [V]
        instead = torch.zeros(self.size).index_add_(0, rests, q[longer] / whole)  # [V]
        found = ranked((after + instead).clamp_min(NEVER).log(), shadow.origin, [], 1)
        if not found or not instead[found[0][0]] > after[found[0][0]]:
            return self._extend(growth, last)
        alike = longer[rests == found[0][0]]
        growth.half, growth.seq.tokens = begin, growth.seq.tokens[:-1]
        assert isinstance(self.cache, ShadowCache)
        self.cache.trim(growth.seq, len(growth.seq.tokens))
        growth.add(int(alike[q[alike].argmax()]), -1, found[0][1])
        growth.said = self._retold(growth)
        return None

    # ------------------------------------------------------------ one token after another

    def _extend(self, growth: Growth, logits: Tensor) -> None:
        """One more draft token: the likeliest of those that begin with the target token that would be chosen."""
        assert isinstance(growth, Telling)
        wide = torch.full((self.size,), -math.inf)  # [V] each target token is as likely as the best that begins with it
        wide.scatter_reduce_(0, self.targets, logits.float()[self.drafts], "amax")
        found = ranked(wide, self.of[growth.seq.id].origin, growth.said, 1)
        alike = self.drafts[self.targets == found[0][0]] if found else self.drafts[:0]
        if not alike.numel():
            growth.budget = len(growth.tokens)
            return
        token = int(alike[logits[alike].argmax()])
        growth.add(token, len(growth.tokens) - 1, found[0][1])
        if self.pair.draft.is_special(token):
            growth.said, growth.over = [*growth.said, found[0][0]], True
        else:
            growth.said = self._retold(growth)

    def _retold(self, growth: Telling) -> list[int]:
        spelled = bytes_of(self.pair.draft, growth.tokens)
        return self.pair.in_target(self.of[growth.seq.id].origin.tokens, growth.half, spelled)

    def _told(self, growth: Telling) -> Tree:
        """The chain in target tokens; each is as sure as the draft token that its last byte belongs to."""
        shadow = self.of[growth.seq.id]
        shadow.drafted, shadow.parents = growth.tokens, growth.parents
        drafted = ends_of(self.pair.draft, growth.tokens)
        survival, at = [], 0
        for end in ends_of(self.pair.target, growth.said, len(growth.half)):
            while at < len(drafted) - 1 and drafted[at] < end:
                at += 1
            survival.append(growth.survival[at])
        return chain(growth.said[: growth.enough], survival[: growth.enough], source=self.source)


def longest_of(model: Model) -> int:
    """Positions that a model can be asked for."""
    table = getattr(model, "cos", None)
    known = model.config.context_length
    return known if table is None else min(known, int(table.shape[0]))


def translated(model: Model, space: Workspace, words: Words) -> Translated:
    """The rollout that suits these two vocabularies, or the one that was asked for."""
    known = dictionary(words, space.tokenizer, model.config.vocab_size, space.target.config.vocab_size)
    way = str(space.option("translate", default="auto"))
    if way not in WAYS:
        raise ConfigError(f"There is no way to translate called '{way}'. Choose one of: {', '.join(WAYS)}.")
    kind = {"tli": Intersection, "slem": Retelling}.get(way) or _suits(known)
    return kind(model, space, Pair(words, space.tokenizer, known))


def _suits(known: Dictionary) -> type[Translated]:
    return Intersection if known.target_share >= ENOUGH else Retelling


def facts(rollout: Translated) -> dict[str, Any]:
    """What is done about the two vocabularies, for people and programs."""
    known = rollout.pair.known
    return {
        "translate": rollout.way,
        "shared_tokens": known.shared,
        "target_share": round(known.target_share, 4),
        "draft_share": round(known.draft_share, 4),
    }
