"""What speculation brings, measured: the same prompts plain and speculative, side by side in one process.

Every answer comes from a fresh engine, so that nothing is remembered from an earlier run of the same prompt; building
it is not timed. Plain and speculative runs alternate prompt by prompt and change places from round to round: a machine
that gets busier slows both. The clock of the *decode* figures starts at the first emitted token (the prompt costs both
the same); `speedup_total` counts the prompt too. Ids are compared, and a divergence is reported, never hidden.

It measures and counts. It neither prints nor draws, and it does not judge whether a number is good.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence as Listing
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from .build import build_engine
from .estimate import interval
from .llm import LLM
from .profile import target_costs
from .types import SamplingParams, Stats

ALL = "all"  # the category of everything together
PLAIN_SERVES = 3  # speculative runs that share one plain run beside them

Progress = Callable[[str, float], None]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Question:
    ids: list[int]
    category: str = ALL


@dataclass(frozen=True)
class Setup:
    """A way to speculate."""

    drafter: str
    k: int | str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        extra = "".join(f" {name}={value}" for name, value in sorted(self.options.items()))
        return f"{self.drafter} k={self.k}{extra}"


PLAIN = Setup("off", 0)


@dataclass(frozen=True)
class Plan:
    """How long and how often."""

    tokens: int = 128  # the longest answer
    rounds: int = 3
    temperature: float = 0.0
    seed: int = 0

    def params(self, question: int) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed + question, max_tokens=self.tokens)


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


class Bench:
    """Collects pairs, round by round; rows can be had at any time."""

    def __init__(
        self,
        llm: LLM,
        questions: list[Question],
        plan: Plan,
        costs: dict[int, float] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.llm, self.questions, self.plan, self.clock = llm, questions, plan, clock
        self.costs = costs or pass_costs(llm)
        self.pairs: dict[str, list[Pair]] = {}
        self.setups: dict[str, Setup] = {}

    def round(self, setups: list[Setup], number: int, progress: Progress, only: Iterable[int] | None = None) -> None:
        """Every setup on every question (or on `only` these) once, with plain runs in between."""
        asked = list(range(len(self.questions)) if only is None else only)
        total = len(asked) * len(setups)
        for done, (question, setup, pair) in enumerate(self._pairs(setups, number, asked), start=1):
            self.setups.setdefault(setup.label, setup)
            self.pairs.setdefault(setup.label, []).append(pair)
            progress(f"{self.questions[question].category}: {setup.drafter}, K {setup.k}", done / total)

    def _pairs(self, setups: list[Setup], number: int, asked: list[int]) -> Iterator[tuple[int, Setup, Pair]]:
        for question in asked:
            for start in range(0, len(setups), PLAIN_SERVES):
                batch = [PLAIN, *setups[start : start + PLAIN_SERVES]]
                order = batch if number % 2 == 0 else batch[::-1]
                answers = {id(setup): self.answer(question, setup) for setup in order}
                category, plain = self.questions[question].category, answers[id(PLAIN)]
                for setup in batch[1:]:
                    yield question, setup, Pair(question, category, number, plain, answers[id(setup)])

    def answer(self, question: int, setup: Setup) -> Answer:
        """One answer by an engine that has never seen anything."""
        llm = fresh(self.llm, setup, self.costs)
        gc.collect()  # engines are cyclic and large: not while the clock runs
        begin, first = self.clock(), None
        for _ in llm.stream(self.questions[question].ids, self.plan.params(question)):
            if first is None:
                first = self.clock()
        end = self.clock()
        first = end if first is None else first
        return Answer(llm.last.generated, first - begin, end - first, llm.last.stats)

    def rows(self, categories: bool = True) -> list[Row]:
        """Each setup on each kind of text, and on all of it."""
        found = []
        for label, pairs in self.pairs.items():
            kinds = list(dict.fromkeys(p.category for p in pairs)) if categories else []
            for kind in [k for k in kinds if k != ALL]:
                found.append(row(self.setups[label], kind, [p for p in pairs if p.category == kind], self.plan.seed))
            found.append(row(self.setups[label], ALL, pairs, self.plan.seed))
        return found

    def divergences(self) -> list[dict[str, Any]]:
        """Where a speculative text left the plain one; empty is the promise kept."""
        return [
            {"drafter": self.setups[label].drafter, "k": self.setups[label].k, "prompt": pair.question}
            | {"category": pair.category, "round": pair.round, "position": pair.differs_at}
            for label, pairs in self.pairs.items()
            for pair in pairs
            if pair.differs_at is not None
        ]

    @property
    def compared_tokens(self) -> int:
        return sum(max(len(p.plain.ids), len(p.answer.ids)) for pairs in self.pairs.values() for p in pairs)


def measure(
    llm: LLM,
    questions: list[Question],
    setups: list[Setup],
    plan: Plan,
    progress: Progress = lambda what, done: None,
    costs: dict[int, float] | None = None,
) -> Bench:
    """All setups on all questions, as many rounds as planned; one short unmeasured answer comes first."""
    bench = Bench(llm, questions, plan, costs)
    warm_up(bench)
    for number in range(plan.rounds):
        bench.round(setups, number, lambda what, done, n=number: progress(what, (n + done) / plan.rounds))  # type: ignore[misc]
    return bench


def warm_up(bench: Bench) -> None:
    """The first passes of a process pay for lazy set-up: let nobody's clock see them."""
    llm = fresh(bench.llm, PLAIN, bench.costs)
    for _ in llm.stream(bench.questions[0].ids, SamplingParams(max_tokens=4)):
        pass


def fresh(llm: LLM, setup: Setup, costs: dict[int, float]) -> LLM:
    """The same target with an engine of its own, one request at a time. Costs are shared, not measured again."""
    sibling = llm.using(drafter="off", k=0, max_batch=1)
    sibling.config = llm.config.with_(drafter=setup.drafter, k=setup.k, max_batch=1, options=dict(setup.options))
    heard = (sibling, sibling.recorder)
    sibling.engine = build_engine(llm.target, sibling.config, llm.tokenizer, heard, costs=dict(costs))
    return sibling


def pass_costs(llm: LLM) -> dict[int, float]:
    """Seconds of a target pass by its row count."""
    return target_costs(llm.target, llm.engine.cache, llm.engine.target.plane)


# ---------------------------------------------------------------- counting


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
    return [asdict(each) for each in rows]
