"""A drafter that learns from verification while it serves: Draft, Verify, Improve.

It drafts with the target's own output on its last hidden state; where there is a trained head, that head learns instead
(`drafters/head/learning.py`). Verified nodes, up to the first reject, go into a ring buffer; an update runs now and
then while the target is busy; weights change between two steps. A request with `learn=False` is served without leaving
a record. It knows steps; how learning works is in `_learning`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ...types import REJECTED, Draft, Sequence, Step
from .. import Drafter, DraftRequest, Traits, Workspace, lookup, names, register
from .._learning import store
from .._learning.buffer import VerifiedNodes
from .._learning.learner import Learner, LearningPlan, warm
from .._learning.options import OPTIONS, plan_of
from .tap import BareTap

_PHASES = ("draft", "verify", "judge")  # of a step's time; learning is part of the second


Node = tuple[Tensor, int, int, bool, int]  # the fields of `VerifiedNodes`, with a row of the step's logits


class Proposal(NamedTuple):
    """What was drafted after a sequence of this length."""

    length: int
    tokens: list[int]
    states: list[tuple[Tensor, int]]  # for each token, the state [H] that it was chosen from and the token before it


@register("online")
class Online(Drafter):
    """Options: head, draft_dtype, draft_vocab, learn, learn_from, learn_every, learn_cap_ms, learn_share,
    learn_rate."""

    traits = Traits(
        options=("head", "draft_dtype", "draft_vocab", *OPTIONS),
        needs_layers=True,
        trial=lambda target: {"learn_every": 2, "learn_share": 1.0},
    )

    def __new__(cls, space: Workspace) -> Any:
        """The drafter `head`, learning, where there is one for this target; else a bare tap."""
        uses_head = lookup("head").traits.auto if "head" in names() else None
        if uses_head is None or not uses_head(space):
            return super().__new__(cls)
        return lookup("head")(replace(space, options={"learn": True} | space.options))

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.inner = BareTap(space)
        self.rollout = self.inner.rollout
        self.frozen = self.rollout.tap.frozen
        plan = plan_of(space, LearningPlan())
        weights = self.frozen.initial(plan.rank)
        if (folder := space.option("learn_from", default=None)) is not None:
            weights = store.load(folder, self.frozen, weights)
        self.learner = Learner(self.frozen, weights, plan)
        self.rollout.tap.live = lambda: self.learner.live
        self.proposals: dict[int, Proposal] = {}
        if space.option("learn", default=True):
            warm(self.learner)
        else:
            self.learner.stop("off", "learning is switched off")
        self.traits = replace(self.traits, taps=self.inner.traits.taps, learning=self)
        self._update_traits()

    def _update_traits(self) -> None:
        due = self.learner.due
        if due != self.traits.overlaps:
            self.traits = replace(self.traits, overlaps=due)

    def draft(self, request: DraftRequest) -> Draft:
        self.learner.swap()
        self.rollout.states.clear()
        self.rollout.scored.clear()
        draft = self.inner.draft(request)
        if self.learner.report.state == "on":
            for seq, tree in zip(request.seqs, draft.trees, strict=True):
                states = self.rollout.states.get(seq.id, [])
                self.proposals[seq.id] = Proposal(len(seq.tokens), tree.tokens, states)
        return draft

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        self.learner.work()

    def observe(self, step: Step) -> None:
        begin, nodes = time.thread_time(), list[Node]()
        if self.learner.within_share:
            for i, turn in enumerate(step.turns):
                if step.verdicts[i] is not None and turn.seq.speculate and turn.seq.params.learn:
                    nodes += self._verified(step, i)
        if nodes:
            self.learner.add(_with_logits(step, nodes))
        self.learner.account(sum(step.clock.get(phase, 0.0) for phase in _PHASES), time.thread_time() - begin)
        self.inner.observe(step)
        self.learner.swap()
        self._update_traits()

    def end(self, seq: Sequence) -> None:
        self.proposals.pop(seq.id, None)
        self.inner.end(seq)

    def inherit(self, old: Drafter) -> None:
        if isinstance(old, Online) and store.same(store.identity(self.frozen), store.identity(old.frozen)):
            self.learner = old.learner
            self._update_traits()

    # ------------------------------------------------------------ what is learnt

    def report(self) -> dict[str, Any]:
        """State, reason, counts and times."""
        return {"drafter": "tap", "vocabulary": len(self.frozen.ids)} | self.learner.as_json()

    def save(self, folder: Path | str, **facts: Any) -> None:
        """Write the weights that draft, and these facts."""
        facts |= {"identity": store.identity(self.frozen), "learning": self.report()}
        store.save(folder, self.learner.weights(), facts)

    def _verified(self, step: Step, i: int) -> list[Node]:
        """Accepted nodes and the first reject; where nothing was drafted, the state a bare tap would have used."""
        seq, tree, verdict, first = step.turns[i].seq, step.draft.trees[i], step.verdicts[i], step.first[i]
        assert verdict is not None
        before = len(seq.tokens) - len(verdict.tokens)
        proposal = self.proposals.pop(seq.id, None)
        if not tree.tokens:
            if self.inner.last.has(seq, before - 2):
                return [(self.inner.last.at(seq, before - 2), seq.tokens[before - 1], -1, False, first)]
            return []
        if proposal is None or proposal.length != before or not tree.is_chain:
            return []
        if proposal.tokens[: len(tree.tokens)] != tree.tokens:  # another drafter's draft
            return []
        reached = len(verdict.path) + (REJECTED in verdict.fates)
        return [
            (*proposal.states[j], tree.tokens[j], j < len(verdict.path), first + j)
            for j in range(min(reached, len(proposal.states)))
        ]


def _with_logits(step: Step, nodes: list[Node]) -> VerifiedNodes:
    """The nodes with a copy of their logits: the next step overwrites them."""
    states, previous, drafted, accepted, rows = (list(field) for field in zip(*nodes, strict=True))
    adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
    logits = step.output.logits[rows[0] : rows[-1] + 1].clone() if adjacent else step.output.logits[rows]
    return VerifiedNodes(states, previous, drafted, accepted, logits)
