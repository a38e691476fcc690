"""A trained head on the target's own features (EAGLE-3, or a block of masks filled in by one pass).

The head is a folder that `outrider train` wrote for this target and no other. It reads hidden states that verification
computes anyway, so that it needs a layer or two where a draft model needs many. Its K/V lives in the target's slots.
It keeps features only until they are fed; what it misses costs acceptance, never a word of the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...backends import Model, device_of
from ...backends.output import embedding_of
from ...backends.weigh import weigh
from ...errors import ConfigError
from ...types import Draft, Sequence, Step, Tree
from .. import Drafter, Memory, Workspace, register
from .features import Features, Kept
from .pace import Pace
from .rollout import HeadRollout

if TYPE_CHECKING:
    from ...models.speculators import HeadConfig
    from .network import Head

_DTYPES = {"int8": torch.int8, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


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

    takes = ("head", "draft_dtype", "stop_below", "tree", "tree_width", "tree_depth")

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        head = load_head(space)
        config = head.config
        plane = space.cache.add_plane(*head.plane_shape, device=head.device)
        runner: Any = head  # it runs as a model does, over rows and a plane
        passes = space.passes(runner, plane)
        self.features: Features | Kept
        drafts = None
        if passes is None:
            self.taps = config.taps
            self.features = Features(self.taps)
        else:  # the target's passes leave their streams where they are found later: there is nothing to look at
            space.plane.keep_streams(config.taps, config.target_hidden_size, head.compute)
            self.features = Kept(config.taps, space.cache, space.plane)
            drafts = passes.heads(space.plane, "head")
        self.rollout = HeadRollout(head, space.cache, plane, self.features, drafts)
        self.rollout.shown = space.shown
        self.tree = bool(space.option("tree", default=False))
        block = config.kind == "block"
        self.width = int(space.option("tree_width", default=8 if block else 3))  # a block's branches cost nothing
        self.depth = int(space.option("tree_depth", default=config.block))
        given = space.option("stop_below", default=None)
        self.pace = Pace(None if given is None else float(given))
        self.blind = drafts is not None and not self.tree
        self.paced = head.device.type == "cpu" and not (self.tree or self.blind)
        self.asked: dict[int, int] = {}  # nodes, of each sequence in the last draft
        self.begun: Begun | None = None

    @property
    def added_memory(self) -> Memory:
        return Memory(weigh(self.rollout.head, beside=self.space.target), self.rollout.plane.bytes)

    @classmethod
    def trial_options(cls, target: Model) -> dict[str, Any]:
        from ...backends.toy import random_head
        from .find import head_for
        from .network import Head

        if (found := head_for(target)) is not None:
            return {"head": str(found)}
        config, tensors = random_head(target.config)  # knows nothing: a fair trial of everything but its guesses
        return {"head": Head(config, tensors, embedding_of(target), _dtype(target), device_of(target))}

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        self.rollout.runs = 0
        ready = [i for i, seq in enumerate(seqs) if budget[i] > 0 and self._ready(seq)]
        trees, unread = [Tree([], [])] * len(seqs), None
        self.asked = {seqs[i].id: budget[i] for i in ready}
        begun, self.begun = self.begun, None
        if ready:
            these, rooms = [seqs[i] for i in ready], [budget[i] for i in ready]
            begun = begun if begun is not None and begun.suits(these, rooms) else None
            draft = self._roll(these, rooms) if begun is None else begun.cut(rooms)
            unread = draft.unread
            for i, tree in zip(ready, draft.trees, strict=True):
                trees[i] = tree
                self.pace.heard(tree)
        return Draft.pack(trees, unread)

    def behind(self, seq: Sequence) -> int:
        return len(seq.tokens) - self.rollout.plane.held.get(seq.id, 0)

    def observe(self, step: Step) -> None:
        self.pace.observe(step, self.rollout.runs)
        self.rollout.runs = 0
        self.features.observe(step)
        self.features.tidy(self.space.cache.rows.keys())
        if self.blind:
            self._go_on(step)

    def _go_on(self, step: Step) -> None:
        """Who was asked just now is likely to be asked again: a device drafts while the host makes up its mind."""
        drafted = all(tree.source == self.name for tree in step.draft.trees)
        rooms = [min(self.asked.get(seq.id, 0), seq.room - 1) for seq in step.seqs]
        goes_on = all(seq.finish is None and self._ready(seq) for seq in step.seqs)
        if drafted and goes_on and min(rooms) > 0 and self.rollout.leaves_unread(step.seqs):
            self.begun = Begun.of(step.seqs, rooms, self._roll(step.seqs, rooms))

    def end(self, seq: Sequence) -> None:
        self.features.drop(seq.id)

    def _ready(self, seq: Sequence) -> bool:
        """Whether the target has looked at all but the last token, and we have seen what it saw at the one before."""
        last = len(seq.tokens) - 2
        return last >= 0 and self.space.plane.held.get(seq.id, 0) > last and self.features.known(seq.id, last)

    def _roll(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        self.rollout.stop_below = self.stop_below
        if self.tree and all(seq.rule == "match" for seq in seqs):
            return self.rollout.trees(seqs, budget, self.width, self.depth)
        self.rollout.floor = self.pace.floor(self.space.market() if self.paced else None)
        return self.rollout.chains(seqs, budget)


def chosen(space: Workspace) -> Any:
    """The head that was asked for, else the one that belongs to the target; None if there is none, or `head=none`."""
    wanted = space.option("head", default=None)
    if wanted is None:
        from .find import head_for

        return head_for(space.target)
    return None if wanted == "none" else wanted


def load_head(space: Workspace) -> Head:
    """The head that was asked for, or belongs to the target, in memory."""
    from .network import Head, read_head  # heavy, and only needed here

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
        if dtype is torch.int8 and device_of(space.target).type != "cpu":
            raise ConfigError("A head in int8 runs on a CPU only so far: choose draft_dtype bfloat16, or auto.")
        target, length = space.target, space.cache.length
        return Head(config, tensors, embedding_of(target), dtype, device_of(target), length)
    if not isinstance(wanted, Head):
        raise ConfigError(f"head is {wanted!r}, but it must be a folder or a Head.")
    insist_on_target(wanted.config, space.target, "that was given")
    if wanted.device != device_of(space.target):
        raise ConfigError(f"The head that was given is on {wanted.device}, its target on {device_of(space.target)}.")
    return wanted


def precision(space: Workspace) -> torch.dtype:
    """In which a trained drafter computes: draft_dtype, or what suits the target."""
    wish = str(space.option("draft_dtype", default="auto")).removeprefix("torch.")
    if wish not in (*_DTYPES, "auto"):
        raise ConfigError(f"There is no draft_dtype '{wish}' for a head. Choose one of: auto, {', '.join(_DTYPES)}.")
    return _dtype(space.target) if wish == "auto" else _DTYPES[wish]


def insist_on_target(config: HeadConfig, target: Model, name: str) -> None:
    """A head of another target would only guess wrong: say so instead."""
    for what, ours, theirs in (
        ("a hidden size of", config.target_hidden_size, target.config.hidden_size),
        ("a vocabulary of", config.vocab_size, target.config.vocab_size),
    ):
        if ours != theirs:
            raise ConfigError(_refusal(config, name, f"its target has {what} {ours}, this one of {theirs}"))
    layers = target.config.layers
    if max(config.taps) >= layers:
        raise ConfigError(_refusal(config, name, f"it reads layer {max(config.taps)}, but this target has {layers}"))
    identity = getattr(target, "identity", None)
    if config.target_hash and identity is not None and (hash := identity()) != config.target_hash:
        raise ConfigError(_refusal(config, name, f"its target's hash is {config.target_hash}, this one's is {hash}"))


def _refusal(config: HeadConfig, name: str, why: str) -> str:
    whose = f" ({config.target_name})" if config.target_name else ""
    return (
        f"The head {name} was trained for another target{whose}: {why}. Choose a head of this target, or make one with "
        f"`outrider train`."
    )


def _dtype(target: Any) -> torch.dtype:
    """What the target computes in: eight bits beside eight bits on a CPU, where bytes are what a pass costs."""
    dtype: torch.dtype = getattr(target, "compute", target.dtype)
    return dtype
