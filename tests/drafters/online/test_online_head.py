"""Online learning behind a trained head: skipped where the drafter `head` is not installed."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.config import Config
from outrider.engine.step import Engine
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.testing import check_drafter
from outrider.types import SamplingParams, Sequence

from support.toys import toy

network = pytest.importorskip("outrider.drafters.head.network")

TARGET = toy()
EAGER = {"learn_every": 1, "learn_share": 1e9, "learn_cap_ms": 1e6}  # learn as much as possible


def engine_of(k: int = 3, **options: Any) -> Engine:
    return build_engine(TARGET, Config(drafter="online", k=k, options=EAGER | options))


def ask(engine: Engine, prompt: list[int], name: int = 0, **params: Any) -> Sequence:
    seq = Sequence(name, prompt, SamplingParams(**{"max_tokens": 40} | params), seed=name)
    engine.add(seq)
    while engine.busy:
        engine.step()
    return seq


def alpha(engine: Engine, prompts: list[list[int]], start: int = 0) -> float:
    seqs = [ask(engine, prompt, start + i) for i, prompt in enumerate(prompts)]
    return sum(s.stats.accepted for s in seqs) / sum(s.stats.reached for s in seqs)


def stream(count: int) -> list[list[int]]:
    """Prompts of one kind: a few beginnings that come again and again."""
    return [[1 + i % 5, 7, 3 + i % 5, 9, 2] for i in range(count)]


def head(kind: str) -> Any:
    return network.Head(*random_head(TARGET.config, kind), TARGET.embedding, TARGET.compute)


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("block", marks=pytest.mark.slow)])
def test_a_learning_head_changes_no_text(kind: str) -> None:
    assert check_drafter("online", EAGER | {"head": head(kind)}, TARGET, tokens=20)


def test_a_fresh_adapter_says_what_the_head_says() -> None:
    plain = build_engine(TARGET, Config(drafter="head", k=4, options={"head": head("eagle3")}))
    adapted = engine_of(k=4, head=head("eagle3"), learn=False)
    for i, prompt in enumerate(stream(5)):
        a, b = ask(plain, prompt, i), ask(adapted, prompt, i)
        assert (a.tokens, a.stats.accepted, a.stats.reached) == (b.tokens, b.stats.accepted, b.stats.reached)


@pytest.mark.slow
def test_a_head_learns_too() -> None:
    learns, frozen = engine_of(head=head("eagle3")), engine_of(head=head("eagle3"), learn=False)
    alpha(learns, stream(60))
    late, never = alpha(learns, stream(20), 100), alpha(frozen, stream(20), 100)
    assert late > never + 0.1, (late, never)
