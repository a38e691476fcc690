"""Who runs when: nobody is lost, nobody starves, long prompts do not stall others."""

from __future__ import annotations

import pytest

from outrider.build import build_engine
from outrider.config import Config
from outrider.control import Acceptance, Adaptive, Costs, Fixed
from outrider.errors import ConfigError
from outrider.models.toy import toy
from outrider.types import SamplingParams, Sequence, Turn

TARGET = toy()


def engine_with(**config: object):  # noqa: ANN201 - an Engine
    return build_engine(TARGET, Config(drafter="ngram", k=3, **config))


def sequences(n: int, prompt: int = 10, tokens: int = 30) -> list[Sequence]:
    params = SamplingParams(max_tokens=tokens)
    return [Sequence(i, [(i + j) % 40 + 1 for j in range(prompt)], params) for i in range(n)]


def finish(engine, seqs: list[Sequence]) -> None:  # noqa: ANN001
    for seq in seqs:
        engine.add(seq)
    for _ in range(5000):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("somebody starves")


def test_preemption_happens_and_loses_nothing() -> None:
    seqs = sequences(4)
    engine = engine_with(cache_tokens=110, max_length=45)
    finish(engine, seqs)
    assert sum(seq.stats.preempted for seq in seqs) > 0
    assert all(len(seq.generated) == 30 for seq in seqs)
    assert not engine.cache.rows


def test_a_long_prompt_does_not_stall_a_running_text() -> None:
    engine = engine_with(max_rows=16)
    short, long = sequences(1)[0], Sequence(9, [3] * 200, SamplingParams(max_tokens=5))
    engine.add(short)
    engine.step()
    engine.add(long)
    said = len(short.generated)
    for _ in range(5):
        engine.step()
        assert len(short.generated) > said  # every step moves it on
        said = len(short.generated)
    assert long.generated == []


def test_more_requests_than_places_wait_their_turn() -> None:
    seqs = sequences(7, tokens=8)
    engine = engine_with(max_batch=2)
    finish(engine, seqs)
    assert all(seq.finish == "length" for seq in seqs)


def test_a_cancelled_sequence_frees_its_slots_at_once() -> None:
    engine = engine_with()
    (seq,) = sequences(1)
    engine.add(seq)
    engine.step()
    engine.cancel(seq)
    assert seq.finish == "cancelled"
    assert seq.id not in engine.cache.rows
    assert not engine.busy
    engine.cancel(seq)  # twice does no harm
    engine.cache.check()


def test_a_waiting_sequence_can_be_cancelled() -> None:
    engine = engine_with(max_batch=1)
    first, second = sequences(2)
    finish_later = [first, second]
    for seq in finish_later:
        engine.add(seq)
    engine.step()
    engine.cancel(second)
    finish(engine, [])
    assert len(first.generated) == 30
    assert second.generated == []


def test_max_length_beyond_the_context_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="context has 512"):
        engine_with(max_length=1000)


# ---------------------------------------------------------------- how much is drafted


def turn(room: int = 50, whole: bool = True) -> Turn:
    return Turn(Sequence(1, [1, 2], SamplingParams(max_tokens=room)), feed=1, whole=whole)


def test_fixed_leaves_room_for_the_bonus() -> None:
    assert Fixed(5).budget([turn()])[0].budget == 5
    assert Fixed(5).budget([turn(room=3)])[0].budget == 2
    assert Fixed(5).budget([turn(whole=False)])[0].budget == 0
    off = turn()
    off.seq.speculate = False
    assert Fixed(5).budget([off])[0].budget == 0


def accepting(controller: Adaptive, rate: float) -> Adaptive:
    for record in (controller.overall, controller.by_sequence.setdefault(1, Acceptance())):
        for i in range(400):
            for depth in range(16):
                record.add(depth, (i % 100) < rate * 100)
    return controller


def test_adaptive_drafts_much_where_passes_are_free_and_drafts_good() -> None:
    flat = Costs({1: 10.0, 2: 10.0, 16: 10.5, 24: 11.0})
    assert accepting(Adaptive(flat), 0.9).budget([turn()])[0].budget >= 12


def test_adaptive_stops_where_rows_cost_as_much_as_passes() -> None:
    steep = Costs({1: 10.0, 2: 20.0, 24: 240.0})
    controller = accepting(Adaptive(steep, name="suffix"), 0.5)
    budgets = [controller.budget([turn()])[0].budget for _ in range(3 * Adaptive.PROBE_EVERY)]
    assert budgets.count(0) > 0.9 * len(budgets)
    assert budgets.count(Adaptive.PROBE) == 3  # it looks again now and then
    assert "break-even here is 100%" in controller.why


def test_costs_lie_on_straight_lines_and_follow_what_happens() -> None:
    costs = Costs({1: 10.0, 4: 16.0})
    assert costs(2) == pytest.approx(12.0)
    assert costs(7) == pytest.approx(22.0)
    for _ in range(200):
        costs.refine(4, 20.0)
    assert costs(4) == pytest.approx(20.0, rel=0.01)
