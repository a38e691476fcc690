"""The race: one clock and one counter for all contenders, in turns on the same prompts.

`Watch` listens to the steps of an Outrider engine; other generators (transformers) produce the same `Marks`.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from gpu_common import Lab
from outrider import LLM, SamplingParams
from outrider.measure.bench import EncodedPrompt
from outrider.types import Stats

Marks = list[tuple[float, dict[int, int]]]  # time of an emission, and how many tokens for each sequence


@dataclass(frozen=True)
class Speed:
    """Tokens and times of one request or one batch."""

    tokens: int  # emitted in all
    seconds: float  # from the request to the last token
    after: int  # tokens emitted after every sequence had its first
    decode: float  # seconds for those
    emissions: int  # emissions

    @staticmethod
    def of(begin: float, marks: Marks) -> Speed:
        seen: set[int] = set()
        started, late = 0, {name for _, some in marks for name in some}
        for i, (_, some) in enumerate(marks):
            seen |= some.keys()
            if seen == late:
                started = i
                break
        after = sum(sum(some.values()) for _, some in marks[started + 1 :])
        last, total = marks[-1][0], sum(sum(some.values()) for _, some in marks)
        return Speed(total, last - begin, after, last - marks[started][0], len(marks))


def crowded(marks: Marks, slots: int) -> tuple[int, float]:
    """Tokens and seconds while every slot is taken: from the time the slots are full until the last request starts.

    A batch whose members are not replaced measures its slowest member instead.
    """
    seen: set[int] = set()
    begun: list[int] = []  # how many requests have started, at each mark
    for _, some in marks:
        seen |= some.keys()
        begun.append(len(seen))
    first = next(i for i, n in enumerate(begun) if n >= slots)
    last = begun.index(len(seen))
    return sum(sum(some.values()) for _, some in marks[first + 1 : last + 1]), marks[last][0] - marks[first][0]


@dataclass(frozen=True)
class Heard:
    """One step of an engine."""

    begin: float
    end: float
    emitted: dict[int, int]
    clock: dict[str, float]
    device: dict[str, float]  # seconds by the device's clock, where the engine has one


class Watch:
    """Records every step of an engine within this context; `each` gets the number of steps so far."""

    def __init__(self, engine: Any, each: Callable[[int], None] = lambda n: None) -> None:
        self.engine, self.each = engine, each
        self.steps: list[Heard] = []

    def __enter__(self) -> Watch:
        step = self.engine.step

        def stepped() -> Any:
            begin = time.perf_counter()
            done = step()
            pairs = zip(done.turns, done.verdicts, strict=True)
            emitted = {turn.seq.id: len(v.tokens) for turn, v in pairs if v is not None}
            own = dict(getattr(done.output, "seconds", None) or {})
            self.steps.append(Heard(begin, time.perf_counter(), emitted, dict(done.clock), own))
            self.each(len(self.steps))
            return done

        self.engine.step = stepped
        return self

    def __exit__(self, *_: object) -> None:
        del self.engine.step  # the class has one of its own

    @property
    def marks(self) -> Marks:
        return [(step.end, step.emitted) for step in self.steps if step.emitted]


@dataclass(frozen=True)
class Run:
    """One timed request or batch."""

    ids: list[list[int]]
    speed: Speed
    stats: list[Stats] = field(default_factory=list)
    steps: list[Heard] = field(default_factory=list)
    begin: float = 0.0  # when the request was sent

    @property
    def marks(self) -> Marks:
        return [(step.end, step.emitted) for step in self.steps if step.emitted]


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> Run:
    """All prompts as one batch, by an engine without memory of them."""
    forget(llm)
    gc.collect()
    with Watch(llm.engine) as watch:
        begin = time.perf_counter()
        results = llm.generate(prompts, params)
    outputs = [result.outputs[0] for result in results]
    ids, stats = [out.token_ids for out in outputs], [out.stats for out in outputs]
    return Run(ids, Speed.of(begin, watch.marks), stats, watch.steps, begin)


@contextmanager
def settled() -> Iterator[None]:
    """What exists now is left alone by the collector, which else takes a tenth of a second before every run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def forget(llm: LLM) -> None:
    """Drop cached K/V of earlier rounds, so that every request pays for its own prompt."""
    llm.engine.cache.drop_retired()


def device_seconds(step: Heard, phase: str) -> float | None:
    """Seconds of a phase by the device's clock, where the engine reports them (under either name)."""
    names = (f"{phase}_device", f"device_{phase}", f"{phase} device", f"device {phase}")
    return step.device.get(phase, next((step.clock[name] for name in names if name in step.clock), None))


# ---------------------------------------------------------------- contenders


@dataclass
class Contender:
    """One way to generate; `runs` are by prompt."""

    name: str
    ask: Callable[[list[int], int], Run]
    k: int | str | None = None
    runs: dict[int, list[Run]] = field(default_factory=lambda: defaultdict(list))

    def decode_seconds(self, prompt: int) -> float:
        return median(r.speed.decode for r in self.runs[prompt])

    def over(self, indices: list[int]) -> float | None:
        """Tokens per second after the first token, over these prompts."""
        seconds = sum(self.decode_seconds(q) for q in indices)
        return sum(self.runs[q][0].speed.after for q in indices) / seconds if seconds else None

    def whole(self, indices: list[int]) -> float:
        """Tokens per second of whole requests, prompts included."""
        seconds = sum(median(r.speed.seconds for r in self.runs[q]) for q in indices)
        return sum(self.runs[q][0].speed.tokens for q in indices) / seconds

    @property
    def indices(self) -> list[int]:
        return sorted(q for q, runs in self.runs.items() if runs)

    @property
    def stats(self) -> list[Stats]:
        return [s for q in self.indices for r in self.runs[q] for s in r.stats]

    @property
    def tau(self) -> float | None:
        return self.tau_of(self.indices)

    def tau_of(self, indices: list[int]) -> float | None:
        """Tokens per emission over these prompts: for one sequence, tokens per target pass."""
        speeds = [r.speed for q in indices for r in self.runs[q]]
        return sum(s.tokens for s in speeds) / sum(s.emissions for s in speeds) if speeds else None

    @property
    def alpha(self) -> float | None:
        reached = sum(s.reached for s in self.stats)
        return sum(s.accepted for s in self.stats) / reached if reached else None

    def recorded(self, prompt: int) -> float:
        """Seconds of timed requests in which passes were captured."""
        return sum(step.device.get("record", 0.0) for run in self.runs[prompt] for step in run.steps)

    def ratio(self, plain: Contender, indices: list[int]) -> float | None:
        own, base = self.over(indices), plain.over(indices)
        return own / base if own and base else None

    def differs(self, plain: Contender) -> list[int]:
        """Prompts whose text differs from plain decoding in any round."""
        return [q for q in self.indices if any(r.ids != plain.runs[q][0].ids for r in self.runs[q])]


def contender(
    lab: Lab, name: str, drafter: str, k: int | str = "auto", ignore_eos: bool | None = None, **options: Any
) -> Contender:
    """One of Outrider's drafters, for one request at a time."""
    llm = lab.using(drafter, k, **options)
    ignoring = lab.options.ignore_eos if ignore_eos is None else ignore_eos

    def ask(ids: list[int], tokens: int) -> Run:
        seed, temperature = lab.options.seed, lab.options.temperature
        return run(llm, [ids], SamplingParams(temperature, seed=seed, max_tokens=tokens, ignore_eos=ignoring))

    return Contender(name, ask, k)


def race(lab: Lab, contenders: list[Contender], prompts: list[EncodedPrompt], tokens: int, rounds: int) -> int:
    """All contenders on each prompt in turn, in a changing order; returns the number of complete rounds."""
    warm(contenders, prompts, tokens)
    with settled():
        for number in range(rounds):
            for i, prompt in enumerate(prompts):
                if lab.late and (number or i):
                    return number
                for c in turned(contenders, number + i):
                    c.runs[i].append(c.ask(prompt.ids, tokens))
    return rounds


def warm(contenders: list[Contender], prompts: list[EncodedPrompt], tokens: int) -> None:
    """Untimed first requests, which capture graphs and compile for each prompt length."""
    for c in contenders:
        for prompt in (prompts[0], *prompts):
            c.ask(prompt.ids, min(tokens, 48 if prompt is prompts[0] else 4))


def turned(items: list[Contender], by: int) -> Iterator[Contender]:
    at = by % len(items)
    return iter(items[at:] + items[:at])


def figures(c: Contender, plain: Contender | None = None) -> dict[str, Any]:
    """A contender's numbers, ready for JSON."""
    indices = c.indices
    each = [c.over([q]) for q in indices]
    found: dict[str, Any] = {
        "tok_s": c.over(indices),
        "median_tok_s": median(x for x in each if x) if any(each) else None,
        "request_tok_s": c.whole(indices),
        "tokens": sum(c.runs[q][0].speed.tokens for q in indices),
        "rounds": min((len(c.runs[q]) for q in indices), default=0),
        "tau": c.tau,
        "alpha": c.alpha,
        "record_s": sum(c.recorded(q) for q in indices),
    }
    if plain is not None and plain is not c:
        found |= {"ratio": c.ratio(plain, indices), "texts": len(indices), "divergent_texts": len(c.differs(plain))}
    return found
