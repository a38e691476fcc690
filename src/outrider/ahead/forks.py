"""A draft model that prepares for many outcomes at once.

One pass over the text's end and the draft under verification (the trunk) gives the drafter's opinion after every prefix
of it; at each, the likeliest tokens become forks (but not the drafted one: a rejection never yields it), and all forks
of all sequences grow together, one pass for each depth. The cache is its own, so nothing here waits for the target or
disturbs it. When the text goes on, K/V of whatever came true is kept.

Under `match` forks are ranked with the target's own noise, which the drafter knows: at a temperature, that is what the
target will most likely choose. Under the rules that draw from q, only single chains are asked for (see `likeliest`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from ..cache import Cache, Packing
from ..models import WHOLE, Model, Part, device_of
from ..sampling import adjust, ranked
from ..types import Rows, Sequence

CHUNK = 512  # rows of one pass while reading a long prompt


class Logits(Protocol):
    """Passes on a device that is not driven operation by operation."""

    def logits(self, rows: Rows, part: Part) -> Tensor: ...


@dataclass
class Branch:
    """One outcome, and what would be drafted after it."""

    accepted: int  # tokens of the trunk
    token: int  # the target's own, after them
    tip: int  # the node to go on from
    odds: float = 1.0  # of the token
    chain: list[int] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)


@dataclass
class Plan:
    """What is prepared for one sequence. Node n of the tree that was fed lies in its n-th spare slot."""

    seq: Sequence
    trunk: list[int]
    forks: list[int]  # [len(trunk) + 1] outcomes to prepare for, by accepted length
    line: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)

    def feed(self, token: int, parent: int) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

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

    def __init__(self, model: Model, slots: int, lines: int, length: int, part: Part = WHOLE) -> None:
        self.model, self.part = model, part
        self.cache = Cache(slots, lines + 8, length, device_of(model))
        self.plane = self.cache.add_plane(*model.plane_shape)
        self.passes: Logits | None = None
        self.noised = True  # False: ranked without the target's noise, to measure what it is worth
        self.beat: Callable[[], None] = lambda: None  # heard before every pass
        self._grown: dict[int, Plan] = {}  # by sequence: what the last round prepared

    # ------------------------------------------------------------ texts

    def open(self, seq: Sequence) -> None:
        self.cache.open(seq)

    def extend(self, seq: Sequence, more: list[int]) -> None:
        """The text went on: what was prepared and came true is kept."""
        plan, fed = self._grown.pop(seq.id, None), len(seq.tokens)
        seq.tokens += more
        if plan is not None and more:
            self.plane.nodes[seq.id] = frozenset(range(len(plan.tokens)))
            self.cache.commit(seq, fed, plan.follow(more))

    def close(self, seq: Sequence) -> None:
        self._grown.pop(seq.id, None)
        if seq.id in self.cache.rows:
            self.cache.free(seq, keep=True)

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
        starts = [self._catch_up(plan.seq) for plan in plans]
        packed = Packing(self.cache)
        for plan, start in zip(plans, starts, strict=True):
            packed.pending(plan.seq, start, len(plan.seq.tokens), want=True)
            for i, token in enumerate(plan.trunk):
                plan.feed(token, i - 1)
            every = range(len(plan.trunk))
            packed.nodes(plan.seq, plan.tokens, plan.parents, every, every)
        logits = self._forward(packed, self.part)
        for plan in plans:
            self.plane.held[plan.seq.id] = len(plan.seq.tokens)
            self._grown[plan.seq.id] = plan
        return logits

    def _catch_up(self, seq: Sequence) -> int:
        """Feed all but the last chunk of what is lacking; returns where the rest begins (never past the end)."""
        start = min(self.cache.sync(seq, self.plane), len(seq.tokens) - 1)
        while len(seq.tokens) - start > CHUNK:
            packed = Packing(self.cache)
            packed.pending(seq, start, start + CHUNK, want=False)
            self._forward(packed, replace(self.part, head=False))
            start += CHUNK
            self.plane.held[seq.id] = start
        return start

    def _fork(self, plan: Plan, logits: Tensor) -> None:
        """logits [1 + trunk, V]"""
        for accepted, forks in enumerate(plan.forks):
            drafted = plan.trunk[accepted : accepted + 1]
            if forks:
                best = self._ranked(logits[accepted], plan.seq, plan.trunk[:accepted], forks + len(drafted))
                others = [(token, odds) for token, odds in best if token not in drafted][:forks]
                plan.branches += [Branch(accepted, token, accepted - 1, odds) for token, odds in others]

    def _deepen(self, growing: list[tuple[Plan, Branch]]) -> None:
        packed = Packing(self.cache)
        for plan, branch in growing:
            branch.tip = plan.feed(branch.chain[-1] if branch.chain else branch.token, branch.tip)
            packed.nodes(plan.seq, plan.tokens, plan.parents, [branch.tip], range(len(plan.tokens)))
        logits = self._forward(packed, self.part)  # [branches, V]
        for (_, branch), (token, confidence) in zip(growing, self._choices(logits, growing), strict=True):
            branch.chain.append(token)
            branch.survival.append(confidence * (branch.survival[-1] if branch.survival else 1.0))

    # ------------------------------------------------------------ choosing

    def _choices(self, logits: Tensor, growing: list[tuple[Plan, Branch]]) -> Iterable[tuple[int, float]]:
        """One token after each branch, and how sure of it the drafter is."""
        if all(plan.seq.params.plain for plan, _ in growing):  # nothing but the highest: all of them at once
            high, ids = logits.max(-1)
            return zip(ids.tolist(), (high - logits.logsumexp(-1)).exp().tolist(), strict=True)
        return [
            self._ranked(row, plan.seq, [*plan.trunk[: branch.accepted], branch.token, *branch.chain], 1)[0]
            for row, (plan, branch) in zip(logits, growing, strict=True)
        ]

    def _ranked(self, logits: Tensor, seq: Sequence, emitted: list[int], width: int) -> list[tuple[int, float]]:
        rank = ranked if self.noised and seq.rule == "match" else likeliest
        return rank(logits, seq, emitted, width)

    def _forward(self, packed: Packing, part: Part) -> Tensor:
        """Logits of the wanted rows [R, V] on the host."""
        self.beat()
        if self.passes is not None:
            return self.passes.logits(packed.rows(), part).cpu()
        return self.model.forward(packed.rows(), self.plane, part).logits.float()


def likeliest(logits: Tensor, seq: Sequence, emitted: list[int], width: int) -> list[tuple[int, float]]:
    """The likeliest tokens without any noise. [V]

    For rules that draw from q: a token that was chosen for certain is a law with all its mass on it, which no q has to
    be handed over for. It is accepted as often as p says, and the likeliest is accepted most.
    """
    chances = torch.softmax(adjust(logits, seq, emitted).float() / (seq.params.temperature or 1.0), -1)
    confidence, ids = chances.topk(min(width, chances.shape[-1]))
    return list(zip(ids.tolist(), confidence.tolist(), strict=True))
