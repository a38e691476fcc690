"""Acceptance on held-out answers: what greedy chains of drafts would have gained.

Acceptance by position counts chains from every row of the answers. τ is that of a walk through them, as in decoding,
with the bonus token. This module reads an objective's hits; it knows neither networks nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .batches import Batch

ALL = "all"


@dataclass
class Acceptance:
    """Counts for one kind of text."""

    reached: list[int] = field(default_factory=list)  # by position
    accepted: list[int] = field(default_factory=list)
    steps: int = 0  # of the walk
    emitted: int = 0

    @property
    def tau(self) -> float:
        """Tokens per target pass, bonus included."""
        return self.emitted / self.steps if self.steps else 1.0

    def count(self, hits: Tensor) -> None:
        """hits [n-1, K] of one sequence: 1, 0, or -1 where there is nothing to predict."""
        right_so_far = torch.ones_like(hits[:, 0], dtype=torch.bool)
        for j in range(hits.shape[1]):
            if len(self.reached) == j:
                self.reached.append(0)
                self.accepted.append(0)
            reached = right_so_far & (hits[:, j] >= 0)
            right_so_far = reached & (hits[:, j] == 1)
            self.reached[j] += int(reached.sum())
            self.accepted[j] += int(right_so_far.sum())
        self._walk((hits == 1).long().cumprod(1).sum(1).tolist(), (hits[:, 0] >= 0).nonzero().flatten().tolist())

    def _walk(self, runs: list[int], roots: list[int]) -> None:
        """runs [n-1]: how many drafts are right from each row."""
        row, end = (roots[0], roots[-1] + 1) if roots else (0, 0)
        while row < end:
            emitted = min(runs[row] + 1, end - row)
            self.steps, self.emitted, row = self.steps + 1, self.emitted + emitted, row + emitted

    def as_json(self) -> dict[str, Any]:
        """`alpha_by_position` is the share of drafted tokens that are right once the ones before them were."""
        by_position = [a / r for a, r in zip(self.accepted, self.reached, strict=True) if r]
        alpha = sum(self.accepted) / max(sum(self.reached), 1)
        return {"alpha_by_position": by_position, "alpha": alpha, "tau": self.tau, "tokens": self.emitted}


def evaluate(hits: Callable[[Batch], Tensor], batches: Iterable[Batch]) -> dict[str, Acceptance]:
    """By kind of text; `all` comes first."""
    kinds = {ALL: Acceptance()}
    for batch in batches:
        for sequence, kind in zip(hits(batch).cpu(), batch.kinds, strict=True):
            kinds[ALL].count(sequence)
            kinds.setdefault(kind, Acceptance()).count(sequence)
    return kinds
