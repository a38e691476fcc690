"""What drafting ahead has brought: hits by outcome, time hidden and exposed, and the curves behind the forks.

Counters for people and for the choice of forks; nothing here knows a token.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from .curve import Curve, Law, chances, fan_out

FADE = 0.99


@dataclass(frozen=True)
class Round:
    """One answer of the worker that somebody took, in moments of one clock: for whoever draws timelines."""

    posted: float
    times: tuple[float, ...]  # when it began, when outcomes were known, when each depth was there
    waited: tuple[float, float]  # from when to when the engine did
    depth: int  # asked for
    outcomes: tuple[tuple[int, int, bool], ...] = ()  # accepted, of so many, and whether it was prepared for
    now: bool = False  # a draft just in time


@dataclass
class Account:
    """All that is counted, and what follows from it."""

    hits: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by outcome: "2" accepted, "end"
    misses: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    late: int = 0  # outcomes of rounds whose forks were not known in time
    fallbacks: int = 0  # drafts that came from a fallback
    jits: int = 0  # drafts made just in time
    busy: float = 0.0  # seconds of drafting ahead
    exposed: float = 0.0  # seconds of it that the engine waited for
    jit: float = 0.0  # seconds that the engine waited for drafts just in time
    each: float = 0.0  # of a token of these, of late
    first: float = 0.0  # seconds until a round's forks are known, of late
    deeper: float = 0.0  # seconds of one more depth of all of them
    accepted: float = 2.4  # of tokens that the target looked at, the recent past first, with a prior
    reached: float = 4.0
    inside: Curve = field(default_factory=lambda: Curve(Law(0.6, 0.5)))  # after a rejection
    end: Curve = field(default_factory=lambda: Curve(Law(0.4, 0.8)))  # after a whole draft

    @property
    def alpha(self) -> float:
        return min(self.accepted / self.reached, 0.99)

    def round(self, seconds: float, first: float, deeper: float, depth: int) -> None:
        """So long took a round of preparations, of which this much is there."""
        self.busy += seconds
        self.first = _moved(self.first, first)
        if depth:
            self.deeper = _moved(self.deeper, deeper)

    def depth(self, verify: float, most: int) -> int | None:
        """How deep to prepare, beside a pass of the target that takes so long; None: not known yet.

        As deep as it hides (T_verify ÷ t_depth) costs nothing; beyond, every depth is waited for, and is worth it where
        drafts are good: the depth with most tokens per second, when all outcomes are hits.
        """
        if not self.deeper or not verify:
            return None
        tokens = list(accumulate(self.alpha**depth for depth in range(most + 1)))  # expected of a draft so deep
        return max(range(1, most + 1), key=lambda d: tokens[d] / max(verify, self.first + d * self.deeper))

    def now_depth(self, verify: float, most: int) -> int:
        """How deep to draft just in time after the first token, when every depth is waited for."""
        if not self.each or not verify:
            return most
        tokens = list(accumulate(self.alpha**depth for depth in range(most + 2)))  # expected of a draft so long
        return max(range(most + 1), key=lambda d: tokens[d + 1] / (verify + (d + 1) * self.each))

    def just_in_time(self, seconds: float, length: int) -> None:
        """So long took a draft that was waited for."""
        self.jit += seconds
        self.each = _moved(self.each, seconds / length)

    def verdict(self, accepted: int, reached: int) -> None:
        self.accepted = FADE * self.accepted + accepted
        self.reached = FADE * self.reached + reached

    def outcome(self, accepted: int, length: int, rank: int | None, forks: int) -> None:
        """So many of `length` drafted tokens were accepted; the token after them was the rank-th fork, or none."""
        name = "end" if accepted == length else str(accepted)
        (self.misses if rank is None else self.hits)[name] += 1
        if forks:
            (self.end if accepted == length else self.inside).add(rank, forks)

    def forks(self, length: int, many: int) -> list[int]:
        """So many forks over the outcomes of a draft of this length. [length + 1]"""
        return fan_out(chances(self.alpha, length), many, self.inside.law, self.end.law)

    @property
    def hit_rate(self) -> float | None:
        hits, misses = sum(self.hits.values()), sum(self.misses.values()) + self.late
        return hits / (hits + misses) if hits + misses else None

    def as_json(self) -> dict[str, Any]:
        names = sorted({*self.hits, *self.misses}, key=lambda name: (name == "end", name.zfill(3)))
        by = {name: [self.hits[name], self.hits[name] + self.misses[name]] for name in names}
        curves = {
            name: {"c": round(curve.law.c, 4), "r": round(curve.law.r, 4), "hits_by_forks": curve.measured()}
            for name, curve in (("rejection", self.inside), ("end", self.end))
        }
        return {
            "hit_rate": self.hit_rate,
            "hits_by_outcome": by,  # [hits, all]
            "late": self.late,
            "fallbacks": self.fallbacks,
            "just_in_time": self.jits,
            "alpha": round(self.alpha, 4),
            "hidden_seconds": max(self.busy - self.exposed, 0.0),
            "exposed_seconds": self.exposed,
            "just_in_time_seconds": self.jit,
            "first_pass_seconds": self.first,
            "depth_seconds": self.deeper,
            "miss": curves,
        }


def _moved(known: float, seconds: float) -> float:
    """An average of late; a hiccup moves it little, and the first is believed."""
    return known + 0.1 * (min(seconds, 3 * known) - known) if known else seconds
