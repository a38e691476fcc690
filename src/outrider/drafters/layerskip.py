"""The target drafts for itself with some of its blocks left out: no second model, no memory.

It reads the target's exact K/V for everything committed and writes scratch K/V for the root and the drafted nodes into
places that the verifying pass overwrites before anybody reads them (Draft & Verify, SWIFT). How many blocks a model
can spare without losing its thread differs much from model to model; the default leaves out a few in the middle.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import ConfigError
from ..models import Part
from ..types import Draft, Sequence, Tree
from . import Drafter, Workspace, register
from ._rollout import Rollout


class Scratch(Rollout):
    """A rollout in the target's own plane: it claims nothing, because verification will write there."""

    again = 1  # what is committed must stay as the target wrote it

    def _hold(self, seq: Sequence, tokens: int) -> None:
        pass

    def _keep(self, seq: Sequence, nodes: Iterable[int]) -> None:
        pass


@register("layerskip")
class LayerSkip(Drafter):
    """Options: skip_layers, skip_attention, skip_mlp (lists of layer numbers), tree, tree_width, tree_depth."""

    takes = ("skip_layers", "skip_attention", "skip_mlp", "tree", "tree_width", "tree_depth")

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        layers = space.target.config.layers
        part = Part(skip_attention=_skipped(space, "skip_attention"), skip_mlp=_skipped(space, "skip_mlp"))
        for number in part.skip_attention | part.skip_mlp:
            if not 0 <= number < layers:
                raise ConfigError(f"Layer {number} cannot be skipped: the target's layers are 0 to {layers - 1}.")
        passes = space.passes(space.target, space.plane)
        self.rollout = Scratch(space.target, space.cache, space.plane, part, source="layerskip", passes=passes)
        self.tree = bool(space.option("tree", default=False))
        self.width = int(space.option("tree_width", default=3))
        self.depth = int(space.option("tree_depth", default=4))

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        # Drafting leans on the target's K/V: where a prompt is still pending, there is nothing to lean on yet.
        held = self.space.plane.held
        ready = [i for i, seq in enumerate(seqs) if held.get(seq.id, 0) == len(seq.tokens) - 1]
        trees, unread = [Tree([], [])] * len(seqs), None
        if ready:
            draft = self._roll([seqs[i] for i in ready], [budget[i] for i in ready])
            unread = draft.unread
            for i, tree in zip(ready, draft.trees, strict=True):
                trees[i] = tree
        return Draft.pack(trees, unread)

    def _roll(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        if self.tree and all(seq.rule == "match" for seq in seqs):
            return self.rollout.trees(seqs, budget, self.width, self.depth)
        return self.rollout.chains(seqs, budget)


def _skipped(space: Workspace, kind: str) -> frozenset[int]:
    both = space.option("skip_layers", default=None)
    own = space.option(kind, default=None)
    if both is None and own is None and not space.options.keys() & {"skip_attention", "skip_mlp"}:
        layers = space.target.config.layers
        both = range(layers // 3, layers - layers // 4, max(2, layers // 6))
    return frozenset(int(number) for number in (*(both or ()), *(own or ())))
