"""A drafter that the verifier teaches while it serves: Draft, Verify, Improve.

It drafts with a trained head (`head`), or, where there is none, with the target's own output on its last hidden state.
What became of each node, up to the first reject and never beyond it, goes into a ring buffer; an update runs now and
then while the target is busy; weights change between two steps. The target is only read, so the text cannot change.
A request with `learn=False` is served and leaves no trace. It knows steps; how learning goes is `learn.learner`'s.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError
from ...types import REJECTED, Draft, Sequence, Step, Verdict
from .. import Drafter, DraftRequest, Traits, Workspace, lookup, names, register
from . import store
from .buffer import Seen
from .learner import Learner, Plan, warm
from .taps import Last, Tap, TapRollout

_PHASES = ("draft", "verify", "judge")  # of a step's time; learning is within the second
_VOCABULARY = {"cpu": 8192, "cuda": 32768}  # words that a bare tap drafts from: the first ids, the commonest pieces


class Node(NamedTuple):
    """A verified node."""

    state: Tensor  # [H]
    beside: int
    drafted: int  # -1: nothing was drafted there
    accepted: bool
    row: int  # of the step's logits


@dataclass
class Proposal:
    """What was drafted after a sequence of this length."""

    length: int
    tokens: list[int]
    states: list[tuple[Tensor, int]]  # for each token, the state [H] it was chosen from and the token beside that


class BareTap(Drafter):
    """Drafts from the target's last hidden state."""

    name = "tap"

    def __init__(self, space: Workspace) -> None:
        self.space = space
        tap = Tap(space.target, _vocabulary(space), space.target.compute)
        self.last = Last(tap.config.taps[0])
        self.rollout, self.network = TapRollout(tap, space.cache, self.last), tap
        self.traits = Traits(taps=tap.config.taps)

    def draft(self, request: DraftRequest) -> Draft:
        pairs = enumerate(zip(request.seqs, request.budgets, strict=True))
        ready = [i for i, (seq, budget) in pairs if budget > 0 and self.last.knows(seq, len(seq.tokens) - 2)]
        return request.answer(ready, lambda part: self.rollout.chains(part.seqs, part.budgets))

    def observe(self, step: Step) -> None:
        self.last.observe(step)
        for name in [name for name in self.last.states if name not in self.space.cache.rows]:
            del self.last.states[name]

    def end(self, seq: Sequence) -> None:
        self.last.states.pop(seq.id, None)


@register("online")
class Online(Drafter):
    """Options: head, draft_dtype, draft_vocab, learn, learn_from, learn_every, learn_cap_ms, learn_share,
    learn_rate."""

    traits = Traits(
        options=(
            "head", "draft_dtype", "draft_vocab", "learn", "learn_from", "learn_every", "learn_cap_ms", "learn_share",
            "learn_rate",
        ),
        needs_layers=True,
        trial=lambda target: {"learn_every": 2, "learn_share": 1.0},
    )  # fmt: skip

    def __init__(self, space: Workspace) -> None:
        self.inner = _inner(space)
        self.rollout: Any = self.inner.rollout  # a `Remembering`
        head: Any = self.rollout.network
        self.frozen = head.frozen
        plan = _plan(space)
        weights = self.frozen.fresh(plan.rank)
        if (folder := space.option("learn_from", default=None)) is not None:
            weights = store.load(folder, self.frozen, weights)
        self.learner = Learner(self.frozen, weights, plan)
        head.live = lambda: self.learner.live
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
        self.rollout.seen.clear()
        draft: Draft = self.inner.draft(request)
        if self.learner.report.state == "on":
            for seq, tree in zip(request.seqs, draft.trees, strict=True):
                states = self.rollout.states.get(seq.id, [])
                self.proposals[seq.id] = Proposal(len(seq.tokens), tree.tokens, states)
        return draft

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        self.learner.work()

    def observe(self, step: Step) -> None:
        nodes: list[Node] = []
        begin = time.thread_time()
        if self.learner.listens:
            for i, turn in enumerate(step.turns):
                if step.verdicts[i] is not None and turn.seq.speculate and turn.seq.params.learn:
                    nodes += self._verified(step, i)
        if nodes:
            self.learner.add(_seen(step, nodes))
        self.learner.pay(sum(step.clock.get(phase, 0.0) for phase in _PHASES), time.thread_time() - begin)
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
        """How learning goes: state, reason, counts and times."""
        kind = "tap" if isinstance(self.inner, BareTap) else "head"
        return {"drafter": kind, "vocabulary": len(self.frozen.ids)} | self.learner.as_json()

    def save(self, folder: Path | str, **facts: Any) -> None:
        """Keep the best of what was learnt."""
        said = {"identity": store.identity(self.frozen), "learning": self.report()}
        store.save(folder, self.learner.weights(), facts | said)

    def _verified(self, step: Step, i: int) -> list[Node]:
        """Accepted nodes and the first reject; where nothing was drafted, what a bare tap would have gone on from."""
        seq, tree, verdict, first = step.turns[i].seq, step.draft.trees[i], step.verdicts[i], step.first[i]
        assert verdict is not None
        before = len(seq.tokens) - len(verdict.tokens)
        told = self.proposals.pop(seq.id, None)
        if not tree.tokens:
            if isinstance(self.inner, BareTap) and self.inner.last.knows(seq, before - 2):
                return [Node(self.inner.last.at(seq, before - 2), seq.tokens[before - 1], -1, False, first)]
            return []
        mine = told is not None and told.length == before and told.tokens[: len(tree.tokens)] == tree.tokens
        if told is None or not mine or not tree.is_chain:
            return []  # somebody else's draft
        return [
            Node(*told.states[j], tree.tokens[j], j < len(verdict.path), first + j)
            for j in range(min(_walked(verdict), len(told.states)))
        ]


def _walked(verdict: Verdict) -> int:
    """Nodes of a chain that the target has looked at."""
    return len(verdict.path) + (REJECTED in verdict.fates)


def _seen(step: Step, nodes: list[Node]) -> Seen:
    """A step's logits are gone after the next one: these rows of them are copied, where they are."""
    states, beside, drafted, accepted, rows = (list(field) for field in zip(*nodes, strict=True))
    whole = rows == list(range(rows[0], rows[0] + len(rows)))
    logits = step.output.logits[rows[0] : rows[-1] + 1].clone() if whole else step.output.logits[rows]
    return Seen(states, beside, drafted, accepted, logits)


def _inner(space: Workspace) -> Any:
    """Drafts with the trained head, where the drafter `head` exists and has one for this target; else a bare tap."""
    uses_head = lookup("head").traits.auto if "head" in names() else None
    if uses_head is None or not uses_head(space):
        return BareTap(space)
    from .heads import adapted_head

    return adapted_head(space)


def _vocabulary(space: Workspace) -> Tensor:
    """What a bare tap can draft [D]: a tokenizer's first ids, which are its commonest pieces, and what ends texts."""
    c = space.target.config
    size = int(space.option("draft_vocab", default=0)) or _VOCABULARY.get(space.target.device.type, _VOCABULARY["cpu"])
    if not size >= 1:
        raise ConfigError(f"draft_vocab is {size}, but it must be at least 1, or 0 for the default.")
    words = {*range(min(size, c.vocab_size)), *(i for i in c.eos_ids if i < c.vocab_size)}
    return torch.tensor(sorted(words))


def _plan(space: Workspace) -> Plan:
    plan = Plan()
    if space.target.device.type == "cuda":
        plan = replace(plan, slice=plan.batch)  # nobody waits for a slice there
    return replace(
        plan,
        every=_positive(space, "learn_every", plan.every, int),
        cap=_positive(space, "learn_cap_ms", plan.cap * 1e3, float) / 1e3,
        share=_positive(space, "learn_share", plan.share, float),
        rate=_positive(space, "learn_rate", plan.rate, float),
        rank=min(plan.rank, 2 * space.target.config.hidden_size),
    )


def _positive(space: Workspace, name: str, default: Any, kind: Any) -> Any:
    value = space.option(name, default=default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{name} is {value!r}, but it must be a number above 0.")
    return kind(value)
