"""A draft model that prepares for many outcomes at once.

One pass over the text's end and the draft under verification (the trunk) gives the drafter's opinion after every prefix
of it; at each, the likeliest tokens become forks (but not the drafted one: a rejection never yields it), and all forks
of all sequences grow together, one pass for each depth. The cache is its own, so nothing here waits for the target or
disturbs it. When the text goes on, K/V of whatever came true is kept.

Under `match` forks are ranked with the target's own noise, which the drafter knows: at a temperature, that is what the
target will most likely choose. Under the rules that draw from q, forks are the likeliest tokens, and what follows them
is drawn, with randomness that depends on nothing but the place in the text: a draft made just in time is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from ...backends import WHOLE, Model, Part
from ...backends.rows import rows_of
from ...engine.batch import BatchBuilder
from ...engine.cache import Cache
from ...engine.sampling import DRAFT, adjust, draw, key, law, ranked
from ...types import Batch, Sequence
from .._rollout import catch_up
from .laws import Law, Tilt, drawn_from

REHEARSED = (1, 4, 8)  # drafted tokens of rounds that are rehearsed


class Logits(Protocol):
    """Passes on a device that is not driven operation by operation."""

    def logits(self, batch: Batch, part: Part) -> Tensor: ...


@dataclass
class Branch:
    """One outcome, and what would be drafted after it."""

    accepted: int  # tokens of the trunk
    token: int  # the target's own, after them
    tip: int  # the node to go on from
    odds: float = 1.0  # of the token
    chain: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    laws: list[Law | None] = field(default_factory=list)  # of the token, then of the chain; None: it was not drawn


@dataclass
class Plan:
    """What is prepared for one sequence. Node n of the tree that was fed lies in its n-th spare slot."""

    seq: Sequence
    trunk: list[int]
    forks: list[int]  # [len(trunk) + 1] outcomes to prepare for, by accepted length
    line: int = 0
    now: bool = False  # the one outcome is no outcome but the draft's own first token
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)

    def feed(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """The nodes from the root down to this one."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def follow(self, tokens: list[int]) -> list[int]:
        """The nodes that these tokens lead through, as far as they were fed."""
        path: list[int] = []
        for token in tokens:
            here = path[-1] if path else -1
            child = next((n for n, t in enumerate(self.tokens) if t == token and self.parents[n] == here), None)
            if child is None:
                break
            path.append(child)
        return path


class Forker:
    """A draft model with a cache of its own."""

    def __init__(
        self,
        model: Model,
        slots: int,
        lines: int,
        length: int,
        part: Part = WHOLE,
        vocabulary: int | None = None,  # the target's, where the model's is padded further
    ) -> None:
        self.model, self.part, self.vocabulary = model, part, vocabulary
        self.cache = Cache(slots, lines + 8, length, model.device)
        self.plane = self.cache.add_plane(*model.plane_shape)
        self.passes: Logits | None = None
        self.noised = True  # False: ranked without the target's noise, to measure what it is worth
        self.tilt = Tilt()  # of what is drawn
        self.beat: Callable[[], None] = lambda: None  # heard before every pass
        self._grown: dict[int, Plan] = {}  # by sequence: what the last round prepared

    # ------------------------------------------------------------ texts

    def open(self, seq: Sequence, owner: int = -1) -> None:
        """A text begins; `owner` is its name where the target runs."""
        self.cache.open(seq)

    def extend(self, seq: Sequence, more: list[int]) -> None:
        """The text went on: what was prepared and came true is kept."""
        plan, fed = self._grown.pop(seq.id, None), len(seq.tokens)
        seq.tokens += more
        if plan is not None and more:
            self.plane.wrote(seq.id, range(len(plan.tokens)))
            self.cache.commit(seq, fed, plan.follow(more))

    def close(self, seq: Sequence) -> None:
        self._grown.pop(seq.id, None)
        if seq.id in self.cache.rows:
            self.cache.free(seq, keep=True)

    # ------------------------------------------------------------ before anybody waits

    def rehearse(self) -> None:
        """Rounds over nothing, the smallest first (a larger one would stand in): nobody waits for a recording later."""
        seq = Sequence(-1, [0])
        self.open(seq)
        for trunk in REHEARSED:
            self.extend(seq, [0] * (trunk + 1))
            for forks in (1, trunk, 2 * trunk):
                list(self.grow([Plan(seq, [0] * trunk, [*[0] * trunk, forks])], 1))
            list(self.grow([Plan(seq, [], [1], now=True)], 1))
        self.close(seq)
        self.cache.drop_retired()

    @property
    def recorded(self) -> int:
        """Passes that a device has recorded."""
        return len(getattr(self.passes, "passes", ()))

    # ------------------------------------------------------------ a round

    def grow(self, plans: list[Plan], depth: int) -> Iterator[int]:
        """Prepare, one more token for every outcome at a time; yields how many each has. May be left at any time."""
        plans[:] = [plan for plan in plans if self._fits(plan, depth)]
        if not plans:
            yield 0
            return
        rows = iter(self.glue(plans).split([1 + len(plan.trunk) for plan in plans]))
        for plan in plans:
            self._fork(plan, next(rows))
        yield 0
        growing = [(plan, branch) for plan in plans for branch in plan.branches]
        for deep in range(1, depth + 1 if growing else 1):
            self._deepen(growing)
            yield deep

    def _fits(self, plan: Plan, depth: int) -> bool:
        """Whether there are slots for it."""
        self._grown.pop(plan.seq.id, None)
        nodes = len(plan.trunk) + sum(plan.forks) * depth
        return self.cache.reserve(plan.seq, len(plan.seq.tokens), nodes)

    def glue(self, plans: list[Plan]) -> Tensor:
        """Logits after each text and after each token of its trunk. [sum of 1 + trunk, V]"""
        starts = [catch_up(self.cache, self.plane, plan.seq, self._read) for plan in plans]
        packed = BatchBuilder(self.cache)
        for plan, start in zip(plans, starts, strict=True):
            packed.pending(plan.seq, start, len(plan.seq.tokens), want=True)
            for i, token in enumerate(plan.trunk):
                plan.feed(token, i - 1)
            every = range(len(plan.trunk))
            packed.nodes(plan.seq, plan.tokens, plan.parents, every, every)
        logits = self._forward(packed, self.part)
        for plan in plans:
            self.plane.advance(plan.seq.id, len(plan.seq.tokens))
            self._grown[plan.seq.id] = plan
        return logits

    def _fork(self, plan: Plan, logits: Tensor) -> None:
        """logits [1 + trunk, V]"""
        for accepted, forks in enumerate(plan.forks):
            drafted = plan.trunk[accepted : accepted + 1]
            if forks and plan.now and draws(plan.seq):
                token, odds, drawn = self._drawn(logits[accepted], plan.seq, [], 0)
                plan.branches.append(Branch(accepted, token, accepted - 1, odds, laws=[drawn]))
            elif forks:
                best = self._ranked(logits[accepted], plan.seq, plan.trunk[:accepted], forks + len(drafted))
                others = [(token, odds) for token, odds in best if token not in drafted][:forks]
                plan.branches += [Branch(accepted, token, accepted - 1, odds, laws=[None]) for token, odds in others]

    def _deepen(self, growing: list[tuple[Plan, Branch]]) -> None:
        for plan, branch in growing:
            branch.tip = plan.feed(branch.chain[-1] if branch.chain else branch.token, branch.tip)
        logits = self._run([(plan, branch.tip) for plan, branch in growing])  # [branches, V]
        for (_, branch), (token, confidence, drawn) in zip(growing, self._choices(logits, growing), strict=True):
            branch.chain.append(token)
            branch.survival.append(confidence * (branch.survival[-1] if branch.survival else 1.0))
            branch.laws.append(drawn)

    # ------------------------------------------------------------ choosing

    def _choices(self, logits: Tensor, growing: list[tuple[Plan, Branch]]) -> list[tuple[int, float, Law | None]]:
        """One token after each branch, how sure of it the drafter is, and what it was drawn from."""
        if all(plan.seq.params.plain and not draws(plan.seq) for plan, _ in growing):  # all of them at once
            return [(token, confidence, None) for token, confidence in self._highest(logits)]
        return [self._choice(row, *each) for row, each in zip(logits, growing, strict=True)]

    def _choice(self, logits: Tensor, plan: Plan, branch: Branch) -> tuple[int, float, Law | None]:
        emitted = [*plan.trunk[: branch.accepted], branch.token, *branch.chain]
        if draws(plan.seq):
            return self._drawn(logits, plan.seq, emitted, 0 if plan.now else branch.accepted + 1)
        return *self._ranked(logits, plan.seq, emitted, 1)[0], None

    def _drawn(self, logits: Tensor, seq: Sequence, emitted: list[int], begin: int) -> tuple[int, float, Law]:
        """A token of a draft that begins after `begin` of these, as it would be drawn when the text is there."""
        drawn = drawn_from(self._law(logits, seq, emitted), self.tilt)
        chances = drawn.spread(int(drawn.ids.max()) + 1)
        token = draw(chances, key(seq.seed, len(emitted) - begin, DRAFT, len(seq.tokens) + begin))
        return token, float(chances[token]), drawn

    def _highest(self, logits: Tensor) -> list[tuple[int, float]]:
        """The likeliest token of each row, and its chance. logits [R, V]"""
        high, ids = logits.max(-1)
        return list(zip(ids.tolist(), (high - logits.logsumexp(-1)).exp().tolist(), strict=True))

    def _ranked(self, logits: Tensor, seq: Sequence, emitted: list[int], width: int) -> list[tuple[int, float]]:
        rank = likeliest if draws(seq) or not self.noised else ranked
        return rank(logits, seq, emitted, width)

    def _law(self, logits: Tensor, seq: Sequence, emitted: list[int]) -> Tensor:
        """What the drafter believes comes next. [V]"""
        return law(logits, seq, emitted)

    # ------------------------------------------------------------ running

    def _run(self, nodes: list[tuple[Plan, int]]) -> Tensor:
        """Feed these nodes, each seeing its own ancestors; logits after each. [nodes, V]"""
        packed = BatchBuilder(self.cache)
        for plan, node in nodes:
            packed.nodes(plan.seq, plan.tokens, plan.parents, [node], range(len(plan.tokens)))
        return self._forward(packed, self.part)

    def _read(self, packed: BatchBuilder) -> None:
        """A pass that nobody wants logits of."""
        self._forward(packed, replace(self.part, head=False))

    def _forward(self, packed: BatchBuilder, part: Part) -> Tensor:
        """Logits of the wanted rows [R, V] on the host."""
        self.beat()
        if self.passes is not None:
            return self.passes.logits(packed, part).cpu()[:, : self.vocabulary]
        return self.model.forward(rows_of(packed), self.plane, part).logits.float()[:, : self.vocabulary]


def draws(seq: Sequence) -> bool:
    """Whether its rule wants drafts drawn from q."""
    return seq.rule != "match"


def likeliest(logits: Tensor, seq: Sequence, emitted: list[int], width: int) -> list[tuple[int, float]]:
    """The likeliest tokens without any noise, and their chances: what forks are where tokens are drawn. logits [V]"""
    chances = torch.softmax(adjust(logits, seq, emitted).float() / (seq.params.temperature or 1.0), -1)
    confidence, ids = chances.topk(min(width, chances.shape[-1]))
    return list(zip(ids.tolist(), confidence.tolist(), strict=True))
