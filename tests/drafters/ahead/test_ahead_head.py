"""A trained head that drafts ahead: it continues from its own outputs, is corrected by the target's hidden states, and
cannot change the text, whatever happens to its thread."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

pytest.importorskip("outrider.drafters.head")

import torch
from torch import Tensor

from outrider import LLM, SamplingParams, drafters
from outrider.backends.rows import rows_of
from outrider.config import Config
from outrider.drafters.ahead import worker as worker_module
from outrider.drafters.ahead.forks import ForkPlan
from outrider.drafters.ahead.head_forks import HeadForker
from outrider.drafters.head.features import ObservedFeatures, Piece
from outrider.drafters.head.network import Head
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.engine.step import Engine
from outrider.errors import ConfigError
from outrider.llm import build_engine
from outrider.models.speculators import random_head
from outrider.testing import Scenario, check_drafter, decode
from outrider.types import Sequence, Step

from support.ahead import alternating
from support.toys import reference, toy

TARGET = toy()
ALWAYS = {"ahead_always": True, "ahead_depth": 4, "ahead_fallback": ""}
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 9, 3, 4]


def head(kind: str = "eagle3") -> Head:
    return Head(*random_head(TARGET.config, kind), TARGET.embedding, TARGET.compute)


def engine_with(listeners: tuple[Any, ...] = (), **options: Any) -> Engine:
    config = Config(drafter="ahead", k=5, options={"head": head(), **ALWAYS} | options)
    engine = build_engine(TARGET, config, listeners=listeners)
    assert engine.drafter.host.wait_ready(30)
    return engine


# ---------------------------------------------------------------- forks


def features_of(text: list[int], taps: tuple[int, ...], target_id: int = 7) -> ObservedFeatures:
    """The target's hidden states at every token of a text."""
    cache, seq = Cache(256, 2, 256), Sequence(1, text)
    plane = cache.add_plane(*TARGET.plane_shape)
    cache.open(seq)
    cache.reserve(seq, len(text), 0)
    batch = BatchBuilder(cache)
    batch.pending(seq, 0, len(text), want=True)
    hidden = TARGET.forward(rows_of(batch), plane, taps=taps).hidden
    return ObservedFeatures(taps, {target_id: [Piece(0, len(text), 0, tuple(hidden[tap] for tap in taps))]})


def forker_of(features: ObservedFeatures) -> HeadForker:
    return HeadForker(head(), 400, 4, 200, features)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_fork_continues_as_the_head_would(temperature: float) -> None:
    """What is prepared for an outcome is what the head drafts after the same tokens, as if they were the trunk."""
    seq = Sequence(1, TEXT, SamplingParams(temperature=temperature, max_tokens=60), seed=9)
    forker = forker_of(features_of(TEXT, head().config.taps))
    forker.open(seq, target_id=7)
    plan = ForkPlan(seq, [7, 8], [2, 2, 2])
    assert list(forker.grow([plan], 3)) == [0, 1, 2, 3]
    assert len(plan.branches) == 6
    for branch in plan.branches:
        assert branch.token not in plan.trunk[branch.accepted : branch.accepted + 1]
        tokens = [*plan.trunk[: branch.accepted], branch.token]
        for token in branch.chain:
            other = ForkPlan(seq, tokens, [0] * len(tokens) + [1])
            list(forker.grow([other], 0))
            assert [b.token for b in other.branches] == [token]
            tokens.append(token)
    forker.cache.check()


def test_guesses_are_replaced_by_the_targets_hidden_states() -> None:
    """After the verdict, the head is in the state of one that has never guessed."""
    taps = head().config.taps
    longer = [*TEXT, 7, 8, 5]
    features, seq = features_of(longer, taps), Sequence(1, TEXT, SamplingParams(max_tokens=60))
    forker = forker_of(features)
    forker.open(seq, target_id=7)
    list(forker.grow([ForkPlan(seq, [7, 8, 9], [2, 2, 2, 2])], 3))
    forker.extend(seq, longer[len(TEXT) :])
    fresh, other = forker_of(features_of(longer, taps)), Sequence(1, longer, SamplingParams(max_tokens=60))
    fresh.open(other, target_id=7)
    prepared = []
    for one, text in ((forker, seq), (fresh, other)):
        plan = ForkPlan(text, [4], [3, 3])
        list(one.grow([plan], 2))
        prepared.append([(b.accepted, b.token, b.chain) for b in plan.branches])
    assert prepared[0] == prepared[1]
    for a, b in zip(forker.plane.k, fresh.plane.k, strict=True):
        rows = [one.cache.rows[1].slots[: len(longer) - 1] for one in (forker, fresh)]
        assert torch.allclose(a[rows[0]], b[rows[1]], atol=1e-12)
    forker.cache.check()


def test_nothing_is_prepared_without_hidden_states() -> None:
    seq, forker = Sequence(1, TEXT), forker_of(ObservedFeatures(head().config.taps))
    forker.open(seq, target_id=7)
    plans = [ForkPlan(seq, [7], [1, 1])]
    assert list(forker.grow(plans, 2)) == [0]
    assert not plans


class Drafts:
    reads_logits = reads_guesses = False

    def __init__(self) -> None:
        self.by_text: dict[tuple[int, ...], list[int]] = {}

    def observe(self, step: Step) -> None:
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None and tree.tokens:
                text = turn.seq.tokens[: len(turn.seq.tokens) - len(verdict.tokens)]
                self.by_text[tuple(text)] = tree.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_just_in_time_it_drafts_as_the_drafter_head_does(temperature: float) -> None:
    params, listeners = SamplingParams(temperature=temperature, max_tokens=30), (Drafts(), Drafts())
    now = engine_with((listeners[0],))
    now.drafter.profitability.ahead = False
    ordinary = build_engine(TARGET, Config(drafter="head", k=5, options={"head": head()}), listeners=(listeners[1],))
    for engine in (now, ordinary):
        decode(engine, Scenario("x", batch=2), params)
    both = listeners[0].by_text.keys() & listeners[1].by_text.keys()
    assert len(both) > 8
    assert all(listeners[0].by_text[text] == listeners[1].by_text[text] for text in both)


# ---------------------------------------------------------------- the text


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_disturbed_thread_changes_nothing(monkeypatch: pytest.MonkeyPatch, batch: int, temperature: float) -> None:
    """It dies, pauses (beyond every deadline) and is slow at random moments: the same text, no stream lost."""
    monkeypatch.setattr(worker_module, "BACKOFF", 0.0)
    monkeypatch.setattr("outrider.drafters.ahead.drafter.MIN_DEADLINE", 0.02)
    monkeypatch.setattr("outrider.drafters.ahead.drafter.MAX_DEADLINE", 0.05)
    dice, counts, run = random.Random(batch), {"dies": 0, "pauses": 0, "slow": 0}, HeadForker._run

    def disturbed(self: HeadForker, nodes: Any) -> Tensor:
        chance = dice.random()
        event = "dies" if chance < 0.05 else "pauses" if chance < 0.08 else "slow" if chance < 0.15 else ""
        if event:
            counts[event] += 1
        if event == "dies":
            raise RuntimeError("broken pass")
        time.sleep({"pauses": 0.1, "slow": 0.005}.get(event, 0.0))
        return run(self, nodes)

    monkeypatch.setattr(HeadForker, "_run", disturbed)
    params, scenario = SamplingParams(temperature=temperature, max_tokens=24), Scenario("x", batch=batch)
    engine = engine_with()
    for _ in range(3 if batch == 1 else 1):
        assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
        engine.drafter.host.wait_ready(5)
    host = engine.drafter.host
    assert min(counts.values()) > 0 or sum(counts.values()) > 5, counts
    assert host.starts > 1
    assert not engine.failures
    host.close()


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_the_targets_while_modes_alternate(
    monkeypatch: pytest.MonkeyPatch, temperature: float, batch: int
) -> None:
    engine = alternating(monkeypatch, TARGET, {"head": head(), "ahead_fallback": ""}, k=4)
    params, scenario = SamplingParams(temperature=temperature, max_tokens=40), Scenario("x", batch=batch)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    assert not engine.failures
    statistics = engine.drafter.statistics
    assert statistics.jits > 3
    assert sum(statistics.hits.values()) + sum(statistics.misses.values()) > 3


def test_outcomes_are_hit_and_reported() -> None:
    engine = engine_with(ahead_forks=40)
    params, scenario = SamplingParams(max_tokens=24), Scenario("x", batch=1)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    facts = engine.drafter.notes()["ahead"]
    assert facts["hit_rate"] > 0.1  # a random head, and 40 of 48 tokens prepared for
    assert facts["deaths"] == 0
    assert facts["place"] == "thread"
    assert engine.drafter.traits.memory().kv > 0
    assert not engine.drafter.source.features.pieces  # finished sequences leave nothing behind


@pytest.mark.slow
def test_conformance_kit_with_a_head() -> None:
    assert check_drafter("ahead", {"head": head(), **ALWAYS}, TARGET, tokens=24) > 0


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
    """A head has more hidden states then, and the same seed must give the same text whatever was ready."""
    texts = []
    for _ in range(2):
        engine = engine_with()
        texts.append(decode(engine, Scenario("x", batch=2), SamplingParams(temperature=0.8, max_tokens=30), rule))
        assert engine.drafter.notes()["ahead"]["hit_rate"] is None
        assert engine.drafter.statistics.jits > 0
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_shipped_head_drafts_ahead(temperature: float) -> None:
    plain = LLM("smollm2", drafter="off", device="cpu", max_length=512)
    ahead = plain.using(drafter="ahead", k=3, **ALWAYS)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=64, ignore_eos=True)
    prompts = ["Why is the sky blue?", "Write a Python function that adds two numbers."]
    texts = [[out.token_ids for out in llm.generate(prompts, params)] for llm in (ahead, plain)]
    assert texts[0] == texts[1]
    facts = ahead.drafting["ahead"]
    assert facts["hit_rate"] > 0.15  # .28 here at T = 1
    assert facts["alpha"] > 0.15


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": head("block")}, "cannot continue from its own guesses"),
        ({"ahead_place": "process"}, "target's own process"),
        ({"ahead_fallback": "head"}, "drafts ahead itself"),
        ({"head": "none"}, "needs a draft model or a trained head"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_with(**options)
