"""A trained head that prepares drafts for many outcomes at once. The only module here that imports `drafters.head`.

A head reads the target's hidden states, and of the draft under verification there are none yet. So it continues from
its own outputs there, as after the first token of any draft: through the trunk token by token, then into the forks.
After the verdict the same positions are fed again with the target's hidden states; nothing guessed is kept.

It runs in the target's process: `features` is written by the engine's thread and read by the worker's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...backends import Model, ops
from ...backends.rows import rows_of
from ...errors import ConfigError
from ...models.speculators import read_config
from ...types import Sequence
from .. import Workspace
from ..head.drafter import TrainedHead, head_for, load_head
from ..head.features import CommittedRows, FeatureCache, HeadBatch, ObservedFeatures, StreamFeatures
from ..head.network import Head
from .forks import Choice, Forker, ForkPlan


class HeadForker(Forker):
    """An eagle3 head with a cache of its own."""

    def __init__(self, head: Head, slots: int, lanes: int, length: int, features: FeatureCache) -> None:
        model: Any = head  # it has a plane as a model has; every method that would run it as a model is overridden
        super().__init__(model, slots, lanes, length)
        self.head = head
        self.committed = CommittedRows(head, self.cache, self.plane, features, lambda seq: self.target_ids[seq.id])
        self.outputs: dict[int, dict[int, Tensor]] = {}  # sequence id -> node -> [H] what its children continue from
        self.ids: list[int] = head.ids.tolist()  # [D] the target's id of each of the head's

    def extend(self, seq: Sequence, more: list[int]) -> None:
        """The text has grown; the new tokens are fed again, with the target's hidden states."""
        self._last_plans.pop(seq.id, None)
        seq.tokens += more

    def close(self, seq: Sequence) -> None:
        self.outputs.pop(seq.id, None)
        super().close(seq)

    def _fits(self, plan: ForkPlan, depth: int) -> bool:
        """Whether there are slots for it, and hidden states of the token before the last."""
        nodes = len(plan.trunk) + sum(plan.forks) * depth
        return self.committed.ready(plan.seq) and self.cache.reserve(plan.seq, len(plan.seq.tokens), max(nodes - 1, 0))

    def read_trunks(self, plans: list[ForkPlan]) -> Tensor:
        """Scores after each text and after each token of its trunk. [sum of 1 + trunk, D]"""
        self.before_pass()
        scores, outputs = self.committed.read([plan.seq for plan in plans], [0] * len(plans))
        for plan, output in zip(plans, outputs, strict=True):
            self.outputs[plan.seq.id] = {-1: output}
        scores_of = [[row] for row in scores.cpu()]  # by plan
        for i in range(max(len(plan.trunk) for plan in plans)):
            longer = [(rows, plan) for rows, plan in zip(scores_of, plans, strict=True) if i < len(plan.trunk)]
            after = self._run([(plan, plan.add(plan.trunk[i], i - 1)) for _, plan in longer])
            for (rows, _), row in zip(longer, after, strict=True):
                rows.append(row)
        return torch.cat([torch.stack(rows) for rows in scores_of])

    def _run(self, nodes: list[tuple[ForkPlan, int]]) -> Tensor:
        """Feed these nodes, each continuing from its parent's output; scores after each. [nodes, D]"""
        self.before_pass()
        batch, features = HeadBatch(self.cache), []
        for plan, node in nodes:
            batch.drafted(plan.seq, plan.tokens[node], plan.path(node))
            features.append(self.outputs[plan.seq.id][plan.parents[node]])
        scores, outputs = self.head.scores(rows_of(batch), self.plane, torch.stack(features))
        for (plan, node), output in zip(nodes, outputs, strict=True):
            self.outputs[plan.seq.id][node] = output
        return scores.cpu()

    def _highest(self, logits: Tensor) -> list[tuple[int, float]]:
        indices, shares = ops.top_shares(logits)
        return [(self.ids[index], share) for index, share in zip(indices.tolist(), shares.tolist(), strict=True)]

    def _ranked(self, logits: Tensor, seq: Sequence, emitted: list[int], width: int) -> list[tuple[int, float]]:
        if not seq.params.plain:
            return super()._ranked(self.head.spread(logits), seq, emitted, width)
        best, indices = torch.softmax(logits, -1).topk(min(width, logits.shape[-1]))
        return [(self.ids[index], share) for index, share in zip(indices.tolist(), best.tolist(), strict=True)]

    def _sampled(self, logits: Tensor, seq: Sequence, emitted: list[int], start: int) -> Choice:
        return super()._sampled(self.head.spread(logits), seq, emitted, start)


def head_source(space: Workspace) -> tuple[Head, FeatureCache, tuple[int, ...], TrainedHead]:
    """The head that was given or belongs to the target, its features, all taps, and the drafter for just in time."""
    head = load_head(space)
    if head.config.parallel:
        raise ConfigError(
            f"A head of the kind '{head.config.kind}' cannot continue from its own guesses, as drafting ahead needs: "
            f"give an eagle3 head or a draft model, or use --drafter head."
        )
    taps = head.config.taps
    features: FeatureCache = ObservedFeatures(taps)
    if head.device.type == "cuda":  # the target's passes leave their hidden states in the slots
        space.plane.keep_streams(taps, head.config.target_hidden_size, head.compute)
        features, taps = StreamFeatures(taps, space.cache, space.plane), ()
    inline = TrainedHead(replace(space, options=space.options | {"tree": False, "head": head}))
    inline.traits = replace(inline.traits, self_limiting=False)  # the controller decides for both modes alike
    return head, features, tuple(sorted({*taps, *inline.traits.taps})), inline


def eagle_head(target: Model) -> str | None:
    """The folder of a head that belongs to this target and can draft ahead."""
    folder = head_for(target)
    return str(folder) if folder is not None and read_config(folder).kind == "eagle3" else None
