"""What pairs of plain and speculative runs say together: speeds, ratios, acceptance, intervals.

Pure arithmetic on records: it does not know how the runs were made (`bench` makes them). A prompt counts with the
median of its rounds; prompts are summed; intervals come from drawing prompts and rounds again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Listing
from dataclasses import dataclass, field, fields
from statistics import median
from typing import Any

from ..types import Stats
from .statistics import interval

ALL = "all"  # the category of everything together


@dataclass(frozen=True)
class Setup:
    """A way to speculate."""

    drafter: str
    k: int | str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        extra = "".join(f" {name}={value}" for name, value in sorted(plain(self.options).items()))
        return f"{self.drafter} k={self.k}{extra}"


@dataclass(frozen=True)
class Answer:
    """One timed run."""

    ids: list[int]
    prefill: float  # seconds until the first emitted token
    decode: float  # seconds from there to the end
    stats: Stats


@dataclass(frozen=True)
class Pair:
    """One prompt in one round: with speculation, and without it a moment before or after."""

    question: int
    category: str
    round: int
    plain: Answer
    answer: Answer

    @property
    def differs_at(self) -> int | None:
        """The first position where the texts differ; None is what was promised."""
        ours, theirs = self.plain.ids, self.answer.ids
        if ours == theirs:
            return None
        return next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(map(len, (ours, theirs)))
        )


@dataclass(frozen=True)
class Row:
    """One setup on one kind of text. tok_s = tokens / seconds; the first token of each answer is the prompt's."""

    drafter: str
    k: int | str
    options: dict[str, Any]
    category: str
    prompts: int
    rounds: int
    tokens: int  # of one round, after the first of each answer
    seconds: float  # for them: the sum of each prompt's median
    tok_s: float | None
    plain_seconds: float
    plain_tok_s: float | None
    speedup: float | None
    ci_low: float | None
    ci_high: float | None
    speedup_total: float | None  # the prompt's time included
    tau: float | None
    alpha: float | None
    alpha_by_position: list[float]
    drafted: int
    reached: int
    accepted: int
    emitted: int
    failures: int
    divergences: int
    why: str  # the controller's last reason


Rounds = Listing[Listing[Pair]]  # one list for each question


def row(setup: Setup, category: str, pairs: list[Pair], seed: int = 0) -> Row:
    """What the pairs say together: medians over rounds, summed over prompts."""
    by_question: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_question.setdefault(pair.question, []).append(pair)
    groups = list(by_question.values())
    stats = _pooled([p.answer.stats for p in pairs])
    low, high = interval(groups, speedup, seed) or (None, None)
    return Row(
        setup.drafter, setup.k, setup.options, category,
        prompts=len(groups), rounds=max(map(len, groups)),
        tokens=_tokens(groups, _fast), seconds=_seconds(groups, _fast), tok_s=rate(groups, _fast),
        plain_seconds=_seconds(groups, _plain), plain_tok_s=rate(groups, _plain),
        speedup=speedup(groups), ci_low=low, ci_high=high, speedup_total=speedup(groups, prompt=True),
        tau=stats.tau, alpha=stats.alpha, alpha_by_position=stats.alpha_by_position,
        drafted=stats.drafted, reached=stats.reached, accepted=stats.accepted, emitted=stats.emitted,
        failures=stats.failures, divergences=sum(p.differs_at is not None for p in pairs), why=stats.why,
    )  # fmt: skip


def speedup(groups: Rounds, prompt: bool = False) -> float | None:
    """Speculative speed ÷ plain speed; None where there was nothing to time."""
    fast, plain = rate(groups, _fast, prompt), rate(groups, _plain, prompt)
    return fast / plain if fast and plain else None


def rate(groups: Rounds, side: Callable[[Pair], Answer], prompt: bool = False) -> float | None:
    """Tokens per second, each prompt by the median of its rounds."""
    seconds = _seconds(groups, side, prompt)
    tokens = _tokens(groups, side) + (len(groups) if prompt else 0)
    return tokens / seconds if seconds > 0 and tokens else None


def _seconds(groups: Rounds, side: Callable[[Pair], Answer], prompt: bool = False) -> float:
    times = [[side(p).decode + (side(p).prefill if prompt else 0.0) for p in pairs] for pairs in groups]
    return sum(map(median, times))


def _tokens(groups: Rounds, side: Callable[[Pair], Answer]) -> int:
    return sum(round(median(len(side(p).ids) - 1 for p in pairs)) for pairs in groups)


def _fast(pair: Pair) -> Answer:
    return pair.answer


def _plain(pair: Pair) -> Answer:
    return pair.plain


def _pooled(every: list[Stats]) -> Stats:
    total = Stats(why=every[-1].why)
    for name in ("steps", "passes", "drafted", "reached", "accepted", "emitted", "failures"):
        setattr(total, name, sum(getattr(stats, name) for stats in every))
    for name in ("reached_at", "accepted_at"):
        lists = [getattr(stats, name) for stats in every]
        depth = max(map(len, lists))
        setattr(total, name, [sum(counts[i] for counts in lists if i < len(counts)) for i in range(depth)])
    return total


def knee(rows: list[Row], loss: float = 0.02) -> tuple[int, int] | None:
    """Of a sweep over K: the fastest K, and the smallest that loses at most 2% against it."""
    known = [(int(r.k), r.speedup) for r in rows if r.speedup is not None and r.k != "auto"]
    if not known:
        return None
    best_k, best = max(known, key=lambda each: each[1])
    return best_k, min(k for k, speed in known if speed >= (1 - loss) * best)


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Rows as dictionaries; an option that is an object (a model, say) becomes the name of its kind."""
    return [{f.name: getattr(each, f.name) for f in fields(Row)} | {"options": plain(each.options)} for each in rows]


def plain(options: dict[str, Any]) -> dict[str, Any]:
    simple = (str, int, float, list, tuple, dict, type(None))
    return {name: value if isinstance(value, simple) else type(value).__name__ for name, value in options.items()}
