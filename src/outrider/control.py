"""How much to draft: never, always K, or as much as pays.

A controller sees acceptance and measured costs. It decides budgets before tokens are drafted, so that at temperature
above 0 no token is ever discarded because of its own value.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Protocol

from .types import REJECTED, Step, Turn


class Controller(Protocol):
    why: str  # the reason for the last budget, in words

    def budget(self, turns: list[Turn]) -> list[Turn]: ...

    def observe(self, step: Step) -> None: ...


class Fixed:
    """Up to K nodes for everyone, always. Fixed(0) is plain decoding."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.why = f"K is fixed at {k}" if k else "speculation is switched off"

    def budget(self, turns: list[Turn]) -> list[Turn]:
        return [turn.allow(room_for(turn, self.k)) for turn in turns]

    def observe(self, step: Step) -> None:
        pass


def room_for(turn: Turn, k: int) -> int:
    """At most k nodes, and never more than could still be emitted before the bonus."""
    return max(0, min(k, turn.seq.room - 1)) if turn.whole and turn.seq.speculate else 0


class Costs:
    """Seconds of a target pass by its row count: measured at the start, refined by every step."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = dict(seconds)
        self._rows = sorted(self.seconds)

    def __call__(self, rows: int) -> float:
        """The cost of a pass, by straight lines between what was measured."""
        known = self._rows
        i = bisect_left(known, rows)
        if i < len(known) and known[i] == rows:
            return self.seconds[rows]
        if len(known) == 1 or i == 0:
            return self.seconds[known[0]]
        low, high = (known[i - 1], known[i]) if i < len(known) else (known[-2], known[-1])
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return self.seconds[low] + slope * (rows - low)

    def refine(self, rows: int, seconds: float) -> None:
        """A pass over this many rows took this long; a single slow pass (somebody else's load) moves little."""
        if rows not in self.seconds:
            return
        old = self.seconds[rows]
        self.seconds[rows] = old + 0.1 * (min(seconds, 2 * old) - old)


class Acceptance:
    """How often the node at each depth is accepted once it is reached; the recent past counts most."""

    FADE, PRIOR, WEIGHT = 0.98, 0.5, 2.0

    def __init__(self) -> None:
        self.hits: dict[int, float] = defaultdict(float)
        self.tries: dict[int, float] = defaultdict(float)

    def add(self, depth: int, hit: bool) -> None:
        self.hits[depth] = self.hits[depth] * self.FADE + hit
        self.tries[depth] = self.tries[depth] * self.FADE + 1

    def rate(self, depth: int, prior: float | None = None) -> float:
        """Shrunk towards `prior` (by default the depth before, then 0.5) while little has been seen."""
        if prior is None:
            prior = self.rate(depth - 1) if depth else self.PRIOR
        return (self.hits[depth] + self.WEIGHT * prior) / (self.tries[depth] + self.WEIGHT)


class Adaptive:
    """Draft one more token while it brings more tokens per second than the step does without it.

    Expected tokens of a step with K nodes: 1 + s₁ + … + s_K, with survival s_i the product of acceptance by depth.
    Its cost: drafting plus a pass over K+1 rows. When no K beats plain decoding, draft nothing and probe now and then.
    """

    PROBE_EVERY = 24  # steps between probes while speculation is off
    PROBE = 2

    def __init__(self, costs: Costs, k_max: int = 16, name: str = "the drafter") -> None:
        self.costs, self.k_max, self.name = costs, k_max, name
        self.why = "nothing is known yet"
        self.overall = Acceptance()
        self.by_sequence: dict[int, Acceptance] = {}
        self.draft_seconds = 0.0  # per node, recent average
        self.draft_fixed = 0.0
        self.idle: dict[int, int] = defaultdict(int)

    def budget(self, turns: list[Turn]) -> list[Turn]:
        return [turn.allow(room_for(turn, self._best(turn.seq.id, len(turns)))) for turn in turns]

    def _best(self, seq: int, batch: int) -> int:
        own = self.by_sequence.setdefault(seq, Acceptance())
        plain = 1 / self.costs(batch)
        best, speed, tokens, survival = 0, plain, 1.0, 1.0
        for k in range(1, self.k_max + 1):
            survival *= own.rate(k - 1, self.overall.rate(k - 1))
            tokens += survival
            now = tokens / (self.costs(batch + k) + k * self.draft_seconds)
            if now > speed:
                best, speed = k, now
        if best:
            self.idle[seq] = 0
            self.why = f"K={best}: about {tokens_text(speed, plain)} plain speed expected"
            return best
        return self._off(seq, own, batch)

    def _off(self, seq: int, own: Acceptance, batch: int) -> int:
        self.idle[seq] += 1
        rate = own.rate(0, self.overall.rate(0))
        needed = (self.costs(batch + 1) + self.draft_seconds) / self.costs(batch) - 1
        self.why = (
            f"{self.name}: {rate:.0%} accepted, break-even here is {needed:.0%}; plain decoding, "
            f"a probe every {self.PROBE_EVERY} steps"
        )
        return self.PROBE if self.idle[seq] % self.PROBE_EVERY == 0 else 0

    def observe(self, step: Step) -> None:
        self.costs.refine(step.rows.tokens.shape[0], step.clock["verify"])
        nodes = sum(len(tree.tokens) for tree in step.draft.trees)
        if nodes:
            self.draft_seconds += 0.1 * (step.clock["draft"] / nodes - self.draft_seconds)
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is None or not tree.tokens:
                continue
            own = self.by_sequence.setdefault(turn.seq.id, Acceptance())
            walked = len(verdict.path) + (REJECTED in verdict.fates)
            for depth in range(walked):
                for record in (own, self.overall):
                    record.add(depth, depth < len(verdict.path))
            if turn.seq.finish:
                self.by_sequence.pop(turn.seq.id, None)
                self.idle.pop(turn.seq.id, None)


def tokens_text(speed: float, plain: float) -> str:
    return f"{speed / plain:.2f} x"
