"""Benchmark: the same prompts plain and speculative, interleaved in one process.

Every run has a fresh engine, so that nothing is remembered from an earlier run of the same prompt; building the engine
is not timed. Plain and speculative runs alternate prompt by prompt and swap order from round to round: a machine that
gets busier slows both. Decode times start at the first emitted token; `speedup_total` counts the prefill too. Ids are
compared, and every divergence is reported.

It measures and counts. It neither prints nor draws, and it does not judge whether a number is good.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from ..backends.pass_costs import by_rows, target_costs
from ..drafters import lookup
from ..llm import LLM
from ..models.prompts import Prompt
from ..models.tokenizer import encode_message
from ..types import SamplingParams
from .environment import environment
from .statistics import ALL, BenchRow, Pair, Setup, TimedRun, bench_row, knee, rows_as_json

SETUPS_PER_PLAIN_RUN = 3  # speculative runs that share the plain run beside them
PLAIN = Setup("off", 0)
Progress = Callable[[str, float], None]  # what is running, and the share that is done
Clock = Callable[[], float]  # seconds


@dataclass(frozen=True)
class EncodedPrompt:
    ids: list[int]
    category: str = ALL
    params: SamplingParams | None = None  # instead of the plan's


def encode_prompts(llm: LLM, prompts: list[Prompt]) -> list[EncodedPrompt]:
    """Prompts under the model's chat template, where it has one."""
    return [EncodedPrompt(encode_message(llm.tokenizer, p.text), p.category) for p in prompts]


def make_setup(llm: LLM, drafter: str, k: int | str) -> Setup:
    """A drafter by name, with the user's options or else those that let it run on any target."""
    return Setup(drafter, k, lookup(drafter).traits.trial(llm.target) | llm.config.options)


@dataclass(frozen=True)
class BenchPlan:
    tokens: int = 128  # the longest answer
    rounds: int = 3
    temperature: float = 0.0
    seed: int = 0
    most_seconds: float | None = None  # after so many no further round begins

    def params(self, prompt: int) -> SamplingParams:
        return SamplingParams(temperature=self.temperature, seed=self.seed + prompt, max_tokens=self.tokens)


class Bench:
    """Collects pairs round by round; rows are available at any time."""

    def __init__(
        self, llm: LLM, prompts: list[EncodedPrompt], plan: BenchPlan, clock: Clock = time.perf_counter
    ) -> None:
        self.llm, self.prompts, self.plan, self.clock = llm, prompts, plan, clock
        table = llm.costs.get(lambda: target_costs(llm.engine.target, llm.engine.cache))
        self.pass_costs = by_rows(table)  # the ones that the controller uses
        self.pairs: dict[str, list[Pair]] = {}  # by the setup's label
        self.setups: dict[str, Setup] = {}
        self.engines: dict[str, LLM] = {}  # on a GPU

    def round(self, setups: list[Setup], number: int, progress: Progress, only: Iterable[int] | None = None) -> None:
        """Every setup once on every prompt, or on those whose indices are in `only`, with plain runs in between."""
        indices = list(range(len(self.prompts)) if only is None else only)
        total = len(indices) * len(setups)
        for done, (setup, pair) in enumerate(self._pairs(setups, number, indices), start=1):
            self.setups.setdefault(setup.label, setup)
            self.pairs.setdefault(setup.label, []).append(pair)
            progress(f"{pair.category}: {setup.drafter}, K {setup.k}", done / total)

    def _pairs(self, setups: list[Setup], number: int, indices: list[int]) -> Iterator[tuple[Setup, Pair]]:
        for index in indices:
            for start in range(0, len(setups), SETUPS_PER_PLAIN_RUN):
                batch = [PLAIN, *setups[start : start + SETUPS_PER_PLAIN_RUN]]
                order = batch if number % 2 == 0 else batch[::-1]
                runs = {id(setup): self.run(index, setup) for setup in order}
                for setup in batch[1:]:
                    category = self.prompts[index].category
                    yield setup, Pair(index, category, number, runs[id(PLAIN)], runs[id(setup)])

    def run(self, index: int, setup: Setup) -> TimedRun:
        """One timed generation by an engine without memory of earlier ones."""
        llm = fresh(self.llm, setup) if self.llm.device == "cpu" else self._cleared_engine(index, setup)
        gc.collect()  # engines are cyclic and large: collect before the clock runs
        begin, first = self.clock(), None
        for _ in llm.stream(self.prompts[index].ids, self._params(index)):
            if first is None:
                first = self.clock()
        end = self.clock()
        first = end if first is None else first
        return TimedRun(llm.last.generated, first - begin, end - first, llm.last.stats)

    def _cleared_engine(self, index: int, setup: Setup) -> LLM:
        """On a GPU an engine captures passes before it is fast: it is kept, and cleared between runs."""
        key = repr(setup)
        if key not in self.engines:
            unshared = {"suffix_shared_tokens": 0} if setup.drafter in ("suffix", "auto", "cascade") else {}
            self.engines[key] = fresh(self.llm, replace(setup, options=unshared | setup.options))
            for _ in range(2):  # the second run captures the passes that the controller settled on
                self.engines[key].generate([self.prompts[index].ids], self._params(index))
        self.engines[key].forget()
        return self.engines[key]

    def _params(self, index: int) -> SamplingParams:
        return self.prompts[index].params or self.plan.params(index)

    def rows(self, categories: bool = True) -> list[BenchRow]:
        """Each setup on each category, and on all prompts."""
        rows = []
        for label, pairs in self.pairs.items():
            kinds = list(dict.fromkeys(p.category for p in pairs if p.category != ALL)) if categories else []
            for kind in [*kinds, ALL]:
                some = [p for p in pairs if kind in (ALL, p.category)]
                rows.append(bench_row(self.setups[label], kind, some, self.plan.seed))
        return rows

    def divergences(self) -> list[dict[str, Any]]:
        """Where speculative ids differ from plain ones; empty when the promise holds."""
        return [
            {"drafter": self.setups[label].drafter, "k": self.setups[label].k, "prompt": pair.prompt}
            | {"category": pair.category, "round": pair.round, "position": pair.differs_at}
            for label, pairs in self.pairs.items()
            for pair in pairs
            if pair.differs_at is not None
        ]

    @property
    def compared_tokens(self) -> int:
        return sum(max(len(p.plain.ids), len(p.speculative.ids)) for pairs in self.pairs.values() for p in pairs)


def measure(
    llm: LLM,
    prompts: list[EncodedPrompt],
    setups: list[Setup],
    plan: BenchPlan,
    progress: Progress = lambda what, done: None,
) -> Bench:
    """All setups on all prompts for as many rounds as planned, after a warm-up."""
    bench = Bench(llm, prompts, plan)
    warm_up(bench)
    begin, most = time.perf_counter(), plan.most_seconds or math.inf

    def report(number: int, what: str, done: float) -> None:
        progress(what, min(max((number + done) / plan.rounds, (time.perf_counter() - begin) / most), 1.0))

    for number in range(plan.rounds):
        if number and time.perf_counter() - begin > most:
            break
        bench.round(setups, number, partial(report, number))
    return bench


def race(llm: LLM, ids: list[int], params: SamplingParams, rounds: int = 3) -> BenchRow:
    """One request with the model's own drafter and without it, in turn, with nothing printed meanwhile."""
    setup = Setup(llm.config.drafter_name, llm.config.k, llm.config.options)
    bench = Bench(llm, [EncodedPrompt(ids, params=params)], BenchPlan(rounds=rounds))
    for number in range(rounds):
        bench.round([setup], number, lambda what, done: None)
    return bench.rows(categories=False)[0]


def result(bench: Bench, sweep: Bench | None = None) -> dict[str, Any]:
    """All that was measured and where, ready for JSON; the report and the tables are made from this."""
    swept = sweep.rows(categories=False) if sweep else []
    best = knee(swept)
    return {
        "model": bench.llm.name,
        "dtype": bench.llm.dtype,
        "rule": bench.llm.config.rule,
        "rows": rows_as_json(bench.rows()),
        "sweep": rows_as_json(swept),
        "knee": {"best_k": best[0], "enough_k": best[1]} if best else None,
        "costs": {str(rows): seconds for rows, seconds in bench.pass_costs.items()},
        "compared_tokens": bench.compared_tokens + (sweep.compared_tokens if sweep else 0),
        "divergences": bench.divergences() + (sweep.divergences() if sweep else []),
        "prompts": len(bench.prompts),
        **asdict(bench.plan),
        "environment": environment(),
    }


def warm_up(bench: Bench) -> None:
    """A short untimed generation: the first passes of a process pay for lazy initialisation."""
    for _ in fresh(bench.llm, PLAIN).stream(bench.prompts[0].ids, SamplingParams(max_tokens=4)):
        pass


def fresh(llm: LLM, setup: Setup) -> LLM:
    """The same target with a new engine for one request at a time; pass costs are shared."""
    return llm.using(drafter=setup.drafter, k=setup.k, max_batch=1, **setup.options)


def batch_costs(llm: LLM, sequences: tuple[int, ...] = (1, 2, 4, 8)) -> dict[str, float]:
    """Seconds of a pass under "sequences,rows", measured now: tables of K for other engines are made from these."""
    costs = target_costs(llm.engine.target, llm.engine.cache, sequences)
    return {f"{count},{rows}": seconds for (count, rows), seconds in costs.items()}


def pass_costs(llm: LLM) -> dict[int, float]:
    """Seconds of a target pass over one sequence by its row count, measured now."""
    return by_rows(target_costs(llm.engine.target, llm.engine.cache))
