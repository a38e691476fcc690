"""Which outcomes of a verification are worth preparing for.

An outcome is (how many drafted tokens are accepted, the token that the target adds). How many are accepted follows the
acceptance rate α: P(k) = α^k (1 - α) before the end of a draft of K, P(K) = α^K. That the added token is none of the F
likeliest is a power law, miss(F) = c F^-r: fitted to what was seen, once for rejections (where the drafted token is
excluded, so the drafter's own first choice is known to be wrong) and once for the end of the draft.

`fan_out` spends forks one by one where they bring most. For one law and large numbers that is Saguaro's geometric rule,
F_k ∝ P(k)^(1 / (1 + r)) (arXiv 2603.03251, theorem 12); in whole numbers it is exact, and needs no rule for remainders.
It sees numbers, never tokens.
"""

from __future__ import annotations

import math
from heapq import heapify, heapreplace
from typing import NamedTuple


class Law(NamedTuple):
    """miss(F) = c F^-r"""

    c: float
    r: float

    def miss(self, forks: int) -> float:
        return self.c * forks**-self.r if forks else 1.0


class Curve:
    """How often the target's token is missed by so many forks: counted with every outcome, the recent past first."""

    FADE, WEIGHT, MOST = 0.995, 6.0, 64

    def __init__(self, prior: Law) -> None:
        self.prior = prior
        self.tried = [0.0] * self.MOST  # by forks - 1
        self.missed = [0.0] * self.MOST

    def add(self, rank: int | None, forks: int) -> None:
        """There were so many forks; the token was the rank-th of them (from 1), or none."""
        for i in range(min(forks, self.MOST)):
            self.tried[i] = self.tried[i] * self.FADE + 1
            self.missed[i] = self.missed[i] * self.FADE + (rank is None or rank > i + 1)

    def rate(self, forks: int) -> float:
        """The measured miss rate, leaning on the prior while little was seen."""
        i = forks - 1
        return (self.missed[i] + self.WEIGHT * self.prior.miss(forks)) / (self.tried[i] + self.WEIGHT)

    @property
    def law(self) -> Law:
        """The straight line through the logarithms, each fan-out weighted by how often it was tried."""
        points = [
            (math.log(f), math.log(max(self.rate(f), 1e-4)), self.tried[f - 1] + self.WEIGHT)
            for f in range(1, self.MOST + 1)
            if f <= 4 or self.tried[f - 1] >= self.WEIGHT
        ]
        total = sum(w for _, _, w in points)
        x0, y0 = (sum(p[i] * p[2] for p in points) / total for i in (0, 1))
        slope = sum(w * (x - x0) * (y - y0) for x, y, w in points) / sum(w * (x - x0) ** 2 for x, _, w in points)
        r = min(max(-slope, 0.05), 4.0)
        return Law(min(math.exp(y0 + r * x0), 0.98), r)

    def measured(self) -> list[float]:
        """Hit rates by fan-out, as far as there is something behind them."""
        return [round(1 - m / t, 4) for m, t in zip(self.missed, self.tried, strict=True) if t >= 1]


def chances(alpha: float, length: int) -> list[float]:
    """P(k) for k = 0 … length accepted tokens."""
    return [alpha**k * (1 - alpha) for k in range(length)] + [alpha**length]


def fan_out(likely: list[float], forks: int, inside: Law, end: Law) -> list[int]:
    """How many forks each accepted length gets, `forks` in all, so that the next outcome is most often among them.

    likely[k] is P(k); the last is the end of the draft.
    """
    laws = [inside] * (len(likely) - 1) + [end]
    given = [0] * len(likely)

    def gain(k: int) -> float:
        return likely[k] * (laws[k].miss(given[k]) - laws[k].miss(given[k] + 1))

    heap = [(-gain(k), k) for k in range(len(likely))]
    heapify(heap)
    for _ in range(forks):
        k = heap[0][1]
        given[k] += 1
        heapreplace(heap, (-gain(k), k))
    return given
