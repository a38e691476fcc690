"""`ahead` where drafting ahead does not pay: as fast as its drafter is just in time, or as plain decoding.

The real engine, the real drafters and the real controller on the invented device of `test_head_pays`. Whoever drafts
beside the target is a clock, with what the H200's second stream took: 2.9 ms until forks are known and 4.7 ms for every
depth beside the 7B, 0.73 ms for one alone, and a while for every recording at first.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from outrider import SamplingParams
from outrider.backends.toy import toy
from outrider.config import Config
from outrider.control.adaptive import Adaptive, Costs
from outrider.drafters.ahead import setup as _ahead
from outrider.drafters.ahead.account import Account
from outrider.drafters.ahead.drafter import Ahead
from outrider.drafters.ahead.shared_queue import Mail, Sizes
from outrider.drafters.ahead.worth import Worth
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.testing import Scenario, decode, reference
from outrider.types import Sequence

from support.invented_head import MANY, RECORDING, Requests, Told, fake_head
from support.invented_time import fake_model
from support.kernels import GPU
from support.places import Foreseen

pytestmark = pytest.mark.skipif(GPU, reason="an invented device is enough")
Head = pytest.importorskip("outrider.drafters.head.network").Head
TARGET = toy()
CLAIM = 0.9  # how sure it says that it is of a token


@dataclass(frozen=True)
class Times:
    """Seconds of whoever drafts beside the target."""

    first: float = 2.9e-3
    deeper: float = 4.7e-3
    alone: float = 0.73e-3
    wake: float = 0.2e-3
    recordings: tuple[int, ...] = (3, 17, 18)  # requests that something new is recorded for


class Beside(Foreseen):
    """A worker in invented time."""

    kind = "stream"

    def __init__(self, run: Any, sizes: Sizes, times: Times) -> None:
        super().__init__(Mail(sizes, mmap.mmap(-1, sizes.bytes)), clock=lambda: run.world.now)
        self.run, self.times, self.world = run, times, run.world

    def post(self) -> int:
        mail, times = self.mail, self.times
        self.number += 1
        line = next(i for i, asked in enumerate(mail["asked"]) if asked >= 0)
        name, root, depth = int(mail["owner"][line]), int(mail["length"][line]), mail.one("depth")
        trunk, said = mail["trunk"][line, : mail["asked"][line]].tolist(), self.run.texts[name]
        accepted = next((i for i, token in enumerate(trunk) if token != said[root + i]), len(trunk))
        mail["keys"][0] = line, accepted, said[root + accepted]
        after = range(root + accepted + 1, root + accepted + 1 + depth)
        mail["chains"][0, :depth] = [said[at] if self.run.is_right(name, at) else 0 for at in after]
        mail["odds"][0], mail["survival"][0, :depth] = CLAIM, [CLAIM ** (i + 1) for i in range(depth)]
        mail["count"][0] = 1
        begin = self.run.world.now + times.wake
        if self.number in times.recordings:
            begin += RECORDING
            mail["recorded"][0] += 1
        first, deeper = (times.alone, times.alone) if mail.one("now") else (times.first, times.deeper)
        self.due = lambda deep: begin + first + deep * deeper
        mail["seconds"][:] = first + depth * deeper, first, deeper
        mail["answered"][0], mail["published"][0] = self.number, depth
        return self.number


class Answers(Requests):
    """Requests with a draft model, or with the head."""

    times: ClassVar[Times] = Times()

    def _engine(self, drafter: str, batch: int) -> Any:
        engine = super()._engine(drafter, batch)
        engine.drafter.clock = lambda: self.world.now  # type: ignore[attr-defined]
        return engine


def told(drafter: str, right: float, k: int | str = "auto", head: bool = False, times: Times | None = None) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        own = {} if head else {"draft_model": fake_model(small=True)}
        patch.setattr(Answers, "options", own | {"ahead_fallback": ""})
        patch.setattr(_ahead, "load_head", lambda space: fake_head())
        patch.setattr(_ahead, "Thread", lambda sizes, make, device: Beside(run[0], sizes, times or Times()))
        run: list[Any] = [Answers.__new__(Answers)]
        run[0].__init__(patch, drafter, [right] * MANY, k)
        found = [run[0].answer(seq) for seq in run[0].seqs]
        assert not run[0].engine.failures
        made = run[0].engine.drafter
        assert not isinstance(made, Ahead) or not made.place.bypassed
    return Told([seconds - RECORDING * recorded for seconds, recorded in found], sum(n for _, n in found))


@pytest.mark.parametrize("head", [False, True], ids=["model", "head"])
@pytest.mark.parametrize("right", [0.95, 0.7])
def test_where_it_does_not_pay_it_drafts_just_in_time(right: float, head: bool) -> None:
    """On the H200 it made 229 tokens/s where the same drafter just in time made 505, and plain decoding 204."""
    ordinary, plain = told("head" if head else "model", right, head=head), told("off", right)
    ahead = told("ahead", right, head=head)
    assert ordinary.speed() > 1.4 * plain.speed()
    assert ahead.speed() > 0.75 * ordinary.speed()  # trials are dear: 26 ms a step
    assert ahead.speed(slice(MANY // 2, None)) > 0.93 * ordinary.speed(slice(MANY // 2, None))


@pytest.mark.parametrize("head", [False, True], ids=["model", "head"])
def test_where_nothing_pays_it_is_plain_decoding(head: bool) -> None:
    plain, ahead = told("off", 0.05), told("ahead", 0.05, head=head)
    assert ahead.speed(slice(MANY // 2, None)) > 0.96 * plain.speed(slice(MANY // 2, None))


def test_where_it_pays_it_drafts_ahead() -> None:
    """A device of its own: everything is hidden."""
    times = Times(first=0.8e-3, deeper=0.6e-3, wake=0.05e-3, recordings=())
    ordinary, ahead = told("model", 0.95), told("ahead", 0.95, times=times)
    assert ahead.speed(slice(MANY // 2, None)) > 1.1 * ordinary.speed(slice(MANY // 2, None))


# ---------------------------------------------------------------- the text does not depend on the way


def alternating(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], **config: Any) -> Any:
    """An engine whose drafter changes its way every few steps."""
    steps = itertools.count()

    def took(worth: Worth, *_: Any) -> None:
        worth.ahead = next(steps) % 8 < 5

    monkeypatch.setattr(Worth, "took", took)
    engine = build_engine(TARGET, Config(drafter="ahead", options=options | {"ahead_fallback": ""}, **config))
    assert engine.drafter.place.ready_within(30)
    return engine


DRAFTERS: dict[str, Callable[[], dict[str, Any]]] = {
    "model": lambda: {"draft_model": toy(blur=0.08)},
    "head": lambda: {"head": Head(*random_head(TARGET.config), TARGET.embedding, TARGET.compute)},
}


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_text_is_the_targets_while_ways_change(
    monkeypatch: pytest.MonkeyPatch, drafter: str, temperature: float, batch: int
) -> None:
    engine = alternating(monkeypatch, DRAFTERS[drafter](), k=4)
    params, scenario = SamplingParams(temperature=temperature, max_tokens=40), Scenario("x", batch=batch)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    assert not engine.failures
    account = engine.drafter.account
    assert account.jits > 3
    assert sum(account.hits.values()) + sum(account.misses.values()) > 3


@pytest.mark.parametrize("rule", ["reject", "block"])
def test_drawn_text_does_not_depend_on_the_way(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """What is drawn just in time is what would have been prepared: only one of two drafters may draw."""
    params, scenario, said = SamplingParams(temperature=0.8, max_tokens=30), Scenario("x", batch=2), []
    for _ in range(2):
        engine = alternating(monkeypatch, DRAFTERS["model"](), k=4)
        said.append(decode(engine, scenario, params, rule))
    monkeypatch.undo()
    always = {"ahead_always": True, "ahead_fallback": "", **DRAFTERS["model"]()}
    engine = build_engine(TARGET, Config(drafter="ahead", k=4, options=always))
    assert engine.drafter.place.ready_within(30)
    said.append(decode(engine, scenario, params, rule))
    assert said[0] == said[1] == said[2]


# ---------------------------------------------------------------- whether it pays


def test_a_trial_that_clearly_loses_is_short_and_the_next_one_is_far() -> None:
    worth, ways = Worth(first=False), list[bool]()
    for _ in range(3000):
        ways.append(worth.ahead)
        worth.took(1, worth.ahead, 2, 0.030 if worth.ahead else 0.010)
    trials = [sum(group) for way, group in itertools.groupby(ways) if way]
    assert not worth.ahead
    assert 2 <= len(trials) <= 6
    assert max(trials) <= 2 + Worth.ENOUGH
    assert "just in time is kept" in worth.why


def test_ahead_is_not_kept_where_nothing_is_prepared() -> None:
    """Else plain decoding would count as its success."""
    worth, ahead = Worth(first=False), 0
    for _ in range(1000):
        ahead += worth.ahead
        worth.took(1, worth.ahead, 2, 0.009 if worth.ahead else 0.010, prepared=False)
    assert not worth.ahead
    assert ahead < 100
    assert "nothing is asked for" in worth.why


def test_a_draft_just_in_time_is_as_long_as_pays() -> None:
    account = Account()
    assert account.now_depth(0.035, 15) == 15  # nothing is known yet
    account.just_in_time(0.048, 8)
    account.accepted, account.reached = 90.0, 100.0
    assert account.now_depth(0.035, 15) == 6  # seven tokens more: 5.7 of eight are expected in 77 ms
    account.accepted = 30.0
    assert account.now_depth(0.035, 15) == 0
    assert account.jit == 0.048


def test_what_was_prepared_is_not_taken_for_the_price_of_drafting_just_in_time() -> None:
    """It costs nothing: the controller would ask for as much as there is room, and wait for all of it."""
    options = {"draft_model": toy(blur=0.08), "ahead_fallback": "", "ahead_depth": 3}
    engine = build_engine(TARGET, Config(drafter="ahead", k=4, options=options))
    drafter = engine.drafter
    assert isinstance(drafter, Ahead)
    assert drafter.place.ready_within(30)
    drafter.worth.ahead, drafter.worth.left = True, 10**6
    engine.add(seq := Sequence(1, [1, 2, 3, 4, 5], SamplingParams(max_tokens=40)))
    for _ in range(4):
        engine.step()
    assert drafter.flight
    drafter.worth.ahead = False
    assert {tree.source for tree in engine.step().draft.trees} == {"model"}
    engine.cancel(seq)
    drafter.place.close()


def test_each_way_of_drafting_has_its_own_price() -> None:
    way = ["just in time"]
    controller = Adaptive(Costs({1: 0.004, 16: 0.0042}), way=lambda: way[0])
    controller.budget([])
    controller.draft_node = 0.0007
    way[0] = "ahead"
    controller.budget([])
    assert controller.draft_node is None
    controller.draft_node, asking = 0.05, controller.asking
    way[0] = "just in time"
    controller.budget([])
    assert controller.draft_node == 0.0007
    assert controller.asking is not asking
