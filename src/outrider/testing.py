"""The conformance kit: whatever a drafter does, the text stays what the target alone would have said.

    from outrider.testing import check_drafter
    check_drafter(MyDrafter)          # raises AssertionError with a sentence when the text changes

It runs tiny real models in float64, so that it takes seconds and equality is exact. It cannot say whether a drafter is
any good; `outrider bench` and the statistics say that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .backends.toy import VOCABULARY, toy
from .backends.transformer import Transformer
from .config import Config
from .drafters import Drafter, DraftRequest, Workspace, lookup
from .engine.step import Engine
from .llm import build_engine
from .types import Draft, SamplingParams, Sequence, Step

TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Scenario:
    """A way of running a few requests that must not change what they say."""

    name: str
    batch: int = 4
    stagger: int = 0  # steps between arrivals
    config: dict[str, Any] = field(default_factory=dict)
    repeat: bool = False  # ask everything twice: the second time finds its prefix


SCENARIOS = (
    Scenario("alone", batch=1),
    Scenario("staggered", stagger=3),
    Scenario("preempted", config={"cache_tokens": 150, "max_length": 80}),
    Scenario("chunked", config={"max_rows": 7}),
    Scenario("prefix", repeat=True),
)


def prompts(batch: int) -> list[list[int]]:
    """Short prompts that share a beginning and repeat themselves, so that every drafter has something to find."""
    return [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 9 + i, 3, 4, 5, 6, 9 + i] for i in range(batch)]


def decode(engine: Engine, scenario: Scenario, params: SamplingParams, rule: str = "match") -> list[list[int]]:
    """Run a scenario to its end, with the cache checked after every step; the generated ids of each request."""
    seqs = [
        Sequence(i, prompt, params, seed=1000 + i % scenario.batch, ends=frozenset({0}), rule=rule)
        for i, prompt in enumerate(prompts(scenario.batch) * (2 if scenario.repeat else 1))
    ]
    later = list(seqs)
    wait = 0
    while later or engine.busy:
        if later and (wait == 0 or not engine.busy):
            arriving = 1 if scenario.stagger else scenario.batch
            for seq in later[:arriving]:
                engine.add(seq)
            later, wait = later[arriving:], scenario.stagger or 10**9
        wait = max(wait - 1, 0)
        engine.step()
        engine.cache.check()
    return [seq.generated for seq in seqs]


def reference(target: Transformer, scenario: Scenario, params: SamplingParams) -> list[list[int]]:
    """What the target says by itself: no drafter, no batch, nothing shared."""
    engine = build_engine(target, Config(drafter="off"))
    texts = []
    for i, prompt in enumerate(prompts(scenario.batch)):
        seq = Sequence(i, prompt, params, seed=1000 + i, ends=frozenset({0}))
        engine.add(seq)
        while engine.busy:
            engine.step()
        texts.append(seq.generated)
    return texts * (2 if scenario.repeat else 1)


def meddled(drafter: str | type[Drafter], seed: int) -> type[Drafter]:
    """The same drafter with its optional calls skipped, repeated or broken at random, and some drafts refused."""
    base = lookup(drafter)

    class Meddled(base):  # type: ignore[misc, valid-type]
        name = f"meddled-{base.name}"

        def __init__(self, space: Workspace) -> None:
            super().__init__(space)
            self.dice = random.Random(seed)

        def _perhaps(self, call: Callable[[], None]) -> None:
            for _ in range(self.dice.choice((0, 1, 1, 2))):
                call()
            if self.dice.random() < 0.1:
                raise RuntimeError("a drafter may crash")

        def begin(self, seq: Sequence) -> None:
            self._perhaps(lambda: base.begin(self, seq))

        def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
            self._perhaps(lambda: base.overlap(self, seqs, draft))

        def observe(self, step: Step) -> None:
            self._perhaps(lambda: base.observe(self, step))

        def end(self, seq: Sequence) -> None:
            self._perhaps(lambda: base.end(self, seq))

        def draft(self, request: DraftRequest) -> Draft:
            if self.dice.random() < 0.1:
                base.draft(self, request)  # the work was done, and then everything is lost
                raise RuntimeError("a drafter may crash")
            return base.draft(self, request)

    return Meddled


def check_drafter(
    drafter: str | type[Drafter],
    options: dict[str, Any] | None = None,
    target: Transformer | None = None,
    tokens: int = 40,
    tokenizer: Any = None,
) -> int:
    """Assert that a drafter cannot change the text; returns how many tokens were compared.

    `tokenizer` is the target's, for drafters that read text.
    """
    target = target or toy()
    base = lookup(drafter)
    options = base.traits.trial(target) if options is None else options
    compared = 0
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, max_tokens=tokens)
        for scenario in SCENARIOS:
            expected = reference(target, scenario, params)
            for candidate in (base, meddled(base, seed=compared)):
                config = Config(drafter=candidate, k=5, options=options, **scenario.config)
                said = decode(build_engine(target, config, tokenizer), scenario, params)
                _insist(expected, said, f"'{candidate.name}' at temperature {temperature:g}, {scenario.name}")
                compared += sum(map(len, said))
    return compared


def _insist(expected: list[list[int]], said: list[list[int]], where: str) -> None:
    for number, (a, b) in enumerate(zip(expected, said, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            raise AssertionError(
                f"The drafter {where} changed request {number} at token {at}: the target says {a[at : at + 5]}, with "
                f"the drafter it said {b[at : at + 5]}."
            )


__all__ = ["SCENARIOS", "VOCABULARY", "Scenario", "check_drafter", "decode", "meddled", "reference"]
