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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..backends.pass_costs import by_rows, target_costs
from ..drafters import lookup
from ..llm import LLM
from ..models.prompts import Prompt
from ..types import SamplingParams
from .environment import environment
from .speeds import ALL, Answer, Pair, Row, Setup, as_json, knee, row

PLAIN_SERVES = 3  # speculative runs that share one plain run beside them

Progress = Callable[[str, float], None]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Question:
    ids: list[int]
    category: str = ALL


def questions(llm: LLM, prompts: list[Prompt]) -> list[Question]:
    """Prompts as the model is asked them: under its chat template, where it has one."""
    tokenizer = llm.tokenizer
    if tokenizer.chat_template is None:
        return [Question(tokenizer.encode_prompt(p.text), p.category) for p in prompts]
    return [Question(tokenizer.encode_chat([{"role": "user", "content": p.text}]), p.category) for p in prompts]


PLAIN = Setup("off", 0)


def setup(llm: LLM, drafter: str, k: int | str) -> Setup:
    """A drafter by name, with what the user set for it, or with what lets it run on any target."""
    return Setup(drafter, k, lookup(drafter).traits.trial(llm.target) | llm.config.options)


@dataclass(frozen=True)
class Plan:
    """How long and how often."""

    tokens: int = 128  # the longest answer
    rounds: int = 3
    temperature: float = 0.0
    seed: int = 0

    def params(self, question: int) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed + question, max_tokens=self.tokens)


class Bench:
    """Collects pairs, round by round; rows can be had at any time."""

    def __init__(self, llm: LLM, questions: list[Question], plan: Plan, clock: Clock = time.perf_counter) -> None:
        self.llm, self.questions, self.plan, self.clock = llm, questions, plan, clock
        kept = llm.costs.get(lambda: target_costs(llm.engine.target, llm.engine.cache))
        self.costs = by_rows(kept)  # what the controller reckons with
        self.pairs: dict[str, list[Pair]] = {}
        self.setups: dict[str, Setup] = {}
        self.engines: dict[str, LLM] = {}  # where they take long to set up

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
        llm = fresh(self.llm, setup) if self.llm.device == "cpu" else self._as_fresh(question, setup)
        gc.collect()  # engines are cyclic and large: not while the clock runs
        begin, first = self.clock(), None
        for _ in llm.stream(self.questions[question].ids, self.plan.params(question)):
            if first is None:
                first = self.clock()
        end = self.clock()
        first = end if first is None else first
        return Answer(llm.last.generated, first - begin, end - first, llm.last.stats)

    def _as_fresh(self, question: int, setup: Setup) -> LLM:
        """On a GPU an engine records passes before it is fast: it is kept, but remembers nothing of its answers."""
        key = repr(setup)
        if key not in self.engines:
            forgetful = {"suffix_shared_tokens": 0} if setup.drafter in ("suffix", "auto", "cascade") else {}
            self.engines[key] = fresh(self.llm, replace(setup, options=forgetful | setup.options))
            for _ in range(2):  # the second time, what the controller came to is recorded too
                self.engines[key].generate([self.questions[question].ids], self.plan.params(question))
        self.engines[key].forget()
        return self.engines[key]

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
) -> Bench:
    """All setups on all questions, as many rounds as planned; one short unmeasured answer comes first."""
    bench = Bench(llm, questions, plan)
    warm_up(bench)
    for number in range(plan.rounds):
        bench.round(setups, number, lambda what, done, n=number: progress(what, (n + done) / plan.rounds))  # type: ignore[misc]
    return bench


def result(bench: Bench, sweep: Bench | None = None) -> dict[str, Any]:
    """All that was measured and where, ready for JSON; the page and the tables are made from this."""
    plan, swept = bench.plan, sweep.rows(categories=False) if sweep else []
    found = knee(swept)
    return {
        "model": bench.llm.name,
        "dtype": bench.llm.dtype,
        "rule": bench.llm.config.rule,
        "rows": as_json(bench.rows()),
        "sweep": as_json(swept),
        "knee": {"best_k": found[0], "enough_k": found[1]} if found else None,
        "costs": {str(rows): seconds for rows, seconds in bench.costs.items()},
        "compared_tokens": bench.compared_tokens + (sweep.compared_tokens if sweep else 0),
        "divergences": bench.divergences() + (sweep.divergences() if sweep else []),
        "prompts": len(bench.questions),
        "tokens": plan.tokens,
        "rounds": plan.rounds,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "environment": environment(),
    }


def warm_up(bench: Bench) -> None:
    """The first passes of a process pay for lazy set-up: let nobody's clock see them."""
    llm = fresh(bench.llm, PLAIN)
    for _ in llm.stream(bench.questions[0].ids, SamplingParams(max_tokens=4)):
        pass


def fresh(llm: LLM, setup: Setup) -> LLM:
    """The same target with an engine of its own, one request at a time; the costs of passes are shared."""
    return llm.using(drafter=setup.drafter, k=setup.k, max_batch=1, **setup.options)


def batch_costs(llm: LLM, sequences: tuple[int, ...] = (1, 2, 4, 8)) -> dict[str, float]:
    """Seconds of a pass under "sequences,rows", measured now: what other engines' tables of K are reckoned from."""
    found = target_costs(llm.engine.target, llm.engine.cache, sequences)
    return {f"{many},{rows}": seconds for (many, rows), seconds in found.items()}


def pass_costs(llm: LLM) -> dict[int, float]:
    """Seconds of a target pass by its row count, measured now."""
    return by_rows(target_costs(llm.engine.target, llm.engine.cache))
