"""A head's chains end where the next token would not pay, and an early stop changes no token."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.config import Config
from outrider.control.adaptive import Adaptive
from outrider.control.costs import PassCosts
from outrider.drafters import DraftRequest
from outrider.drafters.head.drafter import INITIAL_FLOOR, Pace
from outrider.drafters.head.network import Head
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.testing import SCENARIOS, decode
from outrider.types import SamplingParams, Sequence, Tree, chain

from support.toys import reference, toy

TARGET = toy()
COSTS = {1: 0.005, 2: 0.0051, 8: 0.007, 32: 0.02}


def head(kind: str = "eagle3") -> Head:
    return Head(*random_head(TARGET.config, kind), TARGET.embedding, TARGET.compute)


def drafts(temperature: float = 0.0, rule: str = "match", **options: Any) -> list[Tree]:
    """What a head drafts at every step of one text."""
    config = Config(drafter="head", k=6, rule=rule, options={"head": head()} | options)
    engine, heard = build_engine(TARGET, config), []
    engine.listeners = (SimpleNamespace(observe=lambda step: heard.extend(step.draft.trees)),)
    engine.add(Sequence(1, [5, 6, 7, 8], SamplingParams(temperature=temperature, max_tokens=25), seed=3, rule=rule))
    while engine.busy:
        engine.step()
    return [tree for tree in heard if tree.tokens]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("floor", [0.02, 0.1, 0.3])
def test_an_early_stop_is_the_beginning_of_the_full_chain(floor: float, temperature: float) -> None:
    full, short = drafts(temperature), drafts(temperature, stop_below=floor)
    assert len(full) == len(short)  # its guesses are random: every step gives one token
    for whole, part in zip(full, short, strict=True):
        n = len(part.tokens)
        assert part.tokens == whole.tokens[:n]
        assert part.survival == pytest.approx(whole.survival[:n])  # type: ignore[index]
        assert all(s >= floor for s in (part.survival or [])[:-1])
        assert n == len(whole.tokens) or part.survival[-1] < floor  # type: ignore[index]
    assert sum(len(tree.tokens) for tree in short) < sum(len(tree.tokens) for tree in full)


def test_where_tokens_are_drawn_no_chain_is_cut_for_what_was_drawn() -> None:
    assert {len(tree.tokens) for tree in drafts(0.7, "reject", stop_below=0.9)[:15]} == {6}


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_the_text_stays_with_adaptive_k(kind: str) -> None:
    for drafter in ("head", "auto"):
        engine = build_engine(TARGET, Config(drafter=drafter, k="auto", options={"head": head(kind)}))
        params = SamplingParams(max_tokens=40)
        assert decode(engine, SCENARIOS[1], params) == reference(TARGET, SCENARIOS[1], params)
        assert not engine.failures


def priced(speed: float = 200.0, row: float = 0.05) -> Any:
    return SimpleNamespace(speed=speed, limit=math.inf, price=lambda more: row * more)


def timed_pace() -> Pace:
    """A token takes half a millisecond, and .8 of those after the first are right."""
    pace, turns = Pace(), [SimpleNamespace(feed=1)]
    for _ in range(100):
        pace.observe(SimpleNamespace(clock={"draft": 0.002}, turns=turns), passes=4)  # type: ignore[arg-type]
        pace.drafted(chain([1, 2, 3], survival=[0.5, 0.4, 0.32]))
    return pace


def test_the_floor_is_what_one_more_token_costs() -> None:
    assert Pace().floors(None, 4) == [0.0]  # K is fixed: nobody counts
    assert Pace().floors(priced(), 4) == [INITIAL_FLOOR]  # nothing is known yet
    pace = timed_pace()
    assert pace.seconds == pytest.approx(0.0005)
    assert pace.confidence == pytest.approx(0.8, abs=0.01)
    assert pace.floors(priced(), 4) == pytest.approx([(200 * 0.0005 + 0.05) / 0.8] * 4, rel=0.02)
    assert pace.floors(priced(speed=10**6), 2) == [1.0, 1.0]
    pace.observe(SimpleNamespace(clock={"draft": 1.0}, turns=[SimpleNamespace(feed=9)]), 1)  # type: ignore[arg-type]
    assert pace.seconds == pytest.approx(0.0005)  # a prompt was read: that is no price
    assert Pace(0.25).floors(priced(), 4) == [0.25]


def test_each_length_has_the_price_of_its_own_next_rows() -> None:
    """Three rows beside the root are nearly free, then each costs as much as the head's token, or three times that."""
    prices = priced()
    prices.price = [0.0, 0.01, 0.02, 0.03, 0.13, 0.23, 0.53, 0.83, 1.13].__getitem__
    floors = timed_pace().floors(prices, 6)
    assert floors == pytest.approx([(0.1 + row) / 0.8 for row in (0.01, 0.055, 0.1, 0.2, 0.3, 0.3)], rel=0.02)
    prices.price = lambda rows: 0.05 * (rows // 3)  # three sequences: each more of all takes the next stair
    assert timed_pace().floors(prices, 2, 3) == pytest.approx([(0.1 + 0.05 / 3) / 0.8] * 2, rel=0.02)


def test_the_request_carries_the_prices_of_whichever_controller_is_at_work() -> None:
    engine = build_engine(TARGET, Config(drafter="head", k=3, options={"head": head()}))
    requests: list[DraftRequest] = []
    draft = engine.drafter.draft
    engine.drafter.draft = lambda request: requests.append(request) or draft(request)  # type: ignore[method-assign]
    for controller in (engine.controller, Adaptive(PassCosts(COSTS))):
        engine.controller = controller
        engine.add(Sequence(len(requests), [5, 6, 7, 8], SamplingParams(max_tokens=4)))
        while engine.busy:
            engine.step()
    assert requests[0].prices is None
    assert requests[-1].prices is not None
    assert requests[-1].prices.speed > 0


def test_heads_on_other_devices_and_trees_are_not_paced() -> None:
    engine = build_engine(TARGET, Config(drafter="head", options={"head": head(), "tree": True}))
    assert not engine.drafter.traits.self_limiting
    assert build_engine(TARGET, Config(drafter="head", options={"head": head()})).drafter.traits.self_limiting
    cascade = build_engine(TARGET, Config(drafter="cascade", options={"cascade": "suffix,head", "head": head()}))
    assert cascade.drafter.traits.self_limiting
    assert not cascade.drafter.traits.weighs_cost
    assert build_engine(TARGET, Config(drafter="auto", options={"head": head()})).drafter.traits.weighs_cost
    assert not build_engine(TARGET, Config(drafter="auto")).drafter.traits.weighs_cost
