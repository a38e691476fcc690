"""The drift monitor: it detects a planted change, raises no alarm without one, and keeps its state across runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from outrider.config import Config
from outrider.drafters._drift import KINDS, OTHER, WARM, ChangeDetector, Monitor, read
from outrider.llm import build_engine
from outrider.types import SamplingParams, Sequence

from support.toys import toy

TARGET = toy()


def blocks(dice: random.Random, rate: float, count: int) -> list[float]:
    """Acceptance of blocks; requests differ more than by chance."""
    values = []
    for _ in range(count):
        own, nodes = min(max(dice.gauss(rate, 0.1), 0.02), 0.98), dice.randint(48, 90)
        values.append(sum(dice.random() < own for _ in range(nodes)) / nodes)
    return values


def test_without_a_change_there_is_no_alarm() -> None:
    alarms = 0
    for seed in range(40):
        detector = ChangeDetector()
        alarms += sum(detector.add(value) is not None for value in blocks(random.Random(seed), 0.35, 250))
    assert alarms <= 3  # of 10,000 blocks


def test_a_planted_fall_is_found_soon() -> None:
    found = []
    for seed in range(40):
        dice, detector = random.Random(seed), ChangeDetector()
        assert not any(detector.add(value) for value in blocks(dice, 0.40, 60))
        for delay, value in enumerate(blocks(dice, 0.20, 60)):
            if (change := detector.add(value)) is not None:
                assert change.fell
                assert abs(change.after - 0.20) < 0.12
                found.append(delay)
                break
        assert detector.stale is not None
    assert len(found) == 40
    assert sorted(found)[20] <= 15


def test_a_rise_is_no_alarm_and_ends_a_fall() -> None:
    dice, detector = random.Random(5), ChangeDetector()
    for rate in (0.4, 0.15, 0.45):
        for value in blocks(dice, rate, 80):
            detector.add(value)
    assert [change.fell for change in detector.changes] == [True, False]
    assert detector.stale is None


def test_one_unusual_request_is_no_change() -> None:
    dice, detector = random.Random(2), ChangeDetector()
    for value in [*blocks(dice, 0.4, WARM + 10), 0.0, *blocks(dice, 0.4, 20)]:
        assert detector.add(value) is None


def run(monitor: Monitor, count: int, **params: object) -> None:
    engine = build_engine(TARGET, Config(drafter="ngram", k=4), listeners=(monitor,))
    for i in range(count):
        seq = Sequence(i, [1, 2, 3, 4, 1, 2, 3], SamplingParams(max_tokens=60, **params), seed=i)  # type: ignore[arg-type]
        engine.add(seq)
        while engine.busy:
            engine.step()


def test_state_is_kept_by_kind_and_across_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    monitor = Monitor("some/model")
    run(monitor, 12, kind="code")
    run(monitor, 12)
    assert {key[1] for key in monitor.detectors} == {"code", "text"}
    monitor.save()
    assert Monitor("some/model").detectors == monitor.detectors
    assert Monitor("other").detectors == {}
    facts = monitor.as_json()
    assert all(fact["alpha"] is not None and not fact["stale"] for fact in facts)
    assert monitor.path is not None
    monitor.path.write_text("{")
    assert read(monitor.path) == {}


def test_requests_that_opt_out_are_not_counted() -> None:
    monitor = Monitor()
    run(monitor, 12, learn=False)
    assert not monitor.detectors
    assert not monitor._open


def test_clients_cannot_create_any_number_of_kinds() -> None:
    monitor = Monitor()
    names = [f"kind-{i}" for i in range(3 * KINDS)]
    assert len({monitor._kind(name) for name in names}) <= KINDS
    assert monitor._kind(names[0]) == names[0]
    assert monitor._kind(names[-1]) == OTHER


def test_sentences_name_the_stale_drafter_and_the_remedy() -> None:
    monitor, dice = Monitor(), random.Random(1)
    detector = monitor.detectors["online", "code"] = ChangeDetector()
    for rate in (0.5, 0.2):
        for value in blocks(dice, rate, 60):
            detector.add(value)
    (sentence,) = monitor.sentences()
    assert "online" in sentence
    assert "'code'" in sentence
    assert "--learn" in sentence
