"""A trained head on the target's own features (EAGLE-3, or a block of masks filled in by one pass).

The head is a folder that `outrider train` wrote for this target and no other. It reads hidden states that verification
computes anyway, so that it needs a layer or two where a draft model needs many. Its K/V lives in the target's slots.
It keeps features only until they are fed; what it misses costs acceptance, never a word of the text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError
from ..models import Model, device_of
from ..models.output import embedding_of
from ..types import Draft, Sequence, Step, Tree
from . import Drafter, Workspace, register
from ._head import Features, HeadRollout

if TYPE_CHECKING:
    from ..models.head import Head
    from ..models.head_file import HeadConfig

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_MOST_KEPT = 256  # sequences whose end nobody has told us


@register("head")
class TrainedHead(Drafter):
    """Options: head (a folder, or a loaded Head), draft_dtype, tree, tree_width, tree_depth."""

    takes = ("head", "draft_dtype", "tree", "tree_width", "tree_depth")

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        head = _load(space)
        config = head.config
        plane = space.cache.add_plane(*head.plane_shape, device=head.device)
        self.taps = config.taps
        self.features = Features(self.taps)
        self.rollout = HeadRollout(head, space.cache, plane, self.features)
        self.tree = bool(space.option("tree", default=False))
        block = config.kind == "block"
        self.width = int(space.option("tree_width", default=8 if block else 3))  # a block's branches cost nothing
        self.depth = int(space.option("tree_depth", default=config.block))

    @classmethod
    def trial_options(cls, target: Model) -> dict[str, Any]:
        from ..models.head import Head
        from ..models.toy import random_head

        config, tensors = random_head(target.config)  # knows nothing: a fair trial of everything but its guesses
        return {"head": Head(config, tensors, embedding_of(target), _dtype(target), device_of(target))}

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        ready = [i for i, seq in enumerate(seqs) if budget[i] > 0 and self._ready(seq)]
        trees = [Tree([], [])] * len(seqs)
        if ready:
            draft = self._roll([seqs[i] for i in ready], [budget[i] for i in ready])
            for i, tree in zip(ready, draft.trees, strict=True):
                trees[i] = tree
        return Draft.pack(trees)

    def observe(self, step: Step) -> None:
        self.features.observe(step)
        if len(self.features.pieces) > _MOST_KEPT:
            for name in self.features.pieces.keys() - self.space.cache.rows.keys():
                self.features.drop(name)

    def end(self, seq: Sequence) -> None:
        self.features.drop(seq.id)

    def _ready(self, seq: Sequence) -> bool:
        """Whether the target has looked at all but the last token, and we have seen what it saw at the one before."""
        last = len(seq.tokens) - 2
        return last >= 0 and self.space.plane.held.get(seq.id, 0) > last and self.features.known(seq.id, last)

    def _roll(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        if self.tree and all(seq.rule == "match" for seq in seqs):
            return self.rollout.trees(seqs, budget, self.width, self.depth)
        return self.rollout.chains(seqs, budget)


def _load(space: Workspace) -> Head:
    from ..models.head import Head, read_head  # heavy, and only needed here

    wanted = space.option("head", default=None)
    if wanted is None:
        raise ConfigError("The drafter 'head' needs a trained head: give its folder with --set head=PATH (or head=…).")
    if isinstance(wanted, str | Path):
        config, tensors = read_head(wanted)
        _insist(config, space.target, str(wanted))
        wish = str(space.option("draft_dtype", default="auto")).removeprefix("torch.")
        if wish not in (*_DTYPES, "auto"):
            raise ConfigError(
                f"There is no draft_dtype '{wish}' for a head. Choose one of: auto, {', '.join(_DTYPES)}."
            )
        dtype = _dtype(space.target) if wish == "auto" else _DTYPES[wish]
        target, length = space.target, space.cache.length
        return Head(config, tensors, embedding_of(target), dtype, device_of(target), length)
    if not isinstance(wanted, Head):
        raise ConfigError(f"head is {wanted!r}, but it must be a folder or a Head.")
    _insist(wanted.config, space.target, "that was given")
    return wanted


def _insist(config: HeadConfig, target: Model, name: str) -> None:
    """A head of another target would only guess wrong: say so instead."""
    for what, ours, theirs in (
        ("a hidden size of", config.hidden_size, target.config.hidden_size),
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
    """What the target computes in; beside an int8 one, the shortest floats that are exact by row here."""
    from ..models.linear import packs

    dtype: torch.dtype = getattr(target, "compute", target.dtype)
    if dtype.is_floating_point:
        return dtype
    return torch.bfloat16 if packs(torch.empty(1, 1, dtype=torch.bfloat16)) else torch.float32
