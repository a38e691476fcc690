"""A draft model that prepares drafts for many outcomes at once.

One pass over the end of the text and the draft under verification (the trunk) gives the draft model's logits after
every prefix of the trunk. At each, the most likely tokens become forks (except the drafted one, which a rejection never
yields), and the forks of all sequences grow together, one pass per depth. The cache is the drafter's own: the target
never waits for it. K/V of the outcome that occurred is kept.

Under `match`, forks are ranked with the target's noise, which a drafter can compute: at a temperature these are the
target's most likely choices. Under the rules that need q, forks are the most likely tokens, and the tokens after them
are sampled with noise that depends on the position alone: a draft made just in time is the same. These rules keep the
target's distribution for any q that the token was really sampled from, so q is adapted to drafting ahead. It is
truncated, so that it fits into the shared queue. And Saguaro's sampling (arXiv 2603.03251) multiplies the probabilities
of tokens that have forks by C <= 1: after a rejection the target samples one of them more often (max(p - q, 0) grows)
and its next draft is ready, at the cost of acceptance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...backends import WHOLE, Model, Part, Passes
from ...backends.rows import rows_of
from ...engine.batch import BatchBuilder
from ...engine.cache import Cache
from ...engine.sampling import DRAFT, adjust, distribution, draw, key, ranked
from ...types import Sequence
from .._rollout import catch_up, path_to

WARM_UP_TRUNKS = (1, 4, 8)  # trunk lengths of the rounds that are recorded before the first request
SUPPORT = 64  # tokens of a draft distribution


class Tilt(NamedTuple):
    """Saguaro's sampling: the probabilities of the `forks` most likely tokens are multiplied by `share`."""

    forks: int = 0
    share: float = 1.0


NO_TILT = Tilt()


class DraftDistribution(NamedTuple):
    """Probabilities of a few tokens; all others have probability 0."""

    ids: Tensor  # [M] most likely first
    probabilities: Tensor  # [M] float64, sum 1

    def dense(self, vocabulary: int) -> Tensor:
        """Over all ids. [V]"""
        return torch.zeros(vocabulary, dtype=torch.float64).scatter_(0, self.ids, self.probabilities)


Choice = tuple[int, float, DraftDistribution | None]  # a token, its probability, what it was sampled from


def draft_distribution(q: Tensor, tilt: Tilt = NO_TILT, support: int = SUPPORT) -> DraftDistribution:
    """What is sampled from instead of the draft model's q [V]: its `support` most likely tokens, tilted."""
    probabilities, ids = q.topk(min(support, q.shape[-1]))
    shares = torch.ones_like(probabilities)
    shares[: tilt.forks] = tilt.share
    kept = probabilities * shares
    if not bool(kept.sum() > 0):  # all tokens have forks and share 0
        kept = probabilities
    unchanged = int((q > 0).sum()) <= support and tilt.share == 1
    return DraftDistribution(ids, kept if unchanged else kept / kept.sum())


@dataclass
class Branch:
    """One outcome and the draft after it."""

    accepted: int  # tokens of the trunk
    token: int  # the target's own, after them
    tip: int  # the node that the next one follows
    probability: float = 1.0  # of the token, according to the draft model
    chain: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    q: list[DraftDistribution | None] = field(default_factory=list)  # of the token, then the chain; None: not sampled


@dataclass
class ForkPlan:
    """What is prepared for one sequence. Node n of its tree lies in its n-th spare slot."""

    seq: Sequence
    trunk: list[int]
    forks: list[int]  # [len(trunk) + 1] by accepted tokens
    lane: int = 0
    just_in_time: bool = False  # the one fork is not an outcome but the first token of the draft itself
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)

    def add(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        return path_to(node, self.parents)

    def follow(self, tokens: list[int]) -> list[int]:
        """The nodes with these tokens from the root down, as far as there are any."""
        path: list[int] = []
        for token in tokens:
            last = path[-1] if path else -1
            child = next((n for n, t in enumerate(self.tokens) if t == token and self.parents[n] == last), None)
            if child is None:
                break
            path.append(child)
        return path


class Forker:
    """A draft model with a cache of its own."""

    def __init__(
        self, model: Model, slots: int, lanes: int, length: int, part: Part = WHOLE, vocabulary: int | None = None
    ) -> None:
        """vocabulary: the target's, where the model's is padded further."""
        self.model, self.part, self.vocabulary = model, part, vocabulary
        self.cache = Cache(slots, lanes + 8, length, model.device)
        self.plane = self.cache.add_plane(*model.plane_shape)
        self.passes: Passes | None = None  # None: call the model itself
        self.target_noise = True  # rank forks with the target's noise; False: to measure what that brings
        self.tilt = Tilt()
        self.before_pass: Callable[[], None] = lambda: None
        self.target_ids: dict[int, int] = {}  # by sequence id
        self._last_plans: dict[int, ForkPlan] = {}

    def open(self, seq: Sequence, target_id: int = -1) -> None:
        """target_id: the sequence's id in the engine."""
        self.target_ids[seq.id] = target_id
        self.cache.open(seq)

    def extend(self, seq: Sequence, more: list[int]) -> None:
        """The text has grown; K/V of what was prepared and occurred is kept."""
        plan, length = self._last_plans.pop(seq.id, None), len(seq.tokens)
        seq.tokens += more
        if plan is not None and more:
            self.plane.wrote(seq.id, range(len(plan.tokens)))
            self.cache.commit(seq, length, plan.follow(more))

    def close(self, seq: Sequence) -> None:
        self._last_plans.pop(seq.id, None)
        if seq.id in self.cache.rows:
            self.cache.free(seq, keep=True)

    def warm_up(self) -> None:
        """Record the passes of usual rounds, the smallest first (a larger recording would be used in its stead)."""
        seq = Sequence(-1, [0])
        self.open(seq)
        for trunk in WARM_UP_TRUNKS:
            self.extend(seq, [0] * (trunk + 1))
            for forks in (1, trunk, 2 * trunk):
                list(self.grow([ForkPlan(seq, [0] * trunk, [*[0] * trunk, forks])], 1))
            list(self.grow([ForkPlan(seq, [], [1], just_in_time=True)], 1))
        self.close(seq)
        self.cache.drop_retired()

    def grow(self, plans: list[ForkPlan], depth: int) -> Iterator[int]:
        """Prepare drafts, one token of every outcome at a time; yields their length. Removes plans that do not fit."""
        plans[:] = [plan for plan in plans if self._fits(plan, depth)]
        if not plans:
            yield 0
            return
        rows = iter(self.read_trunks(plans).split([1 + len(plan.trunk) for plan in plans]))
        for plan in plans:
            self._fork(plan, next(rows))
        yield 0
        growing = [(plan, branch) for plan in plans for branch in plan.branches]
        for length in range(1, depth + 1 if growing else 1):
            self._deepen(growing)
            yield length

    def _fits(self, plan: ForkPlan, depth: int) -> bool:
        """Whether there are slots for it."""
        self._last_plans.pop(plan.seq.id, None)
        nodes = len(plan.trunk) + sum(plan.forks) * depth
        return self.cache.reserve(plan.seq, len(plan.seq.tokens), nodes)

    def read_trunks(self, plans: list[ForkPlan]) -> Tensor:
        """Logits after each text and after each token of its trunk. [sum of 1 + trunk, V]"""
        without_logits = partial(self._forward, part=replace(self.part, head=False))
        starts = [catch_up(self.cache, self.plane, plan.seq, without_logits) for plan in plans]
        batch = BatchBuilder(self.cache)
        for plan, start in zip(plans, starts, strict=True):
            batch.pending(plan.seq, start, len(plan.seq.tokens), want=True)
            for i, token in enumerate(plan.trunk):
                plan.add(token, i - 1)
            every = range(len(plan.trunk))
            batch.nodes(plan.seq, plan.tokens, plan.parents, every, every)
        logits = self._forward(batch, self.part)
        for plan in plans:
            self.plane.advance(plan.seq.id, len(plan.seq.tokens))
            self._last_plans[plan.seq.id] = plan
        return logits

    def _fork(self, plan: ForkPlan, logits: Tensor) -> None:
        """logits [1 + trunk, V]"""
        for accepted, forks in enumerate(plan.forks):
            drafted = plan.trunk[accepted : accepted + 1]
            if forks and plan.just_in_time and needs_q(plan.seq):
                token, probability, q = self._sampled(logits[accepted], plan.seq, [], 0)
                plan.branches.append(Branch(accepted, token, accepted - 1, probability, q=[q]))
            elif forks:
                best = self._ranked(logits[accepted], plan.seq, plan.trunk[:accepted], forks + len(drafted))
                others = [(token, probability) for token, probability in best if token not in drafted][:forks]
                plan.branches += [Branch(accepted, token, accepted - 1, p, q=[None]) for token, p in others]

    def _deepen(self, growing: list[tuple[ForkPlan, Branch]]) -> None:
        for plan, branch in growing:
            branch.tip = plan.add(branch.chain[-1] if branch.chain else branch.token, branch.tip)
        logits = self._run([(plan, branch.tip) for plan, branch in growing])  # [branches, V]
        if all(plan.seq.params.plain and not needs_q(plan.seq) for plan, _ in growing):  # in one operation
            choices: list[Choice] = [(token, confidence, None) for token, confidence in self._highest(logits)]
        else:
            choices = [self._choice(row, *each) for row, each in zip(logits, growing, strict=True)]
        for (_, branch), (token, confidence, q) in zip(growing, choices, strict=True):
            branch.chain.append(token)
            branch.survival.append(confidence * (branch.survival[-1] if branch.survival else 1.0))
            branch.q.append(q)

    def _choice(self, logits: Tensor, plan: ForkPlan, branch: Branch) -> Choice:
        """The next token of a branch. logits [V]"""
        emitted = [*plan.trunk[: branch.accepted], branch.token, *branch.chain]
        if needs_q(plan.seq):
            return self._sampled(logits, plan.seq, emitted, 0 if plan.just_in_time else branch.accepted + 1)
        return *self._ranked(logits, plan.seq, emitted, 1)[0], None

    def _sampled(self, logits: Tensor, seq: Sequence, emitted: list[int], start: int) -> Choice:
        """The token after `emitted` in a draft that starts at emitted[start], with that draft's own noise."""
        q = draft_distribution(distribution(logits, seq, emitted), self.tilt)
        dense = q.dense(int(q.ids.max()) + 1)
        token = draw(dense, key(seq.seed, len(emitted) - start, DRAFT, len(seq.tokens) + start))
        return token, float(dense[token]), q

    def _highest(self, logits: Tensor) -> list[tuple[int, float]]:
        """The most likely token of each row, and its probability. logits [R, V]"""
        high, ids = logits.max(-1)
        return list(zip(ids.tolist(), (high - logits.logsumexp(-1)).exp().tolist(), strict=True))

    def _ranked(self, logits: Tensor, seq: Sequence, emitted: list[int], width: int) -> list[tuple[int, float]]:
        rank = likeliest if needs_q(seq) or not self.target_noise else ranked
        return rank(logits, seq, emitted, width)

    def _run(self, nodes: list[tuple[ForkPlan, int]]) -> Tensor:
        """Feed these nodes, each attending to its own ancestors; logits after each. [nodes, V]"""
        batch = BatchBuilder(self.cache)
        for plan, node in nodes:
            batch.nodes(plan.seq, plan.tokens, plan.parents, [node], range(len(plan.tokens)))
        return self._forward(batch, self.part)

    def _forward(self, batch: BatchBuilder, part: Part) -> Tensor:
        """Logits of the wanted rows [R, V], on the host."""
        self.before_pass()
        if self.passes is not None:
            return self.passes.logits(batch, part).cpu()[:, : self.vocabulary]
        return self.model.forward(rows_of(batch), self.plane, part).logits.float()[:, : self.vocabulary]


def needs_q(seq: Sequence) -> bool:
    """Whether the sequence's acceptance rule needs drafts sampled from q."""
    return seq.rule != "match"


def likeliest(logits: Tensor, seq: Sequence, emitted: list[int], width: int) -> list[tuple[int, float]]:
    """The most likely tokens without noise, and their probabilities. logits [V]"""
    probabilities = torch.softmax(adjust(logits, seq, emitted).float() / (seq.params.temperature or 1.0), -1)
    best, ids = probabilities.topk(min(width, probabilities.shape[-1]))
    return list(zip(ids.tolist(), best.tolist(), strict=True))
