"""Acceptance by position on held-out answers: what a chain of drafts would have brought.

Promise: counts are those of greedy chains from every place of the answers, and τ is that of a walk through them, as
decoding would go, bonus included. It reads a student's hits and knows neither nets nor files.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .answers import Answer
from .batches import Batch, collate, cut, pack, usable

ALL = "all"


@dataclass
class Acceptance:
    """Counts of one kind of text."""

    reached: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)
    steps: int = 0  # of the walk
    emitted: int = 0

    @property
    def alpha_by_position(self) -> list[float]:
        """How often a drafted token is right, once the ones before it were."""
        return [a / r for a, r in zip(self.accepted, self.reached, strict=True) if r]

    @property
    def tau(self) -> float:
        """Tokens per target pass, bonus included."""
        return self.emitted / self.steps if self.steps else 1.0

    @property
    def alpha(self) -> float:
        return sum(self.accepted) / max(sum(self.reached), 1)

    def count(self, hits: Tensor) -> None:
        """hits [n-1, K] of one sequence: 1, 0, or -1 where there is nothing to predict."""
        so_far = torch.ones_like(hits[:, 0], dtype=torch.bool)
        for j in range(hits.shape[1]):
            if len(self.reached) == j:
                self.reached.append(0)
                self.accepted.append(0)
            reached = so_far & (hits[:, j] >= 0)
            so_far = reached & (hits[:, j] == 1)
            self.reached[j] += int(reached.sum())
            self.accepted[j] += int(so_far.sum())
        self._walk((hits == 1).long().cumprod(1).sum(1).tolist(), (hits[:, 0] >= 0).nonzero().flatten().tolist())

    def _walk(self, runs: list[int], roots: list[int]) -> None:
        """runs [n-1]: how many drafts are right from each row."""
        if not roots:
            return
        at, last = roots[0], roots[-1]
        while at <= last:
            emitted = min(runs[at] + 1, last + 1 - at)
            self.steps, self.emitted, at = self.steps + 1, self.emitted + emitted, at + emitted

    def as_json(self) -> dict[str, Any]:
        whole = {"alpha": self.alpha, "tau": self.tau, "tokens": self.emitted}
        return {"alpha_by_position": self.alpha_by_position} | whole


def evaluate(hits: Callable[[Batch], Tensor], batches: Iterable[Batch]) -> dict[str, Acceptance]:
    """By kind of text; `all` comes first."""
    found = {ALL: Acceptance()}
    for batch in batches:
        for each, kind in zip(hits(batch).cpu(), batch.kinds, strict=True):
            found[ALL].count(each)
            found.setdefault(kind, Acceptance()).count(each)
    return found


def held_out(answers: list[Answer], budget: int, longest: int) -> list[Batch]:
    """The held-out answers in batches, always the same ones."""
    items = sorted((cut(a, min(longest, budget)) for a in answers if a.held), key=lambda a: a.length)
    items = [a for a in items if usable(a)]
    groups = pack([a.length for a in items], list(range(len(items))), budget)
    return [collate([items[i] for i in group], 0, random.Random(0)) for group in groups]
