"""Drafting ahead: which outcomes are prepared for, that they are found again, and that the text stays the target's.

test_lossless checks what holds for every registered drafter. Here are the parts and other fallbacks; workers that are
killed, stopped and slowed are in test_ahead_worker.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider import LLM, SamplingParams, drafters
from outrider.cli.app import app
from outrider.cli.show import ahead_line
from outrider.config import Config
from outrider.drafters.ahead.drafter import trunk, weak
from outrider.drafters.ahead.forks import Forker, ForkPlan
from outrider.drafters.ahead.shared_queue import (
    Channel,
    Outcome,
    OutcomeRequest,
    QueueSizes,
    SentRequest,
    SharedQueue,
)
from outrider.drafters.ahead.statistics import AheadStatistics, MissCurve, PowerLaw, fan_out, length_probabilities
from outrider.engine.step import Engine
from outrider.engine.trace import read
from outrider.errors import ConfigError
from outrider.llm import build_engine
from outrider.measure.bench import BenchPlan, EncodedPrompt
from outrider.measure.doctor import _ahead_facts
from outrider.testing import Scenario, check_drafter, decode
from outrider.types import Sequence, Tree, chain

from support import tiny
from support.toys import reference, toy

TARGET = toy()
ALWAYS = {"ahead_always": True, "ahead_depth": 4}


# ---------------------------------------------------------------- statistics


def test_forks_follow_the_geometric_rule() -> None:
    """For one power law and many forks, whole numbers agree with the closed form of the paper."""
    alpha, law, length, forks = 0.7, PowerLaw(0.9, 0.8), 5, 400
    assigned = fan_out(length_probabilities(alpha, length), forks, law, law)
    weights = [p ** (1 / (1 + law.r)) for p in length_probabilities(alpha, length)]
    expected = [forks * w / sum(weights) for w in weights]
    assert sum(assigned) == forks
    assert all(abs(a - b) < 2 for a, b in zip(assigned, expected, strict=True))


def test_forks_go_where_the_gain_is_largest() -> None:
    sure, unsure = PowerLaw(0.1, 1.0), PowerLaw(0.9, 0.3)
    assert fan_out(length_probabilities(0.95, 3), 4, unsure, sure)[-1] >= 1
    rejected_early = fan_out(length_probabilities(0.1, 3), 8, unsure, sure)
    assert rejected_early[0] == max(rejected_early)
    assert fan_out([1.0], 8, unsure, sure) == [8]  # an empty draft has one outcome


@pytest.mark.parametrize("law", [PowerLaw(0.8, 0.4), PowerLaw(0.3, 1.2)])
def test_the_curve_finds_the_power_law(law: PowerLaw) -> None:
    curve, dice = MissCurve(PowerLaw(0.5, 0.5)), random.Random(1)
    for _ in range(4000):
        u = dice.random()
        curve.add(next((f for f in range(1, 17) if u > law.miss(f)), None), 16)
    assert curve.law.r == pytest.approx(law.r, rel=0.25)
    assert curve.law.c == pytest.approx(law.c, rel=0.2)
    assert curve.hit_rates() == sorted(curve.hit_rates())


def test_hits_are_counted_by_outcome() -> None:
    statistics = AheadStatistics()
    statistics.add_outcome(2, 2, 1, 3)
    statistics.add_outcome(0, 2, None, 2)
    statistics.late += 1
    facts = statistics.as_json()
    assert facts["hits_by_outcome"] == {"0": [0, 1], "end": [1, 1]}
    assert facts["hit_rate"] == pytest.approx(1 / 3)


def test_preparations_are_as_deep_as_pays() -> None:
    statistics = AheadStatistics()
    assert statistics.best_depth(0.1, 8) is None
    statistics.add_round(0.05, 0.01, 0.02, 2)
    statistics.accepted, statistics.reached = 30.0, 100.0
    assert statistics.best_depth(0.1, 8) == 4  # all that the pass hides
    statistics.accepted = 98.0
    assert statistics.best_depth(0.1, 8) == 5  # one more is worth waiting for
    assert statistics.best_depth(0.1, 3) == 3


def test_a_draft_just_in_time_is_as_long_as_pays() -> None:
    statistics = AheadStatistics()
    assert statistics.best_just_in_time_depth(0.035, 15) == 15  # not measured yet
    statistics.add_just_in_time(0.048, 8)
    statistics.accepted, statistics.reached = 90.0, 100.0
    assert statistics.best_just_in_time_depth(0.035, 15) == 6  # seven tokens more: 5.7 of eight are expected in 77 ms
    statistics.accepted = 30.0
    assert statistics.best_just_in_time_depth(0.035, 15) == 0
    assert statistics.jit == 0.048


# ---------------------------------------------------------------- forks


def grown(
    seq: Sequence, drafted: list[int], forks: list[int], depth: int, blur: float = 0.0
) -> tuple[Forker, ForkPlan]:
    forker, plan = Forker(toy(blur=blur), 400, 4, 200), ForkPlan(seq, drafted, forks)
    forker.open(seq)
    assert list(forker.grow([plan], depth)) == list(range(depth + 1))
    return forker, plan


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_fork_continues_as_the_model_would(temperature: float) -> None:
    """With the target as its own draft model, what is prepared for an outcome is what the target emits after it."""
    params = SamplingParams(temperature=temperature, max_tokens=60)
    seq = Sequence(1, [1, 2, 3, 4, 5], params, seed=9)
    _, plan = grown(seq, [7, 8], [2, 2, 2], 3)
    for branch in plan.branches:
        assert branch.token not in plan.trunk[branch.accepted : branch.accepted + 1]
        text = [*seq.tokens, *plan.trunk[: branch.accepted], branch.token]
        after = Sequence(1, text, params, seed=9)
        engine = build_engine(TARGET, Config(drafter="off"))
        engine.add(after)
        for _ in range(3):
            engine.step()
        assert after.tokens[len(text) :] == branch.chain


def test_the_outcome_that_occurred_is_not_fed_again() -> None:
    seq = Sequence(1, [1, 2, 3, 4, 5], SamplingParams(max_tokens=60))
    forker, plan = grown(seq, [7, 8], [1, 1, 2], 2)
    branch = plan.branches[-1]
    forker.extend(seq, [7, 8, branch.token, branch.chain[0], 3])
    assert forker.cache.sync(seq, forker.plane) == 5 + 4  # the trunk, the outcome's token and one more were fed
    forker.cache.check()
    fresh = Sequence(2, list(seq.tokens), seq.params)
    again, other = ForkPlan(seq, [], [3]), ForkPlan(fresh, [], [3])
    forker.open(fresh)
    list(forker.grow([again, other], 2))
    assert [b.chain for b in again.branches] == [b.chain for b in other.branches]
    forker.close(seq)
    forker.cache.check()


def test_the_targets_noise_finds_its_choice() -> None:
    """At a temperature, forks ranked with the target's noise contain its choice much more often than without."""
    hits = {True: 0, False: 0}
    for seed in range(60):
        params = SamplingParams(temperature=8.0, max_tokens=60)  # the toy's distributions are very sharp
        seq = Sequence(1, [1, 2, 3, 4, 5 + seed % 9], params, seed=seed)
        engine = build_engine(TARGET, Config(drafter="off"))
        engine.add(truth := Sequence(1, list(seq.tokens), params, seed=seed))
        engine.step()
        for noise in hits:
            forker, plan = Forker(toy(blur=0.08), 400, 4, 200), ForkPlan(seq, [], [2])
            forker.target_noise = noise
            forker.open(seq)
            list(forker.grow([plan], 0))
            hits[noise] += truth.tokens[-1] in [branch.token for branch in plan.branches]
    assert hits[True] > hits[False] + 10, hits


# ---------------------------------------------------------------- the shared queue


def shared_queue() -> SharedQueue:
    sizes = QueueSizes(2, 16, 8)
    return SharedQueue(sizes, bytearray(sizes.bytes))


def test_outcomes_are_found_by_their_key() -> None:
    queue = shared_queue()
    queue["keys"][:4] = [(0, 0, 5), (0, 2, 9), (0, 2, 5), (1, 2, 5)]
    queue["count"][0] = 4
    assert queue.find(Outcome(0, 2, 5)) == (2, 2, 2)  # row, rank, forks
    assert queue.find(Outcome(0, 2, 7)) == (None, None, 2)
    assert queue.find(Outcome(1, 0, 5)) == (None, None, 0)
    queue["count"][0] = 2
    assert queue.find(Outcome(0, 2, 5)) == (None, None, 1)


def test_lanes_follow_texts_and_are_reused() -> None:
    channel = Channel(shared_queue())
    a, b, c = (Sequence(i, [i, i + 1]) for i in (1, 2, 3))
    first, second = channel.write(a), channel.write(b)
    a.tokens.append(9)
    assert channel.write(a) == first
    assert channel.queue["tokens"][first, :3].tolist() == [1, 2, 9]
    assert channel.write(c) == second  # b was used least recently
    version = int(channel.queue["version"][first])
    channel.write(Sequence(1, [4, 4, 4]))  # the same id with another text
    assert channel.queue["version"][channel.lanes[1].index] > version
    assert channel.write(Sequence(7, list(range(17)))) is None  # too long
    biased = Sequence(8, [1], SamplingParams(logit_bias=dict.fromkeys(range(2000), 1.0)))
    assert channel.write(biased) is None  # its settings are too large
    assert set(channel.request([OutcomeRequest(c, [5, 6], [1, 1, 2])], 3)) == {3}


def test_an_outcome_follows_from_the_new_tokens() -> None:
    sent = SentRequest(0, 2, [5, 6])
    assert sent.outcome([1, 2, 9]) == (0, 0, 9)
    assert sent.outcome([1, 2, 5, 6, 7]) == (0, 2, 7)
    assert sent.outcome([1, 2]) is None
    assert sent.outcome([1, 2, 8, 9]) is None
    assert sent.outcome([1, 2, 5, 6, 7, 8]) is None


def test_the_trunk_is_the_leading_path() -> None:
    assert trunk(chain([4, 5])) == [4, 5]
    assert trunk(Tree([4, 9, 5, 6], [-1, -1, 0, 2])) == [4, 5, 6]
    assert trunk(chain([-1, -2])) is None  # unread


def test_a_weak_draft_is_replaced() -> None:
    assert weak(chain([]))
    assert weak(chain([1, 2], [0.2, 0.1], source="suffix"))
    assert not weak(chain([1, 2], [0.9, 0.1], source="suffix"))
    assert not weak(chain([1, 2], source="suffix"))
    assert not weak(chain([1], [0.1], source="ahead"))


# ---------------------------------------------------------------- the text


def engine_with(options: dict, **config: object) -> Engine:
    engine = build_engine(TARGET, Config(drafter="ahead", k=5, options=options, **config))
    assert engine.drafter.host.wait_ready(30)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("fallback", ["", *sorted({*drafters.names()} - {"ahead", "auto", "cascade", "off"})])
def test_text_is_the_targets_with_every_fallback(fallback: str, temperature: float, batch: int) -> None:
    params, scenario = SamplingParams(temperature=temperature, max_tokens=40), Scenario("x", batch=batch)
    options = (drafters.lookup(fallback).traits.trial(TARGET) if fallback else {}) | ALWAYS
    options |= {"draft_model": toy(blur=0.08), "ahead_fallback": fallback}
    engine = engine_with(options)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    assert not engine.failures
    assert engine.drafter.notes()["ahead"]["deaths"] == 0


def test_a_perfect_draft_model_hits_every_outcome() -> None:
    engine = engine_with(ALWAYS | {"draft_model": TARGET, "ahead_fallback": ""})
    params, scenario = SamplingParams(temperature=0.8, max_tokens=60), Scenario("x", batch=2)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    facts = engine.drafter.notes()["ahead"]
    assert facts["hit_rate"] == 1
    assert facts["just_in_time"] == 0
    assert set(facts["hits_by_outcome"]) == {"end"}


def test_conformance_kit_with_a_model_that_is_often_wrong() -> None:
    assert check_drafter("ahead", {"draft_model": toy(blur=0.3), **ALWAYS}, TARGET, tokens=8) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a draft model"),
        ({"draft_model": TARGET, "ahead_place": "moon"}, "process or thread"),
        ({"draft_model": TARGET, "ahead_place": "process"}, "from a file"),
        ({"draft_model": TARGET, "ahead_forks": 0}, "whole number"),
        ({"draft_model": TARGET, "ahead_fallback": "ahead"}, "itself"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_engine(TARGET, Config(drafter="ahead", options=options))


def test_a_draft_model_with_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", texts=("zwölf Boxkämpfer jagen Viktor",) * 3)
    with pytest.raises(ConfigError, match=r"another vocabulary.* only --drafter model can translate"):
        LLM(folder, dtype="float32", draft_model=str(other), drafter="ahead")
    arguments = ("generate", "one", "-m", str(folder), "-d", "ahead", "--draft-model", str(other))
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"}).invoke(app, arguments)
    assert done.exit_code == 1
    assert "another vocabulary" in done.stderr
    assert "Traceback" not in done.stderr


def test_statistics_and_the_trace_report_it(folder: Path, tmp_path: Path) -> None:
    llm = LLM(folder, drafter="ahead", draft_model=str(folder), ahead_place="thread", k=4, device="cpu", **ALWAYS)
    assert llm.engine.drafter.host.wait_ready(30)
    llm.generate("the quick", SamplingParams(max_tokens=20, ignore_eos=True))
    facts = llm.drafting["ahead"]
    assert {"hit_rate", "hits_by_outcome", "hidden_seconds", "exposed_seconds", "miss", "why"} <= facts.keys()
    assert facts["place"] == "thread"
    assert llm.engine.drafter.traits.memory().kv > 0
    line = ahead_line(facts)
    assert "(rejection)" in line
    assert "(end)" in line
    report = _ahead_facts(llm, [EncodedPrompt([5, 6, 7, 8])], BenchPlan(12, 1))  # as `doctor` does
    assert report["hit_rate"] is not None
    assert {"controller", "pays", "miss"} <= report.keys()
    file = tmp_path / "run.jsonl"
    settings = ["--set", "ahead_place=thread", "--set", "ahead_always=true", "--dtype", "float32", "--device", "cpu"]
    command = ["generate", "the quick", "-m", str(folder), "-d", "ahead", "--draft-model", str(folder), "--k", "4"]
    result = CliRunner().invoke(app, [*command, *settings, "-n", "20", "--trace", str(file)])
    assert result.exit_code == 0, result.output
    assert "ahead" in read(file).footer["drafting"]
    assert {line["source"] for line in read(file).lines} <= {"", "ahead", "ahead:now", "suffix", "ngram"}
