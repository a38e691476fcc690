"""The drafter `layerskip`: the target without some of its blocks; no second model, no extra memory.

It reads the target's exact K/V of all committed tokens and writes scratch K/V of the root and the drafted nodes into
slots that the verifying pass overwrites before they are read. How many blocks can be skipped differs much between
models: `outrider tune` searches the set for a target and stores it, and it is loaded here; without one, a few middle
layers are skipped. The set is refined while serving.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...errors import ConfigError
from ...models.tuning_profile import noted
from ...types import Draft, Sequence, Step
from .. import Drafter, DraftRequest, Traits, Workspace, register
from .._rollout import Rollout, draft_vocab
from .refine import Refinement
from .search import NOTE, Skip

REFINE_SHARE = 0.02  # of the time
SETS = ("skip_layers", "skip_attention", "skip_mlp")


class ScratchRollout(Rollout):
    """A rollout in the target's own plane."""

    again = 1  # what is committed must stay as the target wrote it
    keeps_kv = False


@register("layerskip")
class LayerSkip(Drafter):
    """Options: skip_layers, skip_attention, skip_mlp (lists of layer numbers), draft_vocab (draft only
    the first so many ids), refine, tree, tree_width, tree_depth."""

    traits = Traits(options=(*SETS, "draft_vocab", "refine", "tree", "tree_width", "tree_depth"))

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        skip, passes = _skip(space), space.passes(space.target, space.plane)
        self.rollout = ScratchRollout(
            space.target, space.cache, space.plane, skip.part, source="layerskip", passes=passes
        )
        self.rollout.record_guesses = space.record_guesses
        # A target without single layers skips whole layers: sets of single blocks are not worth trying.
        share = _refine_share(space) if space.target.has_layers else 0.0
        # Captured passes would have to be recorded again for every set: there the set is fixed.
        self.refinement = Refinement(space, skip, share) if share and passes is None else None
        self.tree = bool(space.option("tree", default=False))
        self.width = int(space.option("tree_width", default=3))
        self.depth = int(space.option("tree_depth", default=4))
        self.unread: Any = None  # the device's drafts, where its rounds make them

    def record(self, rounds: Any) -> None:
        if not self.tree:
            self.unread = rounds.draft_with(
                self.rollout.model, self.rollout.plane, self.rollout.part, self.rollout.again, self.name
            )
            self.traits = self.traits.in_rounds(rounds.calls)

    def draft(self, request: DraftRequest) -> Draft:
        if request.in_round:
            return request.asked(self.unread, self.name)
        # Drafting reads the target's K/V, which is incomplete while a prompt is pending.
        plane = self.space.plane
        ready = [i for i, seq in enumerate(request.seqs) if plane.holds(seq.id) == len(seq.tokens) - 1]
        return request.answer(ready, self._roll_out)

    def _roll_out(self, request: DraftRequest) -> Draft:
        self.rollout.stop_below = request.stop_below
        if self.tree and all(seq.rule == "match" for seq in request.seqs):
            return self.rollout.trees(request.seqs, request.budgets, self.width, self.depth)
        return self.rollout.chains(request.seqs, request.budgets)

    def observe(self, step: Step) -> None:
        if self.refinement is not None and self.refinement.observe(step):
            self.rollout.part = self.refinement.skip.part

    def end(self, seq: Sequence) -> None:
        if self.refinement is not None:
            self.refinement.end(seq)


def _skip(space: Workspace) -> Skip:
    """The set in the options, else the one that was searched for this target, else a few middle layers."""
    config = space.target.config
    layers, attention, mlp = (frozenset(int(i) for i in space.option(name, default=())) for name in SETS)
    vocab = draft_vocab(space, config.vocab_size)
    if space.options.keys().isdisjoint(SETS):
        searched = _searched(space)
        if searched is not None:
            return searched if vocab is None else replace(searched, vocab=vocab)
        layers = middle_layers(config.layers)
    skip = Skip(layers | attention, layers | mlp, vocab)
    for number in skip.attention | skip.mlp:
        if not 0 <= number < config.layers:
            raise ConfigError(f"Layer {number} cannot be skipped: the target's layers are 0 to {config.layers - 1}.")
    return skip


def middle_layers(layers: int) -> frozenset[int]:
    """A few layers in the middle, the default without a search."""
    return frozenset(range(layers // 3, layers - layers // 4, max(2, layers // 6)))


def _searched(space: Workspace) -> Skip | None:
    """The set that `outrider tune` stored for this target, on any device; None if it is missing or damaged."""
    identity, config = space.target.identity(), space.target.config
    facts = noted(NOTE, identity) if identity is not None else {}
    try:
        vocab = int(facts.get("draft_vocab") or config.vocab_size)
        skip = Skip(frozenset(facts["skip_attention"]), frozenset(facts["skip_mlp"]), vocab)
    except (KeyError, TypeError, ValueError):
        return None
    if vocab >= config.vocab_size:
        skip = replace(skip, vocab=None)
    return skip if skip.attention | skip.mlp <= frozenset(range(config.layers)) and vocab > 0 else None


def _refine_share(space: Workspace) -> float:
    """The share of the time for refining the set: `refine` is a share, true or false."""
    refine = space.option("refine", default=True)
    share = REFINE_SHARE * refine if isinstance(refine, bool) else float(refine)
    if not 0 <= share <= 0.5:
        raise ConfigError(f"refine is {refine!r}, but it must be true, false or a share of the time from 0 to 0.5.")
    return share
