"""A trained head that prepares for many outcomes at once.

A head reads what the target saw at each token, and of the draft under verification the target has seen nothing yet. So
it goes on from its own outputs there, as it does beyond the first token of any draft: through the draft token by token,
and from every place of it into the forks. When the verdict is known, what the target really saw is fed in their stead,
and nothing that was guessed is kept.

It lives in the target's process (`features` is written by one thread and read by another); the text is safe from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...backends import Model, ops
from ...backends.rows import rows_of
from ...engine.sampling import law
from ...errors import ConfigError
from ...models.speculators import read_config
from ...types import Sequence
from .. import Workspace
from ..head.drafter import TrainedHead, head_for, load_head
from ..head.features import CommittedRows, FeatureCache, HeadBatch, ObservedFeatures, StreamFeatures
from ..head.network import Head
from .forks import Forker, Plan


class HeadForker(Forker):
    """An eagle3 head with a cache of its own."""

    def __init__(self, head: Head, slots: int, lines: int, length: int, features: FeatureCache) -> None:
        model: Any = head  # it has a plane as a model has; what runs it is overridden here
        super().__init__(model, slots, lines, length)
        self.head, self.owners = head, dict[int, int]()  # by line: the name under which features know its sequence
        self.committed = CommittedRows(head, self.cache, self.plane, features, lambda seq: self.owners[seq.id])
        self.outputs: dict[int, dict[int, Tensor]] = {}  # line -> node -> [H] what its children go on from
        self.words: list[int] = head.ids.tolist()  # [D] the target's id of each of the head's

    # ------------------------------------------------------------ texts

    def open(self, seq: Sequence, owner: int = -1) -> None:
        self.owners[seq.id] = owner
        super().open(seq, owner)

    def extend(self, seq: Sequence, more: list[int]) -> None:
        """The text went on: what was guessed of it is fed again, with what the target saw."""
        self._grown.pop(seq.id, None)
        seq.tokens += more

    def close(self, seq: Sequence) -> None:
        self.outputs.pop(seq.id, None)
        super().close(seq)

    # ------------------------------------------------------------ a round

    def _fits(self, plan: Plan, depth: int) -> bool:
        """Whether there are slots for it, and the target has seen the token before the last."""
        nodes = len(plan.trunk) + sum(plan.forks) * depth
        return self.committed.ready(plan.seq) and self.cache.reserve(plan.seq, len(plan.seq.tokens), max(nodes - 1, 0))

    def glue(self, plans: list[Plan]) -> Tensor:
        """Scores after each text and after each token of its trunk. [sum of 1 + trunk, D]"""
        self.beat()
        scores, outputs = self.committed.read([plan.seq for plan in plans], [0] * len(plans))
        for plan, output in zip(plans, outputs, strict=True):
            self.outputs[plan.seq.id] = {-1: output}
        found = [[row] for row in scores.cpu()]
        for i in range(max(len(plan.trunk) for plan in plans)):
            going = [(rows, plan) for rows, plan in zip(found, plans, strict=True) if i < len(plan.trunk)]
            after = self._run([(plan, plan.feed(plan.trunk[i], i - 1)) for _, plan in going])
            for (rows, _), row in zip(going, after, strict=True):
                rows.append(row)
        return torch.cat([torch.stack(rows) for rows in found])

    def _run(self, nodes: list[tuple[Plan, int]]) -> Tensor:
        """Feed these nodes, each going on from its parent's output; scores after each. [nodes, D]"""
        self.beat()
        packed, features = HeadBatch(self.cache), []
        for plan, node in nodes:
            packed.drafted(plan.seq, plan.tokens[node], plan.path(node))
            features.append(self.outputs[plan.seq.id][plan.parents[node]])
        scores, outputs = self.head.scores(rows_of(packed), self.plane, torch.stack(features))
        for (plan, node), output in zip(nodes, outputs, strict=True):
            self.outputs[plan.seq.id][node] = output
        return scores.cpu()

    # ------------------------------------------------------------ choosing, without the words a head does not know

    def _highest(self, logits: Tensor) -> list[tuple[int, float]]:
        places, shares = ops.top_shares(logits)
        return [(self.words[place], share) for place, share in zip(places.tolist(), shares.tolist(), strict=True)]

    def _ranked(self, logits: Tensor, seq: Sequence, emitted: list[int], width: int) -> list[tuple[int, float]]:
        if seq.params.plain:  # as short as they are: nothing depends on the others
            chances, places = torch.softmax(logits, -1).topk(min(width, logits.shape[-1]))
            return [
                (self.words[place], chance) for place, chance in zip(places.tolist(), chances.tolist(), strict=True)
            ]
        return super()._ranked(self.head.spread(logits), seq, emitted, width)

    def _law(self, logits: Tensor, seq: Sequence, emitted: list[int]) -> Tensor:
        return law(self.head.spread(logits), seq, emitted)


class HeadSource(NamedTuple):
    """A head that prepares, and the same head for drafts just in time."""

    head: Head
    features: FeatureCache
    taps: tuple[int, ...]
    own: TrainedHead


def head_source(space: Workspace) -> HeadSource:
    """The head that was given or belongs to the target; refused unless it can continue from its own guesses."""
    head = load_head(space)
    if head.config.kind != "eagle3":
        raise ConfigError(
            f"A head of the kind '{head.config.kind}' cannot continue from its own guesses, as drafting ahead needs: "
            f"give an eagle3 head or a draft model, or use --drafter head."
        )
    taps = head.config.taps
    features: FeatureCache = ObservedFeatures(taps)
    if head.device.type == "cuda":  # the target's passes leave their hidden states where they are found later
        space.plane.keep_streams(taps, head.config.target_hidden_size, head.compute)
        features, taps = StreamFeatures(taps, space.cache, space.plane), ()
    own = TrainedHead(replace(space, options=space.options | {"tree": False, "head": head}))
    own.traits = replace(own.traits, self_limiting=False)  # how much to draft is decided ahead and just in time alike
    return HeadSource(head, features, tuple(sorted({*taps, *own.traits.taps})), own)


def eagle_head(target: Model) -> str | None:
    """A head that belongs to this target and can draft ahead."""
    found = head_for(target)
    return str(found) if found is not None and read_config(found).kind == "eagle3" else None
