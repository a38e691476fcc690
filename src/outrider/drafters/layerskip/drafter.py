"""The target drafts for itself with some of its blocks left out: no second model, no memory.

It reads the target's exact K/V for everything committed and writes scratch K/V for the root and the drafted nodes into
places that the verifying pass overwrites before anybody reads them (Draft & Verify, SWIFT). How many blocks a model
can spare without losing its thread differs much from model to model: `outrider tune` searches the set for a target,
which is then found here by itself; without one, a few in the middle are left out. While serving, the set is refined.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...errors import ConfigError
from ...models.tuning_profile import noted
from ...types import Draft, Sequence, Step
from .. import Drafter, DraftRequest, Traits, Workspace, register
from .._rollout import Rollout
from .refine import Refinement
from .search import NOTE, Skip

SHARE = 0.02  # of the time, for refining the set


class Scratch(Rollout):
    """A rollout in the target's own plane: it claims nothing, because verification will write there."""

    again = 1  # what is committed must stay as the target wrote it

    def _hold(self, seq: Sequence, tokens: int) -> None:
        pass

    def _keep(self, seq: Sequence, nodes: Iterable[int]) -> None:
        pass


@register("layerskip")
class LayerSkip(Drafter):
    """Options: skip_layers, skip_attention, skip_mlp (lists of layer numbers), draft_vocab (only the first so many ids
    are drafted), refine, tree, tree_width, tree_depth."""

    traits = Traits(
        options=(
            "skip_layers", "skip_attention", "skip_mlp", "draft_vocab", "refine", "tree", "tree_width", "tree_depth"
        )
    )  # fmt: skip

    def __init__(self, space: Workspace) -> None:
        self.space = space
        skip = _skip(space)
        passes = space.passes(space.target, space.plane)
        self.rollout = Scratch(space.target, space.cache, space.plane, skip.part, source="layerskip", passes=passes)
        self.rollout.record_guesses = space.record_guesses
        # Where layers are left out whole or not at all, half-skipped sets are not worth trying.
        share = _share(space) if space.target.has_layers else 0.0
        # Captured passes would have to be recorded anew for every set: there it stays as it is.
        self.refinement = Refinement(space, skip, share) if share and passes is None else None
        self.tree = bool(space.option("tree", default=False))
        self.width = int(space.option("tree_width", default=3))
        self.depth = int(space.option("tree_depth", default=4))

    def draft(self, request: DraftRequest) -> Draft:
        # Drafting reads the target's K/V: while a prompt is pending there is none to read.
        plane = self.space.plane
        ready = [i for i, seq in enumerate(request.seqs) if plane.holds(seq.id) == len(seq.tokens) - 1]
        return request.answer(ready, self._roll)

    def observe(self, step: Step) -> None:
        if self.refinement is not None and self.refinement.observe(step):
            self.rollout.part = self.refinement.skip.part

    def end(self, seq: Sequence) -> None:
        if self.refinement is not None:
            self.refinement.end(seq)

    def _roll(self, request: DraftRequest) -> Draft:
        self.rollout.stop_below = request.stop_below
        if self.tree and all(seq.rule == "match" for seq in request.seqs):
            return self.rollout.trees(request.seqs, request.budgets, self.width, self.depth)
        return self.rollout.chains(request.seqs, request.budgets)


def _skip(space: Workspace) -> Skip:
    """The set that was asked for, else the one that was searched for this target, else a few layers in the middle."""
    config = space.target.config
    asked = {name: _numbers(space, name) for name in ("skip_layers", "skip_attention", "skip_mlp")}
    vocab = int(space.option("draft_vocab", default=0)) or None
    if vocab is not None and not 0 < vocab <= config.vocab_size:
        raise ConfigError(f"draft_vocab is {vocab}, but it must be between 1 and {config.vocab_size}, or 0 for all.")
    if space.options.keys().isdisjoint(asked):
        found = _noted(space)
        if found is not None:
            return found if vocab is None else replace(found, vocab=vocab)
        asked["skip_layers"] = usual(config.layers)
    both = asked["skip_layers"]
    skip = Skip(both | asked["skip_attention"], both | asked["skip_mlp"], vocab)
    for number in skip.attention | skip.mlp:
        if not 0 <= number < config.layers:
            raise ConfigError(f"Layer {number} cannot be skipped: the target's layers are 0 to {config.layers - 1}.")
    return skip


def usual(layers: int) -> frozenset[int]:
    """A few layers in the middle, where nobody has searched."""
    return frozenset(range(layers // 3, layers - layers // 4, max(2, layers // 6)))


def _numbers(space: Workspace, name: str) -> frozenset[int]:
    return frozenset(int(number) for number in space.option(name, default=()))


def _noted(space: Workspace) -> Skip | None:
    """What `outrider tune` found for this very target, on whichever device."""
    identity = space.target.identity()
    facts = noted(NOTE, identity) if identity is not None else {}
    try:
        vocab = int(facts.get("draft_vocab") or space.target.config.vocab_size)
        skip = Skip(frozenset(facts["skip_attention"]), frozenset(facts["skip_mlp"]), vocab)
    except (KeyError, TypeError, ValueError):
        return None
    if vocab >= space.target.config.vocab_size:
        skip = replace(skip, vocab=None)
    known = frozenset(range(space.target.config.layers))
    return skip if skip.attention | skip.mlp <= known and vocab > 0 else None


def _share(space: Workspace) -> float:
    """Of the time, for refining the set: `refine` is a share, or true or false."""
    wish = space.option("refine", default=True)
    share = SHARE * wish if isinstance(wish, bool) else float(wish)
    if not 0 <= share <= 0.5:
        raise ConfigError(f"refine is {wish!r}, but it must be true, false or a share of the time from 0 to 0.5.")
    return share
