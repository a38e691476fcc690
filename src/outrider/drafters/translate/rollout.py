"""Drafts with a model that has another tokenizer than the target, in one of two translation modes (arXiv 2502.05202).

*Token-level intersection* (tli): the draft model may choose only tokens that both vocabularies have. Its logits are
moved to the target's ids, and tokens are chosen there under the sequence's parameters, guide and noise, as with a
common vocabulary. Trees, q and every rule work.

*String-level exact match* (slem): the draft model chooses any token, and the text is encoded in target tokens
afterwards. Choices follow the same parameters and noise as far as possible: a draft token counts as the target token
that it begins with. Chains only, without q. A text may end within what the draft model has as one token; then that
token may be drafted in place of the last one, and the rest of it is new.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...backends import WHOLE, Model
from ...engine.batch import BatchBuilder
from ...engine.sampling import DRAFT, distribution, draw, key, ranked
from ...errors import ConfigError
from ...types import Draft, Sequence, Tree, chain
from .. import Workspace
from .._rollout import Growth, Rollout, catch_up
from .alignment import NONE, MappedText, RetokenisedText, TokenizerPair, Translation, align, byte_ends, bytes_of
from .draft_cache import SPARE, DraftCache, DraftSequence, DraftSequences

TLI_SHARE = 0.9  # of the target's tokens that the draft model must have for tli, which can propose no others
TINY = 1e-30  # in place of probability 0, whose logarithm is ten times slower
TOKENS_PER_TARGET_TOKEN = 2  # draft tokens, at most


class TranslatedRollout(Rollout):
    """Common to both modes: draft sequences in a cache of their own, drafted for like any other sequence."""

    mode: str
    translation: type[Translation]
    nodes_per_token = 1  # draft tokens that may be drafted for each target token
    draft_ids: Tensor  # [C] draft ids that may be chosen
    target_ids: Tensor  # [C] the target id that each stands for

    def __init__(self, model: Model, space: Workspace, pair: TokenizerPair) -> None:
        slots, lines = space.cache.slots, space.cache.table.shape[0]
        length = min(max_length(model), TOKENS_PER_TARGET_TOKEN * space.cache.length)
        cache = DraftCache(max(slots, length + SPARE), lines, length, model.device)
        plane = cache.add_plane(*model.plane_shape)
        super().__init__(model, cache, plane, WHOLE, "model")
        self.passes = space.passes(model, plane, cache)  # one captured pass at a time: the host chooses tokens
        self.pair = pair
        self.target_size = len(pair.alignment.to_draft)  # V
        self.sequences = DraftSequences(cache, plane, lambda: self.translation(pair))
        self.current: dict[int, DraftSequence] = {}  # by sequence id, in this draft

    def propose(self, seqs: list[Sequence], budget: list[int], width: int = 0, depth: int = 0) -> Draft:
        """Trees if width > 0, else chains; empty for sequences that there is no room for."""
        drafts = self.sequences.sync(seqs, [self.nodes_per_token * k for k in budget])
        self.current = {draft.seq.id: draft for draft in drafts if draft is not None}
        ready = [i for i, draft in enumerate(drafts) if draft is not None and self.draft_ids.numel()]
        trees = [Tree([], [])] * len(seqs)
        if ready:
            own, budgets = [self.current[seqs[i].id].seq for i in ready], [budget[i] for i in ready]
            draft = self.trees(own, budgets, width, depth) if width else self.chains(own, budgets)
            for i, tree in zip(ready, draft.trees, strict=True):
                trees[i] = self._translated(self.current[seqs[i].id], tree)
        return Draft.pack(trees)

    def _translated(self, draft: DraftSequence, tree: Tree) -> Tree:
        """The tree in target tokens."""
        return tree

    def _forward(self, packed: Any, part: Any) -> Tensor:
        return super()._forward(packed, part).cpu()

    def facts(self) -> dict[str, Any]:
        """Mode and alignment, for statistics and traces."""
        alignment = self.pair.alignment
        return {
            "translate": self.mode,
            "shared_tokens": alignment.shared,
            "target_share": round(alignment.target_share, 4),
            "draft_share": round(alignment.draft_share, 4),
        }


class IntersectionRollout(TranslatedRollout):
    """tli: only tokens that both vocabularies have."""

    mode, translation = "tli", MappedText

    def __init__(self, model: Model, space: Workspace, pair: TokenizerPair) -> None:
        super().__init__(model, space, pair)
        self.draft_ids, self.target_ids = pair.alignment.pairs
        self.to_draft = dict(zip(self.target_ids.tolist(), self.draft_ids.tolist(), strict=True))
        self.to_target = dict(zip(self.draft_ids.tolist(), self.target_ids.tolist(), strict=True))

    def _translated(self, draft: DraftSequence, tree: Tree) -> Tree:
        draft.last = tree
        return tree._replace(tokens=[self.to_target[i] for i in tree.tokens])

    def _target_logits(self, logits: Tensor) -> tuple[Tensor, float]:
        """Draft logits [D] over the target's ids [V], and the probability mass that both vocabularies share."""
        logits = logits.float()
        moved = torch.full((self.target_size,), -math.inf)
        moved[self.target_ids] = logits[self.draft_ids]
        return moved, float(torch.softmax(logits, -1)[self.draft_ids].sum())

    def _in_target(self, seq: Sequence, emitted: list[int]) -> tuple[Sequence, list[int]]:
        return self.current[seq.id].origin, [self.to_target[i] for i in emitted]

    def _ranked(
        self, logits: Tensor, seq: Sequence, emitted: list[int], width: int, spare: int = 0
    ) -> list[tuple[int, float]]:
        moved, mass = self._target_logits(logits)
        best = ranked(moved, *self._in_target(seq, emitted), width, spare)
        return [(self.to_draft[i], mass * chance) for i, chance in best if chance > 0 and i in self.to_draft]

    def _extend(self, growth: Growth, logits: Tensor) -> None:
        last = len(growth.tokens) - 1
        if growth.seq.rule == "match":
            best = self._ranked(logits, growth.seq, growth.tokens, 1)
            if best:
                growth.add(best[0][0], last, best[0][1])
            else:
                growth.budget = len(growth.tokens)  # no common token is possible here
            return
        origin, emitted = self._in_target(growth.seq, growth.tokens)
        q = distribution(self._target_logits(logits)[0], origin, emitted)  # [V]
        token = draw(q, key(origin.seed, len(emitted), DRAFT, len(origin.tokens)))
        if token in self.to_draft:
            growth.q.append(q)
            growth.add(self.to_draft[token], last, float(q[token]))
        else:
            growth.budget = len(growth.tokens)


@dataclass
class RetokenisedGrowth(Growth):
    """A chain in draft tokens, and its translation so far."""

    target_tokens: list[int] = field(default_factory=list)
    target_budget: int = 0
    overlap: bytes = b""  # the last bytes of the committed text, which the chain repeats
    ended: bool = False  # a control token was drafted: nothing follows it


class RetokenisedRollout(TranslatedRollout):
    """slem: any draft token; the text is encoded in target tokens."""

    mode, translation, nodes_per_token = "slem", RetokenisedText, TOKENS_PER_TARGET_TOKEN

    def __init__(self, model: Model, space: Workspace, pair: TokenizerPair) -> None:
        super().__init__(model, space, pair)
        self.draft_ids = torch.nonzero(pair.alignment.begins != NONE).flatten()
        self.target_ids = pair.alignment.begins[self.draft_ids]

    def chains(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        pairs = zip(seqs, budget, strict=True)
        live = grown = [RetokenisedGrowth(seq, self.nodes_per_token * k, target_budget=k) for seq, k in pairs]
        for growth, (before, last) in zip(grown, self._feed_last_two(seqs), strict=True):
            self._start(growth, before, last)
        while live := [g for g in live if len(g.tokens) < g.budget and self._goes_on(g)]:
            logits = self._run([(g, [len(g.tokens) - 1]) for g in live])  # [B, D]
            for growth, row in zip(live, logits, strict=True):
                self._extend(growth, row)
        for growth in grown:
            self._keep(growth.seq, growth.spare)
        return Draft.pack(self._chain(growth) for growth in grown)

    def trees(self, seqs: list[Sequence], budget: list[int], width: int, depth: int) -> Draft:
        return self.chains(seqs, budget)

    def _goes_on(self, growth: Growth) -> bool:
        assert isinstance(growth, RetokenisedGrowth)
        complete = growth.ended or len(growth.target_tokens) >= growth.target_budget
        return not complete and super()._goes_on(growth)

    def _feed_last_two(self, seqs: list[Sequence]) -> list[tuple[Tensor | None, Tensor]]:
        """Logits [D] after each sequence's last token but one (None if it has only one), and after its last."""
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

    def _start(self, growth: RetokenisedGrowth, before: Tensor | None, last: Tensor) -> None:
        """The first draft token: after the last one, or a longer one that the target lacks in place of it.

        The distribution of the next target token mixes both: the tokens after the last one, with the probability of the
        last one against the longer ones, and the rests of the longer ones. Logits before and after the last token: [D].
        """
        draft = self.current[growth.seq.id]
        assert isinstance(draft.translation, RetokenisedText)
        growth.overlap, token = draft.translation.incomplete, growth.seq.tokens[-1]
        text = b"" if self.pair.draft.is_special(token) else self.pair.draft.id_to_bytes(token)
        longer, rests = self.pair.alignment.longer.of(text)  # [E] each
        if before is None or growth.overlap or not longer.numel():
            return self._extend(growth, last)
        q = torch.softmax(before.float(), -1)  # [D]
        whole = q[token] + q[longer].sum()
        after = torch.softmax(last.float(), -1)[self.draft_ids] * (q[token] / whole)  # [C]
        after = torch.zeros(self.target_size).index_add_(0, self.target_ids, after)  # [V]
        instead = torch.zeros(self.target_size).index_add_(0, rests, q[longer] / whole)  # [V]
        best = ranked((after + instead).clamp_min(TINY).log(), draft.origin, [], 1)
        if not best or not instead[best[0][0]] > after[best[0][0]]:
            return self._extend(growth, last)
        alike = longer[rests == best[0][0]]
        growth.overlap, growth.seq.tokens = text, growth.seq.tokens[:-1]
        assert isinstance(self.cache, DraftCache)
        self.cache.trim(growth.seq, len(growth.seq.tokens))
        growth.add(int(alike[q[alike].argmax()]), -1, best[0][1])
        growth.target_tokens = self._retokenised(growth)
        return None

    def _extend(self, growth: Growth, logits: Tensor) -> None:
        """One more draft token: the likeliest of those that begin with the target token that would be chosen."""
        assert isinstance(growth, RetokenisedGrowth)
        best_of = torch.full((self.target_size,), -math.inf)  # [V] the best draft token that begins with each
        best_of.scatter_reduce_(0, self.target_ids, logits.float()[self.draft_ids], "amax")
        best = ranked(best_of, self.current[growth.seq.id].origin, growth.target_tokens, 1)
        alike = self.draft_ids[self.target_ids == best[0][0]] if best else self.draft_ids[:0]
        if not alike.numel():
            growth.budget = len(growth.tokens)
            return
        token = int(alike[logits[alike].argmax()])
        growth.add(token, len(growth.tokens) - 1, best[0][1])
        if self.pair.draft.is_special(token):
            growth.target_tokens, growth.ended = [*growth.target_tokens, best[0][0]], True
        else:
            growth.target_tokens = self._retokenised(growth)

    def _retokenised(self, growth: RetokenisedGrowth) -> list[int]:
        drafted = bytes_of(self.pair.draft, growth.tokens)
        return self.pair.to_target(self.current[growth.seq.id].origin.tokens, growth.overlap, drafted)

    def _chain(self, growth: RetokenisedGrowth) -> Tree:
        """The chain in target tokens; each survives as often as the draft token that its last byte belongs to."""
        self.current[growth.seq.id].last = Tree(growth.tokens, growth.parents)
        drafted = byte_ends(self.pair.draft, growth.tokens)
        survival, at = [], 0
        for end in byte_ends(self.pair.target, growth.target_tokens, len(growth.overlap)):
            while at < len(drafted) - 1 and drafted[at] < end:
                at += 1
            survival.append(growth.survival[at])
        k = growth.target_budget
        return chain(growth.target_tokens[:k], survival[:k], source=self.source)


def max_length(model: Model) -> int:
    """Positions that a model can run."""
    table = getattr(model, "cos", None)
    length = model.config.context_length
    return length if table is None else min(length, int(table.shape[0]))


MODES: dict[str, type[TranslatedRollout]] = {"tli": IntersectionRollout, "slem": RetokenisedRollout}


def make_rollout(model: Model, space: Workspace, tokenizer: Any) -> TranslatedRollout:
    """A rollout in the mode of the option `translate`; `auto` chooses by the share of common tokens."""
    alignment = align(tokenizer, space.tokenizer, model.config.vocab_size, space.target.config.vocab_size)
    mode = str(space.option("translate", default="auto"))
    if mode == "auto":
        mode = "tli" if alignment.target_share >= TLI_SHARE else "slem"
    if mode not in MODES:
        raise ConfigError(f"There is no translation mode '{mode}'. Choose one of: auto, {', '.join(MODES)}.")
    return MODES[mode](model, space, TokenizerPair(tokenizer, space.tokenizer, alignment))
