"""The conformance kit for drafters: whatever a drafter does, the text stays that of the target alone.

    from outrider.testing import check_drafter
    check_drafter(MyDrafter)          # AssertionError with a sentence if the text changes or every draft fails

It runs tiny real models in float64, so that it takes seconds and equality is exact. It does not measure how good a
drafter is; `outrider bench` does.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .backends import Model
from .backends.toy import VOCABULARY, toy
from .config import Config
from .drafters import Drafter, DraftRequest, Workspace, lookup
from .engine.step import Engine
from .llm import build_engine
from .types import Draft, Listener, SamplingParams, Sequence, Step

TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Scenario:
    """How a few requests are run; their texts must not depend on it."""

    name: str
    batch: int = 4
    stagger: int = 0  # steps between arrivals
    config: dict[str, Any] = field(default_factory=dict)
    repeat: bool = False  # run every request twice: the second finds its prefix in the cache


SCENARIOS = (
    Scenario("alone", batch=1),
    Scenario("staggered", stagger=3),
    Scenario("preempted", config={"cache_tokens": 150, "max_length": 80}),
    Scenario("chunked", config={"max_rows": 7}),
    Scenario("prefix", repeat=True),
)


def prompts(batch: int) -> list[list[int]]:
    """Short prompts with a common prefix and repetitions, so that every drafter has something to find."""
    return [[1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 9 + i, 3, 4, 5, 6, 9 + i] for i in range(batch)]


def _sequence(
    target: Model | None, i: int, prompt: list[int], params: SamplingParams, seed: int, rule: str = "match"
) -> Sequence:
    """A request. Where the target has an encoder, the prompt is its source."""
    tokens, source = (prompt, []) if target is None else target.opening(prompt)
    return Sequence(i, tokens, params, seed=seed, ends=frozenset({0}), rule=rule, source=source)


def decode(
    engine: Engine, scenario: Scenario, params: SamplingParams, rule: str = "match", target: Model | None = None
) -> list[list[int]]:
    """Run a scenario, with the cache checked after every step; returns the generated ids of each request.

    target: needed where it has an encoder.
    """
    seqs = [
        _sequence(target, i, prompt, params, 1000 + i % scenario.batch, rule)
        for i, prompt in enumerate(prompts(scenario.batch) * (2 if scenario.repeat else 1))
    ]
    later, wait, arriving = list(seqs), 0, 1 if scenario.stagger else scenario.batch
    while later or engine.busy:
        if later and (wait == 0 or not engine.busy):
            for seq in later[:arriving]:
                engine.add(seq)
            later, wait = later[arriving:], scenario.stagger or 10**9
        wait = max(wait - 1, 0)
        engine.step()
        engine.cache.check()
    return [seq.generated for seq in seqs]


def reference(target: Model, scenario: Scenario, params: SamplingParams) -> list[list[int]]:
    """The target's own texts: no drafter, no batch, no shared prefixes."""
    engine = build_engine(target, Config(drafter="off"))
    texts = []
    for i, prompt in enumerate(prompts(scenario.batch)):
        seq = _sequence(target, i, prompt, params, 1000 + i)
        engine.add(seq)
        while engine.busy:
            engine.step()
        texts.append(seq.generated)
    return texts * (2 if scenario.repeat else 1)


def meddled(drafter: str | type[Drafter], seed: int) -> type[Drafter]:
    """The same drafter with its optional calls skipped, repeated or failing at random, and some drafts failing."""
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
                base.draft(self, request)  # its work is done, but the draft is lost
                raise RuntimeError("a drafter may crash")
            return base.draft(self, request)

    return Meddled


class DraftRequests(Listener):
    """Counts an engine's draft requests, and those that failed without any draft."""

    reads_logits = False

    def __init__(self) -> None:
        self.total = self.failed = 0
        self.first_failure = ""

    def observe(self, step: Step) -> None:
        self.total += any(turn.budget for turn in step.turns)
        self.failed += bool(step.failure) and not any(tree.tokens for tree in step.draft.trees)
        self.first_failure = self.first_failure or step.failure


def check_drafter(
    drafter: str | type[Drafter],
    options: dict[str, Any] | None = None,
    target: Model | None = None,
    tokens: int = 40,
    tokenizer: Any = None,
) -> int:
    """Assert that a drafter cannot change the text; returns how many tokens were compared.

    A drafter that fails in every draft request does not pass: nothing of it would have been checked. One that never
    has anything to propose does. `tokenizer` is the target's, for drafters that read text.
    """
    target, base, requests, compared = target or toy(), lookup(drafter), DraftRequests(), 0
    options = base.traits.trial(target) if options is None else options
    for temperature in TEMPERATURES:
        params = SamplingParams(temperature=temperature, max_tokens=tokens)
        alone = reference(target, Scenario("reference"), params)
        for scenario in SCENARIOS:
            expected = alone[: scenario.batch] * (2 if scenario.repeat else 1)
            for candidate, listeners in ((base, (requests,)), (meddled(base, seed=compared), ())):
                config = Config(drafter=candidate, k=5, options=options, **scenario.config)
                with _quiet():
                    engine = build_engine(target, config, tokenizer, listeners)
                    generated = decode(engine, scenario, params, target=target)
                _compare(expected, generated, f"'{candidate.name}' at temperature {temperature:g}, {scenario.name}")
                compared += sum(map(len, generated))
    if requests.total and requests.failed == requests.total:
        raise AssertionError(
            f"The drafter '{base.name}' failed in every one of {requests.total} draft requests, so none of its drafts "
            f"was checked. The first failure: {requests.first_failure}"
        )
    return compared


@contextmanager
def _quiet() -> Iterator[None]:
    """Failures are injected here; those of the drafter itself are reported at the end."""
    logger = logging.getLogger("outrider.engine")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def _compare(expected: list[list[int]], generated: list[list[int]], run: str) -> None:
    for number, (a, b) in enumerate(zip(expected, generated, strict=True)):
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            raise AssertionError(
                f"The drafter {run} changed request {number} at token {at}: the target alone generates "
                f"{a[at : at + 5]}, with the drafter it generates {b[at : at + 5]}."
            )


__all__ = ["SCENARIOS", "VOCABULARY", "Scenario", "check_drafter", "decode", "meddled", "reference"]
