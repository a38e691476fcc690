"""The drift monitor: it finds a change that was planted, keeps quiet without one, and remembers across runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from outrider.backends.toy import toy
from outrider.config import Config
from outrider.control.drift import WARM, Monitor, Watch, read
from outrider.llm import build_engine
from outrider.types import SamplingParams, Sequence

TARGET = toy()


def blocks(dice: random.Random, rate: float, count: int) -> list[float]:
    """Requests differ from each other more than chance alone would make them."""
    values = []
    for _ in range(count):
        own, nodes = min(max(dice.gauss(rate, 0.1), 0.02), 0.98), dice.randint(48, 90)
        values.append(sum(dice.random() < own for _ in range(nodes)) / nodes)
    return values


def test_without_a_change_it_keeps_quiet() -> None:
    alarms = 0
    for seed in range(40):
        watch = Watch()
        alarms += sum(watch.add(value) is not None for value in blocks(random.Random(seed), 0.35, 250))
    assert alarms <= 3  # of 10,000 blocks


def test_a_planted_fall_is_found_soon() -> None:
    found = []
    for seed in range(40):
        dice, watch = random.Random(seed), Watch()
        assert not any(watch.add(value) for value in blocks(dice, 0.40, 60))
        for delay, value in enumerate(blocks(dice, 0.20, 60)):
            if (change := watch.add(value)) is not None:
                assert change.fell
                assert abs(change.after - 0.20) < 0.12
                found.append(delay)
                break
        assert watch.stale is not None
    assert len(found) == 40
    assert sorted(found)[20] <= 15


def test_a_rise_is_no_harm_and_heals_a_fall() -> None:
    dice, watch = random.Random(5), Watch()
    for rate in (0.4, 0.15, 0.45):
        for value in blocks(dice, rate, 80):
            watch.add(value)
    assert [change.fell for change in watch.changes] == [True, False]
    assert watch.stale is None


def test_one_strange_request_is_no_change() -> None:
    dice, watch = random.Random(2), Watch()
    for value in [*blocks(dice, 0.4, WARM + 10), 0.0, *blocks(dice, 0.4, 20)]:
        assert watch.add(value) is None


def run(monitor: Monitor, count: int, **params: object) -> None:
    engine = build_engine(TARGET, Config(drafter="ngram", k=4), listeners=(monitor,))
    for i in range(count):
        seq = Sequence(i, [1, 2, 3, 4, 1, 2, 3], SamplingParams(max_tokens=60, **params), seed=i)  # type: ignore[arg-type]
        engine.add(seq)
        while engine.busy:
            engine.step()


def test_it_watches_by_kind_and_remembers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    monitor = Monitor("some/model")
    run(monitor, 12, kind="code")
    run(monitor, 12)
    assert {key[1] for key in monitor.watches} == {"code", "text"}
    monitor.keep()
    assert Monitor("some/model").watches == monitor.watches
    assert Monitor("other").watches == {}
    facts = monitor.as_json()
    assert all(fact["alpha"] is not None and not fact["stale"] for fact in facts)
    assert monitor.path is not None
    monitor.path.write_text("{")
    assert read(monitor.path) == {}


def test_requests_that_opt_out_are_not_counted() -> None:
    monitor = Monitor()
    run(monitor, 12, learn=False)
    assert not monitor.watches
    assert not monitor._open


def test_it_says_what_is_stale_and_what_to_do() -> None:
    monitor, dice = Monitor(), random.Random(1)
    watch = monitor.watches["online", "code"] = Watch()
    for rate in (0.5, 0.2):
        for value in blocks(dice, rate, 60):
            watch.add(value)
    (sentence,) = monitor.sentences()
    assert "online" in sentence
    assert "'code'" in sentence
    assert "--learn" in sentence
