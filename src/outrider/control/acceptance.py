"""Acceptance of drafted nodes: by claimed survival, and by depth. Rates and counts; of tokens only equality."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate
from operator import mul

from ..types import ACCEPTED, REJECTED, REQUEST_DRAFTS, Tree


class Rate:
    """A success rate with exponential forgetting, shrunk towards a prior while there are few trials."""

    WEIGHT = 4.0  # trials that the prior counts as

    def __init__(self) -> None:
        self.hits = self.tries = 0.0

    def add(self, hit: bool, fade: float) -> None:
        self.hits, self.tries = self.hits * fade + hit, self.tries * fade + 1

    def estimate(self, prior: float) -> float:
        return (self.hits + self.WEIGHT * prior) / (self.tries + self.WEIGHT)


class AcceptanceStats:
    """Acceptance of drafted nodes by claimed survival, and by depth where the drafter claims none.

    The prior of a sequence's statistics are those of all sequences (`wider`); their prior is the drafter's claim.
    """

    EDGES = (0.03, 0.06, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # of the classes of claims
    FIRST = 0.5  # the rate of a depth of which nothing is known

    def __init__(self, wider: AcceptanceStats | None = None) -> None:
        self.wider = wider
        self.fade = 0.98 if wider else 0.995  # the last fifty trials of a sequence count, and two hundred of all
        self.claims: dict[tuple[str, int], Rate] = defaultdict(Rate)  # by (source, class of EDGES)
        self.depths: list[Rate] = []
        self.usual_claims: list[float] = []  # of trees with branches, best node first
        self.source = ""  # of these
        self.trees = self.added = 0  # drafts with branches; drafts
        self._expected: dict[int, list[float]] = {}  # by nodes, after `_expected_at` drafts of its own and of all
        self._expected_at = (0, 0)

    def survival(self, claim: float, source: str = "") -> float:
        """The survival of a node for which its drafter claims `claim`."""
        prior = self.wider.survival(claim, source) if self.wider else claim
        rate = self.claims.get((source, bisect_right(self.EDGES, claim)))
        return prior if rate is None else rate.estimate(prior)

    def rates(self, depths: int) -> list[float]:
        """Acceptance of the node at each depth of a chain, given that it is reached."""
        if self.wider:
            rates = self.wider.rates(depths)
            known = [rate.estimate(prior) for rate, prior in zip(self.depths, rates, strict=False)]
            return known + rates[len(known) :]
        # The prior of each depth is the estimate of the depth before.
        rates = list(accumulate(self.depths[:depths], lambda last, r: r.estimate(last), initial=self.FIRST))
        return rates[1:] + rates[-1:] * (depths + 1 - len(rates))

    def expected_survival(self, nodes: int) -> list[float]:
        """Survival of the nodes of the next draft, best first: by the usual claims of trees, else along a chain."""
        now = (self.added, self.wider.added if self.wider else 0)
        if now != self._expected_at:
            self._expected, self._expected_at = {}, now
        if nodes not in self._expected:
            self._expected[nodes] = self._expect(nodes)
        return self._expected[nodes]

    def _expect(self, nodes: int) -> list[float]:
        if self.wider and not self.added:
            return self.wider.expected_survival(nodes)
        known = self if self.usual_claims or self.wider is None else self.wider
        if not known.usual_claims:
            return list(accumulate(self.rates(nodes), mul))
        claims, last = known.usual_claims[:nodes], known.usual_claims[-1]
        fade = last ** (1 / len(known.usual_claims))  # of nodes that were not verified yet
        claims += [last * fade**i for i in range(1, nodes - len(claims) + 1)]
        return list(accumulate((self.survival(claim, known.source) for claim in claims), min))

    def add(self, tree: Tree, path: list[int], fates: str) -> None:
        """A verified draft."""
        self.added, accepted = self.added + 1, len(path)
        if tree.source not in REQUEST_DRAFTS:  # rates by depth are the drafter's
            self._add_depths(accepted + (REJECTED in fates), accepted)
        if tree.survival is not None and (self.trees or not tree.is_chain):
            self._add_usual(tree.survival, tree.source)
        for claim, fate in zip(tree.survival or (), fates, strict=False):
            self.claims[tree.source, bisect_right(self.EDGES, claim)].add(fate == ACCEPTED, self.fade)

    def add_unverified(self, tree: Tree, token: int) -> None:
        """A draft that was not verified, and the token that came instead: the nodes at depth 1 are settled by it."""
        self.added += 1
        roots = [node for node, parent in enumerate(tree.parents) if parent < 0]
        if tree.source not in REQUEST_DRAFTS:
            self._add_depths(1, any(tree.tokens[node] == token for node in roots))
        for node in roots if tree.survival is not None else ():
            rate = self.claims[tree.source, bisect_right(self.EDGES, tree.survival[node])]  # type: ignore[index]
            rate.add(tree.tokens[node] == token, self.fade)

    def _add_usual(self, claims: list[float], source: str) -> None:
        if not self.trees or source == self.source:
            self.trees, self.source = self.trees + 1, source
            rate = max(0.05, 1 / self.trees)  # the last twenty trees count
            self.usual_claims += claims[len(self.usual_claims) :]
            for rank, claim in enumerate(claims):
                self.usual_claims[rank] += rate * (claim - self.usual_claims[rank])

    def _add_depths(self, reached: int, accepted: int) -> None:
        self.depths += [Rate() for _ in range(reached - len(self.depths))]
        for depth, rate in enumerate(self.depths[:reached]):
            rate.add(depth < accepted, self.fade)
