"""A trained head that drafts ahead: it goes on from its own guesses, is corrected by what the target saw, and cannot
change a word, whatever becomes of the thread it runs in."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import LLM, SamplingParams, drafters
from outrider.backends.rows import rows_of
from outrider.backends.toy import toy
from outrider.config import Config
from outrider.drafters.ahead import worker_host as place_module
from outrider.drafters.ahead.forks import Plan
from outrider.drafters.ahead.setup import shares_gpu
from outrider.drafters.ahead.shared_queue import Sizes
from outrider.drafters.ahead.worker_host import Thread
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.engine.step import Engine
from outrider.errors import ConfigError
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.testing import Scenario, check_drafter, decode, reference
from outrider.types import Sequence, Step

head_forks = pytest.importorskip("outrider.drafters.ahead.head_forks")
Head, HeadForker, ObservedFeatures = head_forks.Head, head_forks.HeadForker, head_forks.ObservedFeatures
TARGET = toy()
ALWAYS = {"ahead_always": True, "ahead_depth": 4, "ahead_fallback": ""}
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 9, 3, 4]


def head(kind: str = "eagle3") -> Head:
    return Head(*random_head(TARGET.config, kind), TARGET.embedding, TARGET.compute)


def engine_with(listeners: tuple[Any, ...] = (), **options: Any) -> Engine:
    config = Config(drafter="ahead", k=5, options={"head": head(), **ALWAYS} | options)
    engine = build_engine(TARGET, config, listeners=listeners)
    assert engine.drafter.place.ready_within(30)
    return engine


# ---------------------------------------------------------------- forks


def shown(text: list[int], taps: tuple[int, ...], name: int = 7) -> ObservedFeatures:
    """What the target saw at every token of a text."""
    cache, seq = Cache(256, 2, 256), Sequence(1, text)
    plane = cache.add_plane(*TARGET.plane_shape)
    cache.open(seq)
    cache.reserve(seq, len(text), 0)
    packed = BatchBuilder(cache)
    packed.pending(seq, 0, len(text), want=True)
    hidden = TARGET.forward(rows_of(packed), plane, taps=taps).hidden
    return ObservedFeatures(taps, {name: [(0, torch.cat([hidden[tap] for tap in taps], 1))]})


def forker_of(features: ObservedFeatures) -> HeadForker:
    return HeadForker(head(), 400, 4, 200, features)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_fork_goes_on_as_the_head_would(temperature: float) -> None:
    """What is prepared for an outcome is what the head says after the same tokens, were they all in the draft."""
    seq = Sequence(1, TEXT, SamplingParams(temperature=temperature, max_tokens=60), seed=9)
    forker = forker_of(shown(TEXT, head().config.taps))
    forker.open(seq, owner=7)
    plan = Plan(seq, [7, 8], [2, 2, 2])
    assert list(forker.grow([plan], 3)) == [0, 1, 2, 3]
    assert len(plan.branches) == 6
    for branch in plan.branches:
        assert branch.token not in plan.trunk[branch.accepted : branch.accepted + 1]
        said = [*plan.trunk[: branch.accepted], branch.token]
        for token in branch.chain:
            other = Plan(seq, said, [0] * len(said) + [1])
            list(forker.grow([other], 0))
            assert [b.token for b in other.branches] == [token]
            said.append(token)
    forker.cache.check()


def test_guesses_give_way_to_what_the_target_saw() -> None:
    """After the verdict, the head stands where one stands that has never guessed."""
    taps = head().config.taps
    longer = [*TEXT, 7, 8, 5]
    features, seq = shown(longer, taps), Sequence(1, TEXT, SamplingParams(max_tokens=60))
    forker = forker_of(features)
    forker.open(seq, owner=7)
    list(forker.grow([Plan(seq, [7, 8, 9], [2, 2, 2, 2])], 3))
    forker.extend(seq, longer[len(TEXT) :])
    fresh, other = forker_of(shown(longer, taps)), Sequence(1, longer, SamplingParams(max_tokens=60))
    fresh.open(other, owner=7)
    said = []
    for one, text in ((forker, seq), (fresh, other)):
        plan = Plan(text, [4], [3, 3])
        list(one.grow([plan], 2))
        said.append([(b.accepted, b.token, b.chain) for b in plan.branches])
    assert said[0] == said[1]
    for a, b in zip(forker.plane.k, fresh.plane.k, strict=True):
        rows = [one.cache.rows[1].slots[: len(longer) - 1] for one in (forker, fresh)]
        assert torch.allclose(a[rows[0]], b[rows[1]], atol=1e-12)
    forker.cache.check()


def test_nothing_is_prepared_for_what_the_target_has_not_seen() -> None:
    seq, forker = Sequence(1, TEXT), forker_of(ObservedFeatures(head().config.taps))
    forker.open(seq, owner=7)
    plans = [Plan(seq, [7], [1, 1])]
    assert list(forker.grow(plans, 2)) == [0]
    assert not plans


class Drafts:
    def __init__(self) -> None:
        self.by_text: dict[tuple[int, ...], list[int]] = {}

    def observe(self, step: Step) -> None:
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None and tree.tokens:
                text = turn.seq.tokens[: len(turn.seq.tokens) - len(verdict.tokens)]
                self.by_text[tuple(text)] = tree.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_just_in_time_it_drafts_as_the_drafter_head_does(temperature: float) -> None:
    params, ears = SamplingParams(temperature=temperature, max_tokens=30), (Drafts(), Drafts())
    now = engine_with((ears[0],))
    now.drafter.worth.ahead = False
    ordinary = build_engine(TARGET, Config(drafter="head", k=5, options={"head": head()}), listeners=(ears[1],))
    for engine in (now, ordinary):
        decode(engine, Scenario("x", batch=2), params)
    both = ears[0].by_text.keys() & ears[1].by_text.keys()
    assert len(both) > 8
    assert all(ears[0].by_text[text] == ears[1].by_text[text] for text in both)


# ---------------------------------------------------------------- the text


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_thread_that_is_disturbed_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, batch: int, temperature: float
) -> None:
    """It dies, pauses (longer than anybody waits) and is slow at random moments: the same text, no stream lost."""
    monkeypatch.setattr(place_module, "BACKOFF", 0.0)
    monkeypatch.setattr("outrider.drafters.ahead.drafter.SOONEST", 0.02)
    monkeypatch.setattr("outrider.drafters.ahead.drafter.LATEST", 0.05)
    dice, done, run = random.Random(batch), {"dies": 0, "pauses": 0, "slow": 0}, HeadForker._run

    def disturbed(self: HeadForker, nodes: Any) -> Tensor:
        chance = dice.random()
        what = "dies" if chance < 0.05 else "pauses" if chance < 0.08 else "slow" if chance < 0.15 else ""
        if what:
            done[what] += 1
        if what == "dies":
            raise RuntimeError("out of luck")
        time.sleep({"pauses": 0.1, "slow": 0.005}.get(what, 0.0))
        return run(self, nodes)

    monkeypatch.setattr(HeadForker, "_run", disturbed)
    params, scenario = SamplingParams(temperature=temperature, max_tokens=24), Scenario("x", batch=batch)
    engine = engine_with()
    for _ in range(3 if batch == 1 else 1):
        assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
        engine.drafter.place.ready_within(5)
    place = engine.drafter.place
    assert min(done.values()) > 0 or sum(done.values()) > 5, done
    assert place.starts > 1
    assert not engine.failures
    place.close()


def test_outcomes_are_hit_and_told() -> None:
    engine = engine_with(ahead_forks=40)
    params, scenario = SamplingParams(max_tokens=24), Scenario("x", batch=1)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    facts = engine.drafter.notes()["ahead"]
    assert facts["hit_rate"] > 0.1  # a head that knows nothing, and 40 of 48 words prepared for
    assert facts["deaths"] == 0
    assert facts["place"] == "thread"
    assert engine.drafter.traits.memory().kv > 0
    assert not engine.drafter.post.features.pieces  # finished sequences leave nothing behind


@pytest.mark.slow
def test_conformance_kit_with_a_head() -> None:
    assert check_drafter("ahead", {"head": head(), **ALWAYS}, tokens=24) > 0


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("fallback", sorted({*drafters.names()} - {"ahead", "auto", "cascade", "off", "head"}))
def test_text_is_the_targets_with_every_fallback(fallback: str, temperature: float, batch: int) -> None:
    params, scenario = SamplingParams(temperature=temperature, max_tokens=40), Scenario("x", batch=batch)
    options = drafters.lookup(fallback).traits.trial(TARGET)
    options.pop("draft_model", None)  # else that would draft ahead
    if fallback == "model":
        pytest.skip("a draft model drafts ahead itself: test_ahead")
    engine = engine_with(**options, ahead_fallback=fallback)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    assert not engine.failures


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["reject", "block"])
def test_other_rules_draft_just_in_time(rule: str) -> None:
    """A head knows more then, and the same seed must give the same text whatever was ready."""
    said = []
    for _ in range(2):
        engine = engine_with()
        said.append(decode(engine, Scenario("x", batch=2), SamplingParams(temperature=0.8, max_tokens=30), rule))
        assert engine.drafter.notes()["ahead"]["hit_rate"] is None
        assert engine.drafter.account.jits > 0
    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_shipped_head_drafts_ahead(temperature: float) -> None:
    plain = LLM("smollm2", drafter="off", device="cpu", max_length=512)
    ahead = plain.using(drafter="ahead", k=3, **ALWAYS)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=64, ignore_eos=True)
    asked = ["Why is the sky blue?", "Write a Python function that adds two numbers."]
    assert [a.token_ids for a in ahead.generate(asked, params)] == [a.token_ids for a in plain.generate(asked, params)]
    facts = ahead.drafting["ahead"]
    assert facts["hit_rate"] > 0.15  # .28 here at T = 1
    assert facts["alpha"] > 0.15


# ---------------------------------------------------------------- options and places


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head": head("block")}, "cannot go on from its own guesses"),
        ({"ahead_place": "process"}, "target's own process"),
        ({"ahead_fallback": "head"}, "drafts ahead itself"),
        ({"head": "none"}, "needs a draft model or a trained head"),
    ],
)
def test_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        engine_with(**options)


def test_a_model_on_the_targets_gpu_gets_a_stream_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its thread starts, from loading on, is started in a stream that waits for the weights once."""
    gpu, heard = torch.device("cuda"), list[str]()
    assert shares_gpu(gpu, torch.device("cuda:0"))
    assert not shares_gpu(gpu, torch.device("cuda:1"))
    assert not shares_gpu(torch.device("cpu"), torch.device("cpu"))

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            heard.append(f"stream {priority}")

        def wait_stream(self, other: str) -> None:
            heard.append(f"waits for {other}")

    @contextmanager
    def within(what: Any) -> Iterator[None]:
        heard.append("in" if isinstance(what, Stream) else "there")
        yield
        heard.append("out")

    for name, double in (("Stream", Stream), ("stream", within), ("device", within)):
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the engine's")

    def make() -> HeadForker:
        heard.append("make")
        return forker_of(ObservedFeatures(()))

    sizes = Sizes(2, 16, 8)
    place = Thread(sizes, make, gpu)
    assert place.kind == "stream"
    assert place.ready_within(10)
    assert heard == ["stream 0", "waits for the engine's", "there", "in", "make"]
    place.close()
    place._thread.join(10)  # type: ignore[union-attr]
    assert heard[-2:] == ["out", "out"]
    heard.clear()
    other = Thread(sizes, make)
    assert other.kind == "thread"
    assert other.ready_within(10)
    assert heard == ["make"]
    other.close()
