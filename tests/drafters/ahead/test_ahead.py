"""Drafting ahead: which outcomes are prepared for, that they are found again, and that the text never notices.

Whatever holds for every drafter is tested in test_lossless, which asks every registered one; here are the parts, other
fallbacks, and a drafter process that is killed, stopped and slowed at random moments.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from outrider import LLM, SamplingParams, drafters
from outrider.backends.toy import toy
from outrider.cli.app import app
from outrider.cli.show import ahead_line
from outrider.config import Config
from outrider.drafters.ahead import worker_host as place_module
from outrider.drafters.ahead.account import Account
from outrider.drafters.ahead.channel import Asked, Lines, Wish
from outrider.drafters.ahead.curve import Curve, Law, chances, fan_out
from outrider.drafters.ahead.drafter import Ahead, trunk, weak
from outrider.drafters.ahead.forks import Forker, Plan as Round
from outrider.drafters.ahead.shared_queue import Mail, Outcome, Sizes, find, rank
from outrider.drafters.ahead.worker_host import Process, Thread
from outrider.drafters.ahead.worth import Worth
from outrider.engine.step import Engine
from outrider.engine.trace import read
from outrider.errors import ConfigError
from outrider.llm import build_engine
from outrider.measure.bench import BenchPlan, EncodedPrompt
from outrider.measure.doctor import _ahead_facts
from outrider.testing import Scenario, check_drafter, decode, reference
from outrider.types import Sequence, Tree, chain

from support import tiny

TARGET = toy()
ALWAYS = {"ahead_always": True, "ahead_depth": 4}


# ---------------------------------------------------------------- which outcomes


def test_forks_follow_the_geometric_rule() -> None:
    """For one law, many forks and a real gap, whole numbers agree with the closed form of the paper."""
    alpha, law, length, forks = 0.7, Law(0.9, 0.8), 5, 400
    given = fan_out(chances(alpha, length), forks, law, law)
    weights = [p ** (1 / (1 + law.r)) for p in chances(alpha, length)]
    expected = [forks * w / sum(weights) for w in weights]
    assert sum(given) == forks
    assert all(abs(a - b) < 2 for a, b in zip(given, expected, strict=True))


def test_forks_go_where_they_bring_most() -> None:
    sure, unsure = Law(0.1, 1.0), Law(0.9, 0.3)
    assert fan_out(chances(0.95, 3), 4, unsure, sure)[-1] >= 1
    rejected_early = fan_out(chances(0.1, 3), 8, unsure, sure)
    assert rejected_early[0] == max(rejected_early)
    assert fan_out([1.0], 8, unsure, sure) == [8]  # nothing was drafted: there is one place


@pytest.mark.parametrize("law", [Law(0.8, 0.4), Law(0.3, 1.2)])
def test_the_curve_finds_the_law(law: Law) -> None:
    curve, dice = Curve(Law(0.5, 0.5)), random.Random(1)
    for _ in range(4000):
        u = dice.random()
        place = next((f for f in range(1, 17) if u > law.miss(f)), None)
        curve.add(place, 16)
    assert curve.law.r == pytest.approx(law.r, rel=0.25)
    assert curve.law.c == pytest.approx(law.c, rel=0.2)
    assert curve.measured() == sorted(curve.measured())


def test_the_account_tells_outcomes_apart() -> None:
    account = Account()
    account.outcome(2, 2, 1, 3)
    account.outcome(0, 2, None, 2)
    account.late += 1
    facts = account.as_json()
    assert facts["hits_by_outcome"] == {"0": [0, 1], "end": [1, 1]}
    assert facts["hit_rate"] == pytest.approx(1 / 3)


def test_preparations_are_as_deep_as_pays() -> None:
    account = Account()
    assert account.depth(0.1, 8) is None
    account.round(0.05, 0.01, 0.02, 2)
    account.accepted, account.reached = 30.0, 100.0
    assert account.depth(0.1, 8) == 4  # what the pass hides, and no more
    account.accepted = 98.0
    assert account.depth(0.1, 8) == 5  # one more is worth waiting for
    assert account.depth(0.1, 3) == 3


# ---------------------------------------------------------------- forks


def grown(seq: Sequence, drafted: list[int], forks: list[int], depth: int, blur: float = 0.0) -> tuple[Forker, Round]:
    forker, plan = Forker(toy(blur=blur), 400, 4, 200), Round(seq, drafted, forks)
    forker.open(seq)
    assert list(forker.grow([plan], depth)) == list(range(depth + 1))
    return forker, plan


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_fork_goes_on_as_the_model_would(temperature: float) -> None:
    """The target as its own drafter: what is prepared for an outcome is what it says after it."""
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


def test_what_came_true_is_not_read_again() -> None:
    seq = Sequence(1, [1, 2, 3, 4, 5], SamplingParams(max_tokens=60))
    forker, plan = grown(seq, [7, 8], [1, 1, 2], 2)
    branch = plan.branches[-1]
    forker.extend(seq, [7, 8, branch.token, branch.chain[0], 3])
    assert forker.cache.sync(seq, forker.plane) == 5 + 4  # the trunk, the outcome's token and one more were fed
    forker.cache.check()
    fresh = Sequence(2, list(seq.tokens), seq.params)
    again, other = Round(seq, [], [3]), Round(fresh, [], [3])
    forker.open(fresh)
    list(forker.grow([again, other], 2))
    assert [b.chain for b in again.branches] == [b.chain for b in other.branches]
    forker.close(seq)
    forker.cache.check()


def test_noise_tells_what_the_target_will_choose() -> None:
    """At a temperature, forks ranked with the target's noise find its choice much more often than without."""
    found = {True: 0, False: 0}
    for seed in range(60):
        params = SamplingParams(temperature=8.0, max_tokens=60)  # the toy is very sure of itself
        seq = Sequence(1, [1, 2, 3, 4, 5 + seed % 9], params, seed=seed)
        engine = build_engine(TARGET, Config(drafter="off"))
        engine.add(truth := Sequence(1, list(seq.tokens), params, seed=seed))
        engine.step()
        for noised in found:
            forker, plan = Forker(toy(blur=0.08), 400, 4, 200), Round(seq, [], [2])
            forker.noised = noised
            forker.open(seq)
            list(forker.grow([plan], 0))
            found[noised] += truth.tokens[-1] in [branch.token for branch in plan.branches]
    assert found[True] > found[False] + 10, found


# ---------------------------------------------------------------- the mailbox


def test_outcomes_are_found_by_their_key() -> None:
    sizes = Sizes(2, 16, 8)
    mail = Mail(sizes, bytearray(sizes.bytes))
    mail["keys"][:4] = [(0, 0, 5), (0, 2, 9), (0, 2, 5), (1, 2, 5)]
    mail["count"][0] = 4
    assert find(mail, Outcome(0, 2, 5)) == 2
    assert find(mail, Outcome(1, 0, 5)) is None
    assert rank(mail, Outcome(0, 2, 5)) == (2, 2)
    assert rank(mail, Outcome(0, 2, 7)) == (None, 2)
    mail["count"][0] = 2
    assert find(mail, Outcome(0, 2, 5)) is None


def test_lines_follow_texts_and_make_room() -> None:
    sizes = Sizes(2, 16, 8)
    lines = Lines(Mail(sizes, bytearray(sizes.bytes)))
    a, b, c = (Sequence(i, [i, i + 1]) for i in (1, 2, 3))
    first, second = lines.write(a), lines.write(b)
    a.tokens.append(9)
    assert lines.write(a) == first
    assert lines.mail["tokens"][first, :3].tolist() == [1, 2, 9]
    assert lines.write(c) == second  # b was used longest ago
    edition = int(lines.mail["edition"][first])
    lines.write(Sequence(1, [4, 4, 4]))  # the same id with another text
    assert lines.mail["edition"][lines.of[1].number] > edition
    assert lines.write(Sequence(7, list(range(17)))) is None
    told = Sequence(8, [1], SamplingParams(logit_bias=dict.fromkeys(range(2000), 1.0)))
    assert lines.write(told) is None  # too much to tell
    asked = lines.ask([Wish(c, [5, 6], [1, 1, 2])], 3)
    assert set(asked) == {3}


def test_an_outcome_is_what_became_of_the_draft() -> None:
    asked = Asked(0, 2, [5, 6])
    assert asked.outcome([1, 2, 9]) == (0, 0, 9)
    assert asked.outcome([1, 2, 5, 6, 7]) == (0, 2, 7)
    assert asked.outcome([1, 2]) is None
    assert asked.outcome([1, 2, 8, 9]) is None
    assert asked.outcome([1, 2, 5, 6, 7, 8]) is None


def test_the_trunk_is_the_leading_path() -> None:
    assert trunk(chain([4, 5])) == [4, 5]
    assert trunk(Tree([4, 9, 5, 6], [-1, -1, 0, 2])) == [4, 5, 6]
    assert trunk(chain([-1, -2])) is None  # still on a device


def test_a_weak_guess_gives_way() -> None:
    assert weak(chain([]))
    assert weak(chain([1, 2], [0.2, 0.1], source="suffix"))
    assert not weak(chain([1, 2], [0.9, 0.1], source="suffix"))
    assert not weak(chain([1, 2], source="suffix"))
    assert not weak(chain([1], [0.1], source="ahead"))


# ---------------------------------------------------------------- the text


def engine_with(options: dict, **config: object) -> Engine:
    engine = build_engine(TARGET, Config(drafter="ahead", k=5, options=options, **config))
    assert engine.drafter.place.ready_within(30)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("fallback", ["", *sorted({*drafters.names()} - {"ahead", "auto", "cascade", "off"})])
def test_text_is_the_targets_around_every_drafter(fallback: str, temperature: float, batch: int) -> None:
    params, scenario = SamplingParams(temperature=temperature, max_tokens=40), Scenario("x", batch=batch)
    options = (drafters.lookup(fallback).traits.trial(TARGET) if fallback else {}) | ALWAYS
    options |= {"draft_model": toy(blur=0.08), "ahead_fallback": fallback}
    engine = engine_with(options)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    assert not engine.failures
    assert engine.drafter.notes()["ahead"]["deaths"] == 0


def test_outcomes_are_hit_and_drafts_hidden() -> None:
    engine = engine_with(ALWAYS | {"draft_model": TARGET, "ahead_fallback": ""})
    params, scenario = SamplingParams(temperature=0.8, max_tokens=60), Scenario("x", batch=2)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    facts = engine.drafter.notes()["ahead"]
    assert facts["hit_rate"] == 1  # the target as its own drafter knows what it will say
    assert facts["just_in_time"] == 0
    assert set(facts["hits_by_outcome"]) == {"end"}


def test_conformance_kit_with_a_model_that_is_often_wrong() -> None:
    assert check_drafter("ahead", {"draft_model": toy(blur=0.3), **ALWAYS}, tokens=8) > 0


def test_a_worker_that_fails_is_told_of_and_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "BACKOFF", 0.0)

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of luck")

    engine = engine_with({"draft_model": toy(blur=0.08), "ahead_fallback": "", **ALWAYS})
    monkeypatch.setattr(Forker, "_forward", broken)
    params, scenario = SamplingParams(max_tokens=30), Scenario("x", batch=2)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    place = engine.drafter.place
    assert place.deaths > 0
    assert "out of luck" in place.trouble
    assert "out of luck" in engine.drafter.why or place.ready


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs a draft model"),
        ({"draft_model": TARGET, "ahead_place": "moon"}, "process or thread"),
        ({"draft_model": TARGET, "ahead_place": "process"}, "from a file"),
        ({"draft_model": TARGET, "ahead_forks": 0}, "whole number"),
        ({"draft_model": TARGET, "ahead_fallback": "ahead"}, "itself"),
    ],
)
def test_options_are_checked(options: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_engine(TARGET, Config(drafter="ahead", options=options))


# ---------------------------------------------------------------- whether it pays


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_is_kept(faster: bool) -> None:
    worth, ahead = Worth(), 0
    for _ in range(2000):
        ahead += worth.ahead
        worth.took(1, worth.ahead, 2, 0.010 if worth.ahead == faster else 0.013)
    assert worth.ahead == faster
    assert (ahead > 1800) if faster else (ahead < 200)
    assert ("ahead is kept" if faster else "just in time is kept") in worth.why


def test_a_change_is_noticed() -> None:
    worth = Worth()
    for step in range(4000):
        better = step > 1000
        worth.took(1, worth.ahead, 2, 0.010 if worth.ahead == better else 0.014)
    assert worth.ahead


# ---------------------------------------------------------------- a process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny")


def made(folder: Path, **options: object) -> tuple[LLM, Ahead]:
    llm = LLM(
        folder, drafter="ahead", draft_model=str(folder), k=4, device="cpu", ahead_fallback="", **ALWAYS, **options
    )
    drafter = llm.engine.drafter
    assert isinstance(drafter, Ahead)
    assert drafter.place.ready_within(60), drafter.place.trouble
    return llm, drafter


PROMPTS = ["the quick brown", "def add(a", "one two", "fox fox fox", "lazy", "a + b", "three four", "dog jumps"]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_process_that_is_disturbed_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, batch: int, temperature: float
) -> None:
    """Killed, stopped (and woken or not) and slowed at random moments: the same text, and no stream lost."""
    monkeypatch.setattr(place_module, "BACKOFF", 0.05)
    monkeypatch.setattr(place_module, "HANGS", 0.5)
    monkeypatch.setattr("outrider.drafters.ahead.drafter.LATEST", 0.2)
    llm, drafter = made(folder)
    place, dice, done = drafter.place, random.Random(batch), {"kill": 0, "stop": 0, "wake": 0}
    assert isinstance(place, Process)
    step = llm.engine.step

    def disturbed() -> object:
        pid, chance = place.pid, dice.random()
        if pid is not None and chance < 0.15:
            what = dice.choice(("kill", "stop", "stop", "wake"))
            os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "wake": signal.SIGCONT}[what])
            done[what] += 1
        elif chance < 0.3:
            time.sleep(0.02)
        return step()

    monkeypatch.setattr(llm.engine, "step", disturbed)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    expected = [r.token_ids for r in llm.using(drafter="off").generate(PROMPTS[:batch], params)]
    for _ in range(3 if batch == 1 else 1):
        assert [r.token_ids for r in llm.generate(PROMPTS[:batch], params)] == expected
        place.ready_within(5)
    assert sum(done.values()) > 0
    place.close()


def test_a_killed_process_comes_back_and_a_stopped_one_is_bypassed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_module, "HANGS", 0.3)
    monkeypatch.setattr("outrider.drafters.ahead.drafter.LATEST", 0.1)
    llm, drafter = made(folder)
    place, params = drafter.place, SamplingParams(max_tokens=20, ignore_eos=True)
    assert isinstance(place, Process)
    text = llm.generate("the quick", params)[0].text
    assert drafter.account.hits or drafter.account.jits
    first = place.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    time.sleep(0.05)
    assert llm.generate("the quick", params)[0].text == text
    assert place.ready_within(30)
    assert place.pid != first
    assert place.deaths == 1
    second = place.pid
    assert second is not None
    os.kill(second, signal.SIGSTOP)
    begin = time.perf_counter()
    assert llm.generate("the quick", params)[0].text == text
    assert time.perf_counter() - begin < 5
    assert place.bypassed >= 1
    os.kill(second, signal.SIGCONT)  # it answers what it was asked, and is heard again
    assert place.ready_within(30)
    place.close()
    assert not _exists(second)


def test_one_that_stays_stopped_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "HANGS", 0.2)
    monkeypatch.setattr("outrider.drafters.ahead.drafter.LATEST", 0.1)
    llm, drafter = made(folder)
    place = drafter.place
    assert isinstance(place, Process)
    pid = place.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    llm.generate("the quick", params)
    time.sleep(0.3)
    llm.generate("the quick", params)
    assert place.deaths == 1
    assert "not moved" in place.trouble
    assert not _exists(pid)
    place.close()


def test_a_model_is_waited_for_when_it_is_opened_and_never_again(folder: Path) -> None:
    llm = LLM(folder, drafter="ahead", draft_model=str(folder), k=4, device="cpu", ahead_fallback="", **ALWAYS)
    llm.generate("the quick", SamplingParams(max_tokens=12, ignore_eos=True))
    drafter = llm.engine.drafter
    assert isinstance(drafter, Ahead)
    assert drafter.account.hit_rate is not None
    os.kill(drafter.place.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    begin = time.perf_counter()
    llm.generate("the quick", SamplingParams(max_tokens=12, ignore_eos=True))
    assert time.perf_counter() - begin < 5
    drafter.place.close()


def test_nothing_is_left_when_the_program_ends(folder: Path) -> None:
    """However it ends: the process goes with it."""
    script = (
        "import sys, os; from outrider import LLM\n"
        f"llm = LLM({str(folder)!r}, drafter='ahead', draft_model={str(folder)!r}, k=4, device='cpu')\n"
        "place = llm.engine.drafter.place; assert place.ready_within(60)\n"
        "print(place.pid, flush=True)\n"
        "os._exit(3) if sys.argv[1] == 'abrupt' else None\n"
    )
    for how in ("politely", "abrupt"):
        done = subprocess.run([sys.executable, "-c", script, how], capture_output=True, text=True, timeout=120)
        pid = int(done.stdout.strip() or done.stderr)
        until = time.perf_counter() + 10
        while _exists(pid) and time.perf_counter() < until:
            time.sleep(0.05)
        assert not _exists(pid)


def test_a_process_that_cannot_start_says_why(folder: Path) -> None:
    sizes = Sizes(2, 16, 8)
    place = Process(sizes, {"model": str(folder / "nothing"), "threads": 1})
    until = time.perf_counter() + 60
    while not place.deaths and time.perf_counter() < until:
        place.tend()
        time.sleep(0.05)
    assert "Error" in place.trouble
    place.close()
    assert isinstance(Thread(sizes, lambda: Forker(TARGET, 10, 2, 10)), Thread)


def _exists(pid: int) -> bool:
    """Alive, or a zombie that nobody has waited for (init's are nobody's business)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return not (status.rsplit(")", 1)[1].split()[0] == "Z" and f" {os.getpid()} " not in status)


def test_statistics_and_the_trace_tell_of_it(folder: Path, tmp_path: Path) -> None:
    llm = LLM(folder, drafter="ahead", draft_model=str(folder), ahead_place="thread", k=4, device="cpu", **ALWAYS)
    assert llm.engine.drafter.place.ready_within(30)
    llm.generate("the quick", SamplingParams(max_tokens=20, ignore_eos=True))
    told = llm.drafting["ahead"]
    assert {"hit_rate", "hits_by_outcome", "hidden_seconds", "exposed_seconds", "miss", "why"} <= told.keys()
    assert told["place"] == "thread"
    assert llm.engine.drafter.traits.memory().kv > 0
    words = ahead_line(told)
    assert "(rejection)" in words
    assert "(end)" in words
    found = _ahead_facts(llm, [EncodedPrompt([5, 6, 7, 8])], BenchPlan(12, 1))  # as `doctor` asks
    assert found["hit_rate"] is not None
    assert {"controller", "pays", "miss"} <= found.keys()
    file = tmp_path / "run.jsonl"
    settings = ["--set", "ahead_place=thread", "--set", "ahead_always=true", "--dtype", "float32", "--device", "cpu"]
    command = ["generate", "the quick", "-m", str(folder), "-d", "ahead", "--draft-model", str(folder), "--k", "4"]
    done = CliRunner().invoke(app, [*command, *settings, "-n", "20", "--trace", str(file)])
    assert done.exit_code == 0, done.output
    assert "ahead" in read(file).footer["drafting"]
    assert {line["source"] for line in read(file).lines} <= {"", "ahead", "ahead:now", "suffix", "ngram"}
