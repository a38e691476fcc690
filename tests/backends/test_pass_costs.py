"""Costs of passes: measured once and stored; a file that cannot be read or written does no harm."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from outrider.backends import load
from outrider.backends.cpu.eager import Eager
from outrider.backends.pass_costs import EACH, ROWS, CostFile, by_rows, target_costs
from outrider.backends.toy import toy, toy_config
from outrider.config import Config
from outrider.engine.cache import Cache
from outrider.llm import build_engine
from outrider.types import Sequence

from support.native_builds import COMPILER, Use
from support.random_blocks import RandomBlocks, block_config


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    return tmp_path


def test_costs_never_fall_with_rows_and_leave_no_trace() -> None:
    engine = build_engine(toy(), Config(drafter="off"))
    costs = target_costs(engine.target, engine.cache, sweeps=2)
    assert list(costs) == [(1, n) for n in ROWS if n < engine.cache.length]
    assert list(costs.values()) == sorted(costs.values())
    assert not engine.cache.rows
    engine.cache.check()
    assert list(by_rows(costs)) == list(ROWS)


def test_costs_of_several_sequences_leave_no_trace_either() -> None:
    engine = build_engine(toy(), Config(drafter="off", max_batch=64))
    held = Sequence(5, [1, 1, 1, 2])
    engine.cache.open(held)
    assert engine.cache.reserve(held, 4, 2)
    costs = target_costs(engine.target, engine.cache, (1, 2, 64), sweeps=2)
    assert [rows for many, rows in costs if many == 2] == [2 * each for each in EACH]
    assert [rows for many, rows in costs if many == 64] == [64, 128]  # beyond, lines are straight
    for many in (1, 2, 64):
        line = [seconds for (s, _), seconds in costs.items() if s == many]
        assert line == sorted(line)
    assert set(engine.cache.rows) == {5}
    assert not engine.target.plane._held
    engine.cache.check()


def test_what_does_not_fit_into_the_cache_is_not_measured() -> None:
    model = toy()
    cache = Cache(slots=20, lines=4, length=10)
    runner = Eager(model, cache.add_plane(*model.plane_shape))
    costs = target_costs(runner, cache, (1, 2, 4, 8), sweeps=2)
    assert {many for many, _ in costs} == {1, 2, 4}  # four lines
    assert all(rows <= 20 and rows // many <= 8 for many, rows in costs)
    cache.check()
    busy = Sequence(1, [3] * 10)
    cache.open(busy)
    cache.reserve(busy, 10, 0)
    assert {many for many, _ in target_costs(runner, cache, (1, 2, 4), sweeps=2)} == {1, 2}
    assert set(cache.rows) == {1}


def test_a_pass_that_fails_leaves_no_trace() -> None:
    class Failing:
        def launch(self, rows: object, taps: object, overlapped: bool) -> None:
            raise RuntimeError

    model = toy()
    cache = Cache(slots=64, lines=4, length=32)
    runner = Failing()
    runner.plane = cache.add_plane(*model.plane_shape)
    with pytest.raises(RuntimeError):
        target_costs(runner, cache, (1, 2))
    assert not cache.rows
    cache.check()


@pytest.mark.parametrize(("batch", "sequences"), [(64, (1, 2, 4, 8, 16, 32, 64)), (24, (1, 2, 4, 8, 16)), (1, (1,))])
def test_every_batch_size_in_powers_of_two_is_measured(batch: int, sequences: tuple[int, ...]) -> None:
    class Costs(CostFile):
        def get(self, measure: object, sequences: Iterable[int] = (1,)) -> dict[int, float]:
            self.sequences = sequences
            return {1: 0.1}

    costs = Costs()
    build_engine(toy(), Config(drafter="ngram", max_batch=batch), costs=costs)
    assert costs.sequences == sequences


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


def test_costs_of_several_sequences_are_kept_and_measured_when_they_are_missing() -> None:
    both = {(1, 1): 0.1, (4, 4): 0.2, (4, 8): 0.3}
    CostFile("model").get(lambda: {1: 0.5, 2: 0.6})  # as older files are: rows alone
    assert CostFile("model").get(lambda: both) == {1: 0.5, 2: 0.6}
    assert CostFile("model").get(lambda: both, (1, 4)) == both
    assert CostFile("model").get(dict, (1, 4)) == both
    assert by_rows(both) == {1: 0.1}
    assert by_rows({1: 0.5, 2: 0.6}) == {1: 0.5, 2: 0.6}


def test_engines_of_a_target_share_what_steps_have_refined() -> None:
    costs = CostFile("model")
    first = build_engine(toy(), Config(drafter="ngram"), costs=costs).controller.costs  # type: ignore[attr-defined]
    first.refine(1, 10.0)
    assert build_engine(toy(), Config(drafter="ngram"), costs=costs).controller.costs is first  # type: ignore[attr-defined]
    other = build_engine(toy(), Config(drafter="ngram"), costs=CostFile("model"))  # another process
    assert other.controller.costs(1) < first(1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("damage", ['{"1,": 2}', '{"1,2,3": 2}', "", "[1]", '{"a": 1}', '{"1": null}', "{"])
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
    assert 0 < load._layer_seconds(toy_config(), None, dtype) < 10


def test_a_files_own_precision_is_kept_unless_another_is_clearly_faster() -> None:
    assert load._fastest({"int8": 0.9, "gguf": 1.0}, load.GGUF) == "gguf"  # noise must not choose other weights
    assert load._fastest({"int8": 0.5, "gguf": 1.0}, load.GGUF) == "int8"
    assert load._fastest({"float32": 1.0, "bfloat16": 0.9}, "") == "bfloat16"


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_a_layer_of_blocks_is_timed_and_the_choice_is_reported(use_backend: Use) -> None:
    use_backend("tuned")
    config = block_config(256)
    assert 0 < load._layer_seconds(config, RandomBlocks(config, "Q4_K"), load.GGUF) < 10
    sentence = load._chosen("gguf", {"float32": 0.09, "int8": 0.0155, "gguf": 0.0088})
    assert sentence == (
        "dtype auto is gguf here: passes of 1, 4, 8 rows through some of it take 8.8 ms, 90.0 in float32, 15.5 in int8."
    )
