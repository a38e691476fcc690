"""What is measured once is kept, and what cannot be kept does no harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.build import build_engine
from outrider.config import Config
from outrider.models import load
from outrider.models.toy import toy, toy_config
from outrider.profile import ROWS, CostFile, target_costs


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    return tmp_path


def test_costs_never_fall_with_rows_and_leave_no_trace() -> None:
    engine = build_engine(toy(), Config(drafter="off"))
    costs = target_costs(engine.target.model, engine.cache, engine.target.plane, sweeps=2)
    assert list(costs) == [n for n in ROWS if n < engine.cache.length]
    assert list(costs.values()) == sorted(costs.values())
    assert not engine.cache.rows
    engine.cache.check()


def test_costs_are_measured_once_and_kept() -> None:
    calls = []

    def measure() -> dict[int, float]:
        calls.append(1)
        return {1: 0.01, 8: 0.02}

    first = CostFile("some/model", "torch.int8")
    assert first.get(measure) == first.get(measure) == CostFile("some/model", "torch.int8").get(measure)
    assert len(calls) == 1
    CostFile("other", "torch.int8").get(measure)
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["", "[1]", '{"a": 1}', '{"1": null}', "{"])
def test_a_damaged_note_is_measured_again(damage: str) -> None:
    costs = CostFile("model")
    assert costs.path is not None
    costs.path.parent.mkdir(parents=True)
    costs.path.write_text(damage)
    assert costs.get(lambda: {1: 0.5}) == {1: 0.5}
    assert CostFile("model").get(lambda: {1: 9.0}) == {1: 0.5}


def test_a_folder_that_cannot_be_written_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", "/proc/nowhere")
    assert CostFile("model").get(lambda: {1: 0.5}) == {1: 0.5}


@pytest.mark.parametrize("dtype", ["float32", load.INT8])
def test_a_layer_is_timed_in_every_dtype(dtype: str) -> None:
    assert 0 < load._layer_seconds(toy_config(), dtype) < 10
