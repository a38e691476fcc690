"""The two modes of `ahead`, drafting ahead and just in time: which one is kept, and that both give the same text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from outrider import SamplingParams
from outrider.config import Config
from outrider.drafters.ahead.drafter import Ahead
from outrider.drafters.ahead.statistics import Profitability
from outrider.llm import build_engine
from outrider.testing import Scenario, decode
from outrider.types import Sequence

from support.ahead import alternating
from support.toys import reference, toy

TARGET = toy()


def model() -> dict[str, Any]:
    return {"draft_model": toy(blur=0.08), "ahead_fallback": ""}


# ---------------------------------------------------------------- which mode


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_mode_is_kept(faster: bool) -> None:
    choice, ahead = Profitability(), 0
    for _ in range(2000):
        ahead += choice.ahead
        choice.add_step(1, choice.ahead, 2, 0.010 if choice.ahead == faster else 0.013)
    assert choice.ahead == faster
    assert (ahead > 1800) if faster else (ahead < 200)
    assert ("ahead is kept" if faster else "just in time is kept") in choice.why


def test_a_change_is_noticed() -> None:
    choice = Profitability()
    for step in range(4000):
        better = step > 1000
        choice.add_step(1, choice.ahead, 2, 0.010 if choice.ahead == better else 0.014)
    assert choice.ahead


def test_a_trial_that_clearly_loses_is_short_and_trials_become_rare() -> None:
    choice, modes = Profitability(first=False), list[bool]()
    for _ in range(3000):
        modes.append(choice.ahead)
        choice.add_step(1, choice.ahead, 2, 0.030 if choice.ahead else 0.010)
    trials = [sum(group) for ahead, group in itertools.groupby(modes) if ahead]
    assert not choice.ahead
    assert 2 <= len(trials) <= 6
    assert max(trials) <= 2 + Profitability.MIN_STEPS
    assert "just in time is kept" in choice.why


def test_ahead_is_not_kept_where_nothing_is_prepared() -> None:
    """Otherwise the speed of plain decoding would count as its own."""
    choice, ahead = Profitability(first=False), 0
    for _ in range(1000):
        ahead += choice.ahead
        choice.add_step(1, choice.ahead, 2, 0.009 if choice.ahead else 0.010, prepared=False)
    assert not choice.ahead
    assert ahead < 100
    assert "too few steps prepared" in choice.why


def test_a_prepared_draft_is_not_used_in_the_mode_just_in_time() -> None:
    """It took no time: the controller would measure drafting just in time as free."""
    options = model() | {"ahead_depth": 3}
    engine = build_engine(TARGET, Config(drafter="ahead", k=4, options=options))
    drafter = engine.drafter
    assert isinstance(drafter, Ahead)
    assert drafter.host.wait_ready(30)
    drafter.profitability.ahead, drafter.profitability.left = True, 10**6
    engine.add(seq := Sequence(1, [1, 2, 3, 4, 5], SamplingParams(max_tokens=40)))
    for _ in range(4):
        engine.step()
    assert drafter.in_flight
    drafter.profitability.ahead = False
    assert {tree.source for tree in engine.step().draft.trees} == {"model"}
    engine.cancel(seq)
    drafter.host.close()


# ---------------------------------------------------------------- the text


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_the_targets_while_modes_alternate(
    monkeypatch: pytest.MonkeyPatch, temperature: float, batch: int
) -> None:
    engine = alternating(monkeypatch, TARGET, model(), k=4)
    params, scenario = SamplingParams(temperature=temperature, max_tokens=40), Scenario("x", batch=batch)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    assert not engine.failures
    statistics = engine.drafter.statistics
    assert statistics.jits > 3
    assert sum(statistics.hits.values()) + sum(statistics.misses.values()) > 3


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_sampled_text_does_not_depend_on_the_mode(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Tokens sampled just in time are those that would have been prepared."""
    params, scenario, texts = SamplingParams(temperature=0.8, max_tokens=30), Scenario("x", batch=2), []
    for _ in range(2):
        engine = alternating(monkeypatch, TARGET, model(), k=4)
        texts.append(decode(engine, scenario, params, rule))
    monkeypatch.undo()
    engine = build_engine(TARGET, Config(drafter="ahead", k=4, options=model() | {"ahead_always": True}))
    assert engine.drafter.host.wait_ready(30)
    texts.append(decode(engine, scenario, params, rule))
    assert texts[0] == texts[1] == texts[2]
