"""Statistics of timed runs: speed, speedup over plain decoding, acceptance, bootstrap intervals.

Pure arithmetic on records; `bench` makes the runs. A prompt counts with the median of its rounds, prompts are summed,
and intervals come from resampling prompts and rounds.

The one definition of speedup: tokens per second of decoding, from the first emitted token to the last, divided by that
of plain decoding. Beside it stands that of the whole request, with the time to the first token. A small model that
loops is easy to draft for, so every speedup is also given without the answers that repeat themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ..types import Stats  # whose module needs torch; a client of a remote server does not

T = TypeVar("T")
Groups = Sequence[Sequence[T]]  # one group per prompt, one entry per round
RESAMPLES = 1000
ALL = "all"  # the category of all prompts together
LOOPING = 0.5  # share of repeated 4-grams from which an answer counts as one that repeats itself
NOISE = 1.02  # a speedup of more than so many times τ was not earned by drafts


@dataclass(frozen=True)
class Setup:
    """A drafter with its K and options."""

    drafter: str
    k: int | str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        extra = "".join(f" {name}={value}" for name, value in sorted(json_options(self.options).items()))
        return f"{self.drafter} k={self.k}{extra}"


@dataclass(frozen=True)
class TimedRun:
    """One generation. Times are seconds: until the first emitted token, and from there to the end."""

    ids: list[int]
    prefill: float
    decode: float
    stats: Stats


@dataclass(frozen=True)
class Pair:
    """One prompt in one round, with speculation and without."""

    prompt: int  # index
    category: str
    round: int
    plain: TimedRun
    speculative: TimedRun

    @property
    def loops(self) -> bool:
        return repeated_share(self.plain.ids) > LOOPING

    @property
    def differs_at(self) -> int | None:
        """The first position where the ids differ; None where they are equal, as promised."""
        a, b = self.plain.ids, self.speculative.ids
        return None if a == b else first_difference(a, b)


@dataclass(frozen=True)
class BenchRow:
    """One setup on one category. tok_s = tokens / seconds; the first token of an answer belongs to the prefill."""

    drafter: str
    k: int | str
    options: dict[str, Any]
    category: str
    prompts: int
    rounds: int
    tokens: int  # of one round, without the first of each answer
    seconds: float  # the sum of each prompt's median
    tok_s: float | None
    plain_seconds: float
    plain_tok_s: float | None
    speedup: float | None
    ci_low: float | None
    ci_high: float | None
    speedup_total: float | None  # of the whole request
    loops: int  # answers that repeat themselves
    speedup_without_loops: float | None  # of decoding, without those
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


def bench_row(setup: Setup, category: str, pairs: list[Pair], seed: int = 0) -> BenchRow:
    """Summarise the pairs of one setup; `seed` is that of the bootstrap."""
    by_prompt: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair.prompt, []).append(pair)
    groups = list(by_prompt.values())
    distinct = [group for group in groups if not group[0].loops]
    plain, fast = ([[getattr(p, side) for p in group] for group in groups] for side in ("plain", "speculative"))
    stats = _pooled([p.speculative.stats for p in pairs])
    low, high = interval(groups, speedup, seed) or (None, None)
    return BenchRow(
        setup.drafter, setup.k, setup.options, category,
        prompts=len(groups), rounds=max(map(len, groups)),
        tokens=_tokens(fast), seconds=_seconds(fast), tok_s=rate(fast),
        plain_seconds=_seconds(plain), plain_tok_s=rate(plain),
        speedup=speedup(groups), ci_low=low, ci_high=high, speedup_total=speedup(groups, with_prefill=True),
        loops=len(groups) - len(distinct), speedup_without_loops=speedup(distinct),
        tau=stats.tau, alpha=stats.alpha, alpha_by_position=stats.alpha_by_position,
        drafted=stats.drafted, reached=stats.reached, accepted=stats.accepted, emitted=stats.emitted,
        failures=stats.failures, divergences=sum(p.differs_at is not None for p in pairs), why=stats.why,
    )  # fmt: skip


def speedup(groups: Groups[Pair], with_prefill: bool = False) -> float | None:
    """Speculative speed ÷ plain speed; None where there was nothing to time."""
    fast = rate([[p.speculative for p in group] for group in groups], with_prefill)
    plain = rate([[p.plain for p in group] for group in groups], with_prefill)
    return fast / plain if fast and plain else None


def is_noise(speedup: float | None, tau: float | None) -> bool:
    """Whether a speedup is more than its tokens per pass allow: then the machine was disturbed."""
    return speedup is not None and tau is not None and speedup > NOISE * tau


def repeated_share(ids: Sequence[int], n: int = 4) -> float:
    """The share of an answer's n-grams that occurred in it before."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def rate(runs: Groups[TimedRun], with_prefill: bool = False) -> float | None:
    """Tokens per second."""
    seconds = _seconds(runs, with_prefill)
    tokens = _tokens(runs) + (len(runs) if with_prefill else 0)
    return tokens / seconds if seconds > 0 and tokens else None


def _seconds(runs: Groups[TimedRun], with_prefill: bool = False) -> float:
    return sum(median(run.decode + (run.prefill if with_prefill else 0.0) for run in rounds) for rounds in runs)


def _tokens(runs: Groups[TimedRun]) -> int:
    return sum(round(median(len(run.ids) - 1 for run in rounds)) for rounds in runs)


def _pooled(every: list[Stats]) -> Stats:
    total = type(every[-1])(why=every[-1].why)
    for name in ("steps", "passes", "drafted", "reached", "accepted", "emitted", "failures"):
        setattr(total, name, sum(getattr(stats, name) for stats in every))
    for name in ("reached_at", "accepted_at"):
        lists = [getattr(stats, name) for stats in every]
        depth = max(map(len, lists))
        setattr(total, name, [sum(counts[i] for counts in lists if i < len(counts)) for i in range(depth)])
    return total


def knee(rows: list[BenchRow], loss: float = 0.02) -> tuple[int, int] | None:
    """Of a sweep over K: the fastest K, and the smallest K that loses at most `loss` against it."""
    timed = [(int(r.k), r.speedup) for r in rows if r.speedup is not None and r.k != "auto"]
    if not timed:
        return None
    best_k, best = max(timed, key=lambda each: each[1])
    return best_k, min(k for k, speed in timed if speed >= (1 - loss) * best)


def rows_as_json(rows: list[BenchRow]) -> list[dict[str, Any]]:
    return [vars(row) | {"options": json_options(row.options)} for row in rows]


def json_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON values; an object, such as a loaded model, becomes the name of its class."""
    simple = (str, int, float, list, tuple, dict, type(None))
    return {name: value if isinstance(value, simple) else type(value).__name__ for name, value in options.items()}


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The first index where the two differ; the shorter length where one begins with the other."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def interval(
    groups: Groups[T], statistic: Callable[[Groups[T]], float | None], seed: int = 0
) -> tuple[float, float] | None:
    """A 95% bootstrap interval of a statistic: groups are resampled, and the entries within each.

    The same seed gives the same interval. None for a single entry, which says nothing about spread.
    """
    if sum(map(len, groups)) < 2:
        return None
    dice = random.Random(seed)
    drawn = (statistic(_resampled(groups, dice)) for _ in range(RESAMPLES))
    values = sorted(value for value in drawn if value is not None)
    if len(values) < 2:
        return None
    fortieths = quantiles(values, n=40, method="inclusive")
    return fortieths[0], fortieths[-1]


def _resampled(groups: Groups[T], dice: random.Random) -> list[list[T]]:
    chosen = dice.choices(groups, k=len(groups))
    return [dice.choices(group, k=len(group)) for group in chosen]
