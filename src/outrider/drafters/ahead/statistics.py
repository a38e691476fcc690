"""Statistics of drafting ahead: outcomes and times, the forks that follow from them, and whether it pays.

An outcome is (number of accepted draft tokens, the token that the target adds). The number follows the acceptance rate
α: P(k) = α^k (1 - α) before the end of a draft of K tokens, P(K) = α^K. The added token is none of the F most likely
ones with probability miss(F) = c F^-r, fitted to observed outcomes: once for rejections (where the rejected token is
excluded) and once for the end of the draft. This module sees numbers, never tokens. All times are in seconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from itertools import accumulate
from typing import Any, NamedTuple

DECAY = 0.99  # of acceptance counts, per verdict
OutcomeFacts = tuple[int, int, bool]  # accepted, draft length, whether it was prepared for


class PowerLaw(NamedTuple):
    """miss(F) = c F^-r"""

    c: float
    r: float

    def miss(self, forks: int) -> float:
        return self.c * forks**-self.r if forks else 1.0


class MissCurve:
    """How often the target's token is not among F forks, for every F; counts decay with every outcome."""

    DECAY, PRIOR_WEIGHT, MAX_FORKS = 0.995, 6.0, 64

    def __init__(self, prior: PowerLaw) -> None:
        self.prior = prior
        self.tried = [0.0] * self.MAX_FORKS  # by forks - 1
        self.missed = [0.0] * self.MAX_FORKS

    def add(self, rank: int | None, forks: int) -> None:
        """Count an outcome with `forks` forks, whose token had this rank among them (from 1; None: it had no fork)."""
        for i in range(min(forks, self.MAX_FORKS)):
            self.tried[i] = self.tried[i] * self.DECAY + 1
            self.missed[i] = self.missed[i] * self.DECAY + (rank is None or rank > i + 1)

    def rate(self, forks: int) -> float:
        """The measured miss rate, smoothed by the prior."""
        i = forks - 1
        return (self.missed[i] + self.PRIOR_WEIGHT * self.prior.miss(forks)) / (self.tried[i] + self.PRIOR_WEIGHT)

    @property
    def law(self) -> PowerLaw:
        """Least squares in log-log space, each fork count weighted by its outcomes."""
        points = [
            (math.log(f), math.log(max(self.rate(f), 1e-4)), self.tried[f - 1] + self.PRIOR_WEIGHT)
            for f in range(1, self.MAX_FORKS + 1)
            if f <= 4 or self.tried[f - 1] >= self.PRIOR_WEIGHT
        ]
        total = sum(w for _, _, w in points)
        x0, y0 = (sum(p[i] * p[2] for p in points) / total for i in (0, 1))
        slope = sum(w * (x - x0) * (y - y0) for x, y, w in points) / sum(w * (x - x0) ** 2 for x, _, w in points)
        r = min(max(-slope, 0.05), 4.0)
        return PowerLaw(min(math.exp(y0 + r * x0), 0.98), r)

    def hit_rates(self) -> list[float]:
        """Measured hit rates by fork count, as far as there are outcomes."""
        return [round(1 - m / t, 4) for m, t in zip(self.missed, self.tried, strict=True) if t >= 1]


def length_probabilities(alpha: float, length: int) -> list[float]:
    """P(k) for k = 0 … length accepted tokens."""
    return [alpha**k * (1 - alpha) for k in range(length)] + [alpha**length]


def fan_out(likely: list[float], forks: int, inside: PowerLaw, end: PowerLaw) -> list[int]:
    """Forks for each accepted length, `forks` in total, each where it gains the most hits. likely[k] is P(k).

    For one power law and many forks this is Saguaro's geometric rule, F_k ∝ P(k)^(1 / (1 + r)) (theorem 12).
    """
    laws = [inside] * (len(likely) - 1) + [end]
    assigned = [0] * len(likely)

    def gain(k: int) -> float:
        return likely[k] * (laws[k].miss(assigned[k]) - laws[k].miss(assigned[k] + 1))

    heap = [(-gain(k), k) for k in range(len(likely))]
    heapify(heap)
    for _ in range(forks):
        k = heap[0][1]
        assigned[k] += 1
        heapreplace(heap, (-gain(k), k))
    return assigned


@dataclass(frozen=True)
class RoundTimes:
    """When the worker answered one request that was used for a draft; all moments are on one clock."""

    submitted: float
    times: tuple[float, ...]  # of the start, of the outcomes, of each depth
    waited: tuple[float, float]  # start and end of the engine's wait
    depth: int  # requested
    outcomes: tuple[OutcomeFacts, ...] = ()
    just_in_time: bool = False


@dataclass
class AheadStatistics:
    """Counters, moving averages, and the forks and depths that follow from them."""

    hits: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by accepted tokens: "2", or "end"
    misses: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    late: int = 0  # outcomes of rounds whose forks were not known in time
    fallbacks: int = 0  # drafts by a fallback
    jits: int = 0  # drafts made just in time
    busy: float = 0.0  # seconds of drafting ahead
    exposed: float = 0.0  # seconds of it that the engine waited for
    jit: float = 0.0  # seconds that the engine waited for drafts just in time
    jit_token: float = 0.0  # the same for each drafted token, recently
    first: float = 0.0  # seconds until the forks of a round are known, recently
    deeper: float = 0.0  # seconds of one more depth of all forks
    accepted: float = 2.4  # decayed count of accepted tokens, with a prior
    reached: float = 4.0  # decayed count of verified tokens
    inside: MissCurve = field(default_factory=lambda: MissCurve(PowerLaw(0.6, 0.5)))  # after a rejection
    end: MissCurve = field(default_factory=lambda: MissCurve(PowerLaw(0.4, 0.8)))  # after a fully accepted draft

    @property
    def alpha(self) -> float:
        return min(self.accepted / self.reached, 0.99)

    @property
    def hit_rate(self) -> float | None:
        hits, misses = sum(self.hits.values()), sum(self.misses.values()) + self.late
        return hits / (hits + misses) if hits + misses else None

    def add_round(self, seconds: float, first: float, deeper: float, depth: int) -> None:
        """A round of preparations took this long until it was used, at this depth."""
        self.busy += seconds
        self.first = smoothed(self.first, first)
        if depth:
            self.deeper = smoothed(self.deeper, deeper)

    def add_just_in_time(self, seconds: float, length: int) -> None:
        self.jit += seconds
        self.jit_token = smoothed(self.jit_token, seconds / length)

    def add_verdict(self, accepted: int, reached: int) -> None:
        self.accepted = DECAY * self.accepted + accepted
        self.reached = DECAY * self.reached + reached

    def add_outcome(self, accepted: int, length: int, rank: int | None, forks: int) -> None:
        """`accepted` of `length` drafted tokens; the next token had this rank among the forks there, or no fork."""
        name = "end" if accepted == length else str(accepted)
        (self.misses if rank is None else self.hits)[name] += 1
        if forks:
            (self.end if accepted == length else self.inside).add(rank, forks)

    def forks(self, length: int, total: int) -> list[int]:
        """`total` forks over the outcomes of a draft of this length. [length + 1]"""
        return fan_out(length_probabilities(self.alpha, length), total, self.inside.law, self.end.law)

    def best_depth(self, verify: float, limit: int) -> int | None:
        """The depth with the most tokens per second if all outcomes are hits; verify: seconds of a target pass."""
        if not self.deeper or not verify:
            return None
        tokens = list(accumulate(self.alpha**depth for depth in range(limit + 1)))  # expected, by depth
        return max(range(1, limit + 1), key=lambda d: tokens[d] / max(verify, self.first + d * self.deeper))

    def best_just_in_time_depth(self, verify: float, limit: int) -> int:
        """The same after the first token of a draft made just in time, where every depth is waited for."""
        if not self.jit_token or not verify:
            return limit
        tokens = list(accumulate(self.alpha**depth for depth in range(limit + 2)))  # expected, by draft length
        return max(range(limit + 1), key=lambda d: tokens[d + 1] / (verify + (d + 1) * self.jit_token))

    def as_json(self) -> dict[str, Any]:
        names = sorted({*self.hits, *self.misses}, key=lambda name: (name == "end", name.zfill(3)))
        curves = {
            name: {"c": round(curve.law.c, 4), "r": round(curve.law.r, 4), "hits_by_forks": curve.hit_rates()}
            for name, curve in (("rejection", self.inside), ("end", self.end))
        }
        return {
            "hit_rate": self.hit_rate,
            "hits_by_outcome": {n: [self.hits[n], self.hits[n] + self.misses[n]] for n in names},  # [hits, all]
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


def smoothed(average: float, seconds: float) -> float:
    """The next value of a moving average; the first sample replaces 0, later ones are clipped at 3 × the average."""
    return average + 0.1 * (min(seconds, 3 * average) - average) if average else seconds


class Profitability:
    """Chooses between drafting ahead and just in time by measured tokens per second, for each batch size.

    Drafting ahead is hidden behind the target's pass, but may take cores or a part of the device from it. What that
    costs is measured: both modes are tried, the faster one is kept, and the other is tried again at growing intervals.
    """

    TRIAL, FIRST_INTERVAL, MAX_INTERVAL = 24, 96, 3072  # steps of a trial, and between two trials
    GROWTH = 2  # of the interval with every trial, and once more where the trial lost clearly
    DECAY = 0.97
    MARGIN = 1.01  # the other mode must be faster by this factor to replace the current one
    MIN_STEPS, CLEAR = 6, 1.25  # a trial ends early where, after so many steps, it is slower by this factor
    MIN_PREPARED = 0.5  # ahead counts as useless where a smaller share of its steps prepares anything

    def __init__(self, always: bool = False, first: bool = True) -> None:
        """first: start with drafting ahead."""
        self.always = always
        self.seconds: dict[tuple[int, bool], float] = defaultdict(float)  # by (bits of the batch size, ahead)
        self.tokens: dict[tuple[int, bool], float] = defaultdict(float)
        self.steps: dict[tuple[int, bool], int] = defaultdict(int)
        self.prepared = 1.0  # share of the steps ahead in which anything was prepared, recently
        self.batch = 0
        self.ahead = first
        self.left, self.interval = self.TRIAL, self.FIRST_INTERVAL  # steps until the next decision

    def add_step(self, batch: int, ahead: bool, tokens: int, seconds: float, prepared: bool = True) -> None:
        """A step emitted these tokens for `batch` sequences. `prepared`: a draft is being prepared for the next one."""
        if batch.bit_length() != self.batch:
            self.batch = batch.bit_length()
            self.left, self.interval = self.TRIAL, self.FIRST_INTERVAL
        key = (self.batch, ahead)
        self.steps[key] += 1
        if self.steps[key] > 2:  # the first steps read prompts and touch new memory
            self.seconds[key] = self.DECAY * self.seconds[key] + seconds
            self.tokens[key] = self.DECAY * self.tokens[key] + tokens
            self.prepared += 0.1 * (prepared - self.prepared) if ahead else 0.0
        self.left -= 1
        if not self.always:
            self._decide()

    def speed(self, ahead: bool) -> float | None:
        """Recent tokens per second at the current batch size; None: not measured."""
        key = (self.batch, ahead)
        if not self.seconds[key]:
            return None
        return 0.0 if ahead and self.prepared < self.MIN_PREPARED else self.tokens[key] / self.seconds[key]

    def _decide(self) -> None:
        current, other = self.speed(self.ahead), self.speed(not self.ahead)
        if current is None or other is None:
            if self.left <= 0:
                self._start_trial()
            return
        longer = min(self.GROWTH * self.interval, self.MAX_INTERVAL)
        enough = self.steps[self.batch, self.ahead] >= 2 + self.MIN_STEPS
        if self.left > 0 and enough and current * self.CLEAR < other:  # a trial that has clearly lost
            self.left, self.interval = 0, longer
        if self.left <= 0 and other > current * self.MARGIN:
            self.ahead, self.left = not self.ahead, 0
        elif self.left <= -self.interval:
            self._start_trial()
            self.interval = longer

    def _start_trial(self) -> None:
        """Switch to the other mode and forget its old measurements."""
        self.ahead, self.left = not self.ahead, self.TRIAL
        for counts in (self.seconds, self.tokens, self.steps):
            counts.pop((self.batch, self.ahead), None)
        self.prepared = 1.0

    @property
    def why(self) -> str:
        """The current mode and its reason."""
        ahead, just_in_time = self.speed(True), self.speed(False)
        if self.always:
            return "ahead_always is set: there are no trials"
        if ahead is None or just_in_time is None:
            return "drafting ahead is being tried"
        if not ahead:
            return f"{just_in_time:.0f} tokens/s just in time; ahead, too few steps prepared a draft: it does not pay"
        chosen = "ahead" if ahead >= just_in_time else "just in time"
        return f"{ahead:.0f} tokens/s drafting ahead, {just_in_time:.0f} just in time: {chosen} is kept"
