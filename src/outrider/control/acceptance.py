"""Acceptance of drafts, and the survival below which drafting stops. Rates and counts, never tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate
from operator import mul

from ..types import ACCEPTED, REJECTED, REQUEST_DRAFTS, Tree


class Rate:
    """A success rate with exponential forgetting, shrunk towards a prior while there are few trials."""

    FADE, WEIGHT = 0.98, 4.0

    def __init__(self) -> None:
        self.hits = self.tries = 0.0

    def add(self, hit: bool) -> None:
        self.hits, self.tries = self.hits * self.FADE + hit, self.tries * self.FADE + 1

    def estimate(self, prior: float) -> float:
        return (self.hits + self.WEIGHT * prior) / (self.tries + self.WEIGHT)


class AcceptanceStats:
    """Acceptance of drafted nodes by claimed survival, and by depth where the drafter claims none.

    The prior of a sequence's statistics are those of all sequences (`wider`); their prior is the drafter's claim.
    """

    EDGES = (0.03, 0.06, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)

    def __init__(self, wider: AcceptanceStats | None = None) -> None:
        self.wider = wider
        self.claims: dict[tuple[str, int], Rate] = defaultdict(Rate)  # by (source, bucket of EDGES)
        self.depths: list[Rate] = []
        self.added = 0  # trees, ever
        self._cached: dict[int, tuple[tuple[int, int], list[float]]] = {}  # depths -> `added` (own, wider), rates

    def survival(self, claim: float, source: str = "") -> float:
        """The survival of a node for which its drafter claims `claim`."""
        prior = self.wider.survival(claim, source) if self.wider else claim
        return self.claims[source, bisect_right(self.EDGES, claim)].estimate(prior)

    def rates(self, depths: int) -> list[float]:
        """Acceptance of the node at each depth of a chain, given that it is reached."""
        version = (self.added, self.wider.added if self.wider else 0)
        cached, rates = self._cached.get(depths, (None, []))
        if cached != version:
            if self.wider:
                priors = self.wider.rates(depths)
                rates = [rate.estimate(prior) for rate, prior in zip(self.depths, priors, strict=False)]
                rates += priors[len(rates) :]
            else:  # the prior of each depth is the estimate of the depth before
                rates = list(accumulate(self.depths[:depths], lambda last, rate: rate.estimate(last), initial=0.5))[1:]
                rates += rates[-1:] * (depths - len(rates)) if rates else [0.5] * depths
            self._cached[depths] = version, rates
        return rates

    def chain_survival(self, depths: int) -> list[float]:
        """Survival of a chain to each depth."""
        return list(accumulate(self.rates(depths), mul))

    def refuse(self) -> None:
        """A draft was made and not worth verifying: for the decision to draft again it counts as rejected."""
        self.added += 1
        self._add_depths(1, 0)

    def add(self, tree: Tree, path: list[int], fates: str) -> None:
        self.added += 1
        if tree.source not in REQUEST_DRAFTS:  # rates by depth are the drafter's
            self._add_depths(len(path) + (REJECTED in fates), len(path))
        for claim, fate in zip(tree.survival or (), fates, strict=False):
            self.claims[tree.source, bisect_right(self.EDGES, claim)].add(fate == ACCEPTED)

    def _add_depths(self, reached: int, accepted: int) -> None:
        self.depths += [Rate() for _ in range(reached - len(self.depths))]
        for depth, rate in enumerate(self.depths[:reached]):
            rate.add(depth < accepted)


class StopThreshold:
    """The survival below which a drafter stops extending a chain (the rule of Draft & Verify).

    It starts at break-even, rises while too few drafted tokens are accepted, and falls otherwise, unless drafts use
    their whole budget. Tokens worth drafting survive between break-even and 1: fewer than the middle is too few.
    """

    FADE, STEP, HIGHEST = 0.8, 0.01, 0.9

    def __init__(self) -> None:
        self.value: float | None = None  # None: break-even is not known yet
        self.break_even = 0.0
        self.accepted: float | None = None  # recent share of drafted tokens

    def below(self, break_even: float) -> float:
        """The threshold, where one more token for each sequence needs this survival to pay."""
        self.break_even = min(max(break_even, 0.0), 1.0)
        if self.value is None:
            self.value = min(self.break_even, self.HIGHEST)
        return self.value

    def learn(self, drafted: int, accepted: int, budget: int) -> None:
        """Tokens of one verified chain."""
        if self.value is None or not drafted:
            return
        share = accepted / drafted
        self.accepted = share if self.accepted is None else self.FADE * self.accepted + (1 - self.FADE) * share
        if self.accepted < (1 + self.break_even) / 2:
            self.value = min(self.value + self.STEP, self.HIGHEST)
        elif drafted < budget:
            self.value = max(self.value - self.STEP, 0.0)
