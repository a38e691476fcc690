"""Times of the steps of a race, engine by engine: the input of bench/ahead_sim.py.

A step's seconds are wall time since the end of the step before. Steps that read a prompt, and steps in which a graph
was captured (by the engine or its drafter), are left out of every mean and of `decode_tok_s`.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from outrider import LLM
from outrider.drafters.ahead.statistics import RoundTimes

MOST = 100  # single measurements of a kind that are kept
Span = tuple[float, float]


@dataclass(frozen=True)
class StepTimes:
    """One step; times are seconds of one clock."""

    end: float
    wall: float  # since the end of the step before; 0: there is none
    decoding: bool  # no prompt was read and nothing captured
    tokens: int
    drafted: int
    accepted: int
    draft: float  # seconds of these phases, by the device's clock where it has one
    verify: float
    asking: Span  # of the drafter
    passing: Span  # from the pass's launch to its verdict
    rounds: tuple[RoundTimes, ...]  # of forks taken for this draft
    beside: bool  # the drafter runs beside this pass
    source: str


class Watch:
    """A listener for an engine that runs one request at a time."""

    reads_logits = reads_guesses = False

    def __init__(self, llm: LLM) -> None:
        self.engine: Any = llm.engine
        self.steps: list[StepTimes] = []
        self._last: tuple[int, float, int] = (-2, 0.0, -1)  # index, end and sequence of the last step
        self._rounds: Any = None
        self._recorded = 0

    def observe(self, step: Any) -> None:
        now, drafter, zero = time.perf_counter(), self.engine.drafter, self.engine.clock.zero
        (turn,), (tree,), (verdict,) = step.turns, step.draft.trees, step.verdicts
        index, end, seq = self._last
        wall = now - end if (index, seq) == (step.index - 1, turn.seq.id) else 0.0
        self._last = step.index, now, turn.seq.id
        rounds = getattr(drafter, "rounds", ())
        fresh, self._rounds = () if rounds is self._rounds else tuple(rounds), rounds
        host = getattr(drafter, "host", None)
        recorded, self._recorded = self._recorded, host.queue.scalar("recorded") if host else 0
        settled = recorded == self._recorded and not step.clock.get("record")
        begins = {name: zero + at for name, at in step.starts.items()}
        self.steps.append(
            StepTimes(
                now, wall, bool(wall) and turn.feed == 1 and settled, len(verdict.tokens) if verdict else 0,
                len(tree.tokens), len(verdict.path) if verdict else 0, step.clock.get("draft", 0.0),
                step.clock["verify"], (begins["draft"], begins["verify"]), (begins["verify"], begins["judge"]),
                fresh, bool(getattr(drafter, "in_flight", None)), tree.source,
            )
        )  # fmt: skip

    @property
    def decoding(self) -> list[StepTimes]:
        return [step for step in self.steps if step.decoding]

    def facts(self) -> dict[str, Any]:
        """Means of the decoding steps. `host` is the time outside draft, pass and waiting."""
        steps = self.decoding
        seconds, tokens = sum(s.wall for s in steps), sum(s.tokens for s in steps)
        return {
            "steps": len(steps),
            "left_out": sum(not s.decoding and bool(s.wall) for s in self.steps),
            "decode_seconds": seconds,
            "decode_tokens": tokens,
            "decode_tok_s": tokens / seconds if seconds else 0.0,
            "step": mean(s.wall for s in steps),
            "verify": mean(s.verify for s in steps),
            "draft": mean(s.draft for s in steps),
            "draft_depth": ratio(sum(s.draft for s in steps if s.drafted), sum(s.drafted for s in steps)),
            "host": mean(s.wall - s.draft - s.verify for s in steps),
            "alpha": self.alpha(),
        }

    def alpha(self) -> list[float]:
        """How often the token at each depth was accepted once it was reached."""
        deepest = max((s.drafted for s in self.decoding), default=0)
        reached = [sum(s.accepted >= d < s.drafted for s in self.decoding) for d in range(deepest)]
        accepted = [sum(s.accepted > d for s in self.decoding) for d in range(deepest)]
        return [a / r for a, r in zip(accepted, reached, strict=True) if r]

    def ahead(self) -> dict[str, Any]:
        """Figures of drafting ahead: times beside a busy and an idle target, hits, depths, waiting."""
        pairs = [(before, s) for before, s in zip(self.steps, self.steps[1:], strict=False) if s.decoding]
        rounds = [(before, r) for before, s in pairs for r in s.rounds if not r.just_in_time and r.times]
        jits = [r for _, s in pairs for r in s.rounds if r.just_in_time and r.times]
        busy, idle = depths(rounds)
        alone = [b - a for r in jits for a, b in zip(r.times[1:], r.times[2:], strict=False)]
        outcomes = [o for _, r in rounds for o in r.outcomes]
        beside = [s for s in self.decoding if s.beside]
        waits = sum(w for _, s in pairs for w in waited(s))
        whole = [r.times[1] - r.submitted for _, r in rounds]
        return {
            "window": mean(b - a for a, b in (s.passing for s in beside)),
            "beside": mean(s.verify for s in beside),
            "ahead_host": mean(s.wall - (s.passing[1] - s.passing[0]) - sum(waited(s)) for _, s in pairs),
            "wake": mean(r.times[0] - r.submitted for _, r in rounds),
            "first": mean(whole),
            "first_idle": mean(r.times[1] - r.times[0] for r in jits) or None,
            "deeper": mean(busy) or mean(idle),
            "deeper_idle": mean(idle) or mean(alone) or None,
            "jit": mean(r.waited[1] - r.waited[0] for r in jits) or None,
            "jits": len(jits),
            "hit_end": rate(hit for accepted, length, hit in outcomes if accepted == length),
            "hit_inside": rate(hit for accepted, length, hit in outcomes if accepted < length),
            "outcomes": len(outcomes),
            "depths": sorted(Counter(r.depth for _, r in rounds).items()),
            "ready": mean(sum(t <= before.passing[1] for t in r.times[2:]) for before, r in rounds),
            "waited": waits,
            "samples": {
                "window": thinned(s.passing[1] - s.passing[0] for s in beside),
                "first": thinned(whole),
                "deeper": thinned(busy or idle),
                "deeper_idle": thinned(idle),
                "jit": thinned(r.waited[1] - r.waited[0] for r in jits),
            },
        }


def waited(step: StepTimes) -> list[float]:
    return [r.waited[1] - r.waited[0] for r in step.rounds]


def depths(rounds: list[tuple[StepTimes, RoundTimes]]) -> tuple[list[float], list[float]]:
    """Seconds of depths that started while the target was busy, and of those while it was idle."""
    busy, idle = [], []
    for before, r in rounds:
        for begin, end in zip(r.times[1:], r.times[2:], strict=False):
            (busy if begin < before.passing[1] else idle).append(end - begin)
    return busy, idle


def thinned(values: Any) -> list[float]:
    """At most MOST values, sorted."""
    found = sorted(values)
    return [found[i * len(found) // MOST] for i in range(MOST)] if len(found) > MOST else found


def mean(values: Any) -> float:
    found = list(values)
    return fmean(found) if found else 0.0


def ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def rate(values: Any) -> float:
    return mean(map(float, values))
