"""A trained head on the target's own features (EAGLE-3, or a block of masks filled in by one pass).

The head is a folder that `outrider train` wrote for this target and no other. It reads hidden states that verification
computes anyway, so that it needs a layer or two where a draft model needs many. Its K/V lives in the target's slots.
It keeps features only until they are fed; what it misses costs acceptance, never a word of the text.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...backends import Model
from ...backends.loaded_weights import embedding_of, weight_bytes
from ...errors import ConfigError
from ...models.speculators import random_head
from ...types import Draft, Sequence, Step
from .. import Drafter, DraftRequest, Memory, Traits, Workspace, register
from .._trained import insist_on_target, precision
from .features import Features, Kept
from .find import head_for
from .network import Head, read_head
from .pace import Pace
from .rollout import HeadRollout


class Begun(NamedTuple):
    """A draft that was started before anybody asked for it."""

    texts: list[tuple[int, int]]  # sequences, and their lengths: tokens are only ever added
    rooms: list[int]
    draft: Draft

    @staticmethod
    def of(seqs: list[Sequence], rooms: list[int], draft: Draft) -> Begun:
        return Begun([(seq.id, len(seq.tokens)) for seq in seqs], rooms, draft)

    def suits(self, seqs: list[Sequence], rooms: list[int]) -> bool:
        """Whether it will do for what is asked for now: a little less than that is there sooner."""
        same = self.texts == [(seq.id, len(seq.tokens)) for seq in seqs]
        return same and all(2 * mine >= room for mine, room in zip(self.rooms, rooms, strict=True))

    def cut(self, rooms: list[int]) -> Draft:
        trees = (tree.cut(n) for tree, n in zip(self.draft.trees, rooms, strict=True))
        return Draft.pack(trees, self.draft.unread)


@register("head")
class TrainedHead(Drafter):
    """Options: head (a folder, or a loaded Head), draft_dtype, stop_below (the survival at which a chain ends), tree,
    tree_width, tree_depth."""

    traits = Traits(
        options=("head", "draft_dtype", "stop_below", "tree", "tree_width", "tree_depth"),
        auto=lambda workspace: chosen(workspace) is not None,
        trial=lambda target: _trial(target),
    )

    def __init__(self, space: Workspace) -> None:
        self.space = space
        head = load_head(space)
        config = head.config
        plane = space.cache.add_plane(*head.plane_shape, device=head.device)
        runner: Any = head  # it runs as a model does, over rows and a plane
        passes: Any = space.passes(runner, plane)
        self.features: Features | Kept
        drafts, taps = None, tuple[int, ...]()
        if passes is None:
            taps = config.taps
            self.features = Features(taps)
        else:  # the target's passes leave their streams where they are found later: there is nothing to look at
            space.plane.keep_streams(config.taps, config.target_hidden_size, head.compute)
            self.features = Kept(config.taps, space.cache, space.plane)
            from .recorded import Heads  # needs triton

            drafts = Heads(passes, space.plane, "head")
        self.rollout = HeadRollout(head, space.cache, plane, self.features, drafts)
        self.rollout.shown = space.record_guesses
        self.tree = bool(space.option("tree", default=False))
        block = config.kind == "block"
        self.width = int(space.option("tree_width", default=8 if block else 3))  # a block's branches cost nothing
        self.depth = int(space.option("tree_depth", default=config.block))
        given = space.option("stop_below", default=None)
        self.pace = Pace(None if given is None else float(given))
        unread = drafts is not None and not self.tree
        self.traits = replace(
            self.traits,
            taps=taps,
            unread=unread,
            self_limiting=head.device.type == "cpu" and not (self.tree or unread),
            memory=lambda: Memory(weight_bytes(self.rollout.head, excluding=space.target), self.rollout.plane.bytes),
        )
        self.asked: dict[int, int] = {}  # nodes, of each sequence in the last draft
        self.begun: Begun | None = None
        self.stop_below = 0.0  # of the last request

    def draft(self, request: DraftRequest) -> Draft:
        self.rollout.runs = 0
        seqs, budgets = request.seqs, request.budgets
        ready = [i for i, seq in enumerate(seqs) if budgets[i] > 0 and self._ready(seq)]
        self.asked = {seqs[i].id: budgets[i] for i in ready}
        begun, self.begun = self.begun, None

        def roll(part: DraftRequest) -> Draft:
            started = begun is not None and begun.suits(part.seqs, part.budgets)
            draft = begun.cut(part.budgets) if begun is not None and started else self._roll(part)
            for tree in draft.trees:
                self.pace.heard(tree)
            return draft

        return request.answer(ready, roll)

    def backlog(self, seq: Sequence) -> int:
        return len(seq.tokens) - self.rollout.plane.holds(seq.id)

    def observe(self, step: Step) -> None:
        self.pace.observe(step, self.rollout.runs)
        self.rollout.runs = 0
        self.features.observe(step)
        self.features.tidy(self.space.cache.rows.keys())
        if self.traits.unread:
            self._go_on(step)

    def _go_on(self, step: Step) -> None:
        """Who was asked just now is likely to be asked again: a device drafts while the host makes up its mind."""
        drafted = all(tree.source == self.name for tree in step.draft.trees)
        rooms = [min(self.asked.get(seq.id, 0), seq.room - 1) for seq in step.seqs]
        goes_on = all(seq.finish is None and self._ready(seq) for seq in step.seqs)
        if drafted and goes_on and min(rooms) > 0 and self.rollout.leaves_unread(step.seqs):
            self.begun = Begun.of(
                step.seqs, rooms, self._roll(DraftRequest(step.seqs, rooms, stop_below=self.stop_below))
            )

    def end(self, seq: Sequence) -> None:
        self.features.drop(seq.id)

    def _ready(self, seq: Sequence) -> bool:
        """Whether the target has looked at all but the last token, and we have seen what it saw at the one before."""
        last = len(seq.tokens) - 2
        return last >= 0 and self.space.plane.holds(seq.id) > last and self.features.known(seq.id, last)

    def _roll(self, request: DraftRequest) -> Draft:
        self.rollout.stop_below = self.stop_below = request.stop_below
        if self.tree and all(seq.rule == "match" for seq in request.seqs):
            return self.rollout.trees(request.seqs, request.budgets, self.width, self.depth)
        self.rollout.floor = self.pace.floor(request.prices if self.traits.self_limiting else None)
        return self.rollout.chains(request.seqs, request.budgets)


def _trial(target: Model) -> dict[str, Any]:
    """The target's own head, or an untrained one: a fair trial of everything but its guesses."""
    if (found := head_for(target)) is not None:
        return {"head": str(found)}
    config, tensors = random_head(target.config)
    return {"head": Head(config, tensors, embedding_of(target), target.compute, target.device)}


def chosen(space: Workspace) -> Any:
    """The head that was asked for, else the one that belongs to the target; None if there is none, or `head=none`."""
    wanted = space.option("head", default=None)
    if wanted is None:
        return head_for(space.target)
    return None if wanted == "none" else wanted


def load_head(space: Workspace) -> Head:
    """The head that was asked for, or belongs to the target, in memory."""
    wanted = chosen(space)
    if wanted is None:
        raise ConfigError(
            "The drafter 'head' needs a trained head, and none comes along for this model: give its folder with "
            "--set head=PATH (or head=…), or make one with `outrider train`."
        )
    if isinstance(wanted, str | Path):
        config, tensors = read_head(wanted)
        insist_on_target(config, space.target, str(wanted))
        if config.kind == "exit":
            raise ConfigError(
                f"{wanted} is an early exit's adapter: use it with --drafter exit --set adapter={wanted}."
            )
        dtype = precision(space)
        if dtype is torch.int8 and space.target.device.type != "cpu":
            raise ConfigError("A head in int8 runs on a CPU only so far: choose draft_dtype bfloat16, or auto.")
        target, length = space.target, space.cache.length
        return Head(config, tensors, embedding_of(target), dtype, target.device, length)
    if not isinstance(wanted, Head):
        raise ConfigError(f"head is {wanted!r}, but it must be a folder or a Head.")
    insist_on_target(wanted.config, space.target, "that was given")
    if wanted.device != space.target.device:
        raise ConfigError(f"The head that was given is on {wanted.device}, its target on {space.target.device}.")
    return wanted
