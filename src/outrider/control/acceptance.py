"""Acceptance of drafted nodes: by claimed survival, and by rank. Rates and counts; of tokens only equality."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from ..types import ACCEPTED, REJECTED, REQUEST_DRAFTS, Tree


class Rate:
    """A success rate with exponential forgetting, shrunk towards a prior while there are few trials."""

    WEIGHT = 4.0  # trials that a prior counts as

    def __init__(self) -> None:
        self.hits = self.tries = 0.0

    def add(self, hit: bool, fade: float, tried: bool = True) -> None:
        self.hits, self.tries = self.hits * fade + hit, self.tries * fade + tried

    def estimate(self, prior: float, weight: float = WEIGHT) -> float:
        return (self.hits + weight * prior) / (self.tries + weight)


class AcceptanceStats:
    """How many drafted nodes survive: of those with a given claim, and of the first, second, … of a draft.

    The prior of a sequence's statistics are those of all sequences (`wider`); their prior is the drafter's claim.
    """

    EDGES = (0.03, 0.06, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # of the classes of claims
    FIRST = 0.5  # the survival of the first node of which nothing is known

    def __init__(self, wider: AcceptanceStats | None = None) -> None:
        self.wider = wider
        self.fade = 0.98 if wider else 0.995  # the last fifty trials of a sequence count, and two hundred of all
        self.weight = 1.5 * Rate.WEIGHT if wider else Rate.WEIGHT  # a sequence's own trials are among those of all
        self.claims: dict[tuple[str, int], Rate] = defaultdict(Rate)  # by (source, class of EDGES)
        self.ranks: list[Rate] = []  # by a node's place in its draft: in a chain, its depth
        self.added = 0  # drafts
        self._expected: list[float] = []  # for so many nodes, after so many drafts of its own and of all:
        self._expected_at = (-1, 0, 0)

    def survival(self, claim: float, source: str = "") -> float:
        """The survival of a node for which its drafter claims `claim`."""
        prior = self.wider.survival(claim, source) if self.wider else claim
        rate = self.claims.get((source, bisect_right(self.EDGES, claim)))
        return prior if rate is None else rate.estimate(prior, self.weight)

    def rates(self, nodes: int) -> list[float]:
        """Of each node of a draft: how many survive for each one before it that survives."""
        priors = self.wider.rates(nodes) if self.wider else []
        rates, known = list[float](), Rate()
        for rank in range(nodes):  # without others, the prior is the rate of the ranks before, the nearest count most
            prior = priors[rank] if priors else known.estimate(self.FIRST)
            rate = self.ranks[rank] if rank < len(self.ranks) else Rate()
            rates.append(min(rate.estimate(prior, self.weight), 1.0))
            known.hits, known.tries = known.hits / 2 + rate.hits, known.tries / 2 + rate.tries
        return rates

    def expected_survival(self, nodes: int) -> list[float]:
        """Survival of the nodes of the next draft, best first."""
        now = nodes, self.added, self.wider.added if self.wider else 0
        if now != self._expected_at:
            self._expected, self._expected_at = list(accumulate(self.rates(nodes), mul)), now
        return self._expected

    def foresee(self, survival: Sequence[float], drafts: float) -> None:
        """Begin with what a drafter's maker measured by depth, as so many drafts."""
        for before, chance in pairwise((1.0, *survival)):
            rate = Rate()
            rate.hits, rate.tries = drafts * chance / before if before else 0.0, drafts
            self.ranks.append(rate)

    def add(self, tree: Tree, fates: str) -> None:
        """A draft and the fates of its nodes, or of the first ones."""
        if self.wider:
            self.wider.add(tree, fates)
        self.added += 1
        for claim, fate in zip(tree.survival or (), fates, strict=False):
            self.claims[tree.source, bisect_right(self.EDGES, claim)].add(fate == ACCEPTED, self.fade)
        if tree.source not in REQUEST_DRAFTS:  # the rest is about the drafter
            before = True
            self.ranks += [Rate() for _ in range(len(fates) - len(self.ranks))]
            for rate, hit in zip(self.ranks, (fate == ACCEPTED for fate in fates), strict=False):
                if before or hit:
                    rate.add(hit, self.fade, before)
                before = hit

    def add_unverified(self, tree: Tree, token: int) -> None:
        """A draft that was not verified, and the token that came there: it rejects the nodes up to its own, or all."""
        roots = (node for node, parent in enumerate(tree.parents) if parent < 0)
        hit = next((node for node in roots if tree.tokens[node] == token), None)
        self.add(tree, REJECTED * len(tree.tokens) if hit is None else REJECTED * hit + ACCEPTED)
