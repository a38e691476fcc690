"""A trace is the run: it round-trips, it replays to the same verdicts, and `off` costs nothing."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path

import pytest
from torch import Tensor

from outrider import drafters
from outrider.config import Config
from outrider.drafters import lookup
from outrider.engine.trace import Recorder, Trace, read, recorded, replay
from outrider.errors import OutriderError
from outrider.llm import build_engine
from outrider.testing import Scenario, decode
from outrider.types import Listener, SamplingParams, Step

from support.toys import toy

TARGET = toy()


def run(name: str, rule: str = "match", level: str = "full", tree: bool = False, temperature: float = 0.8) -> Recorder:
    recorder = Recorder(level)
    recorder.header(rule=rule, drafter=name)
    options = lookup(name).traits.trial(TARGET) | {"tree": tree}
    engine = build_engine(TARGET, Config(drafter=name, k=5, rule=rule, options=options), listeners=(recorder,))
    decode(engine, Scenario("staggered", stagger=2), SamplingParams(temperature=temperature, max_tokens=40), rule)
    recorder.footer()
    return recorder


@pytest.mark.one_in(5)
@pytest.mark.parametrize("level", ["summary", "full"])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", drafters.names())
def test_replay_gives_the_recorded_verdicts(name: str, tree: bool, level: str) -> None:
    trace = Trace.of(run(name, level=level, tree=tree).lines)
    assert len(trace.lines) > 10
    assert replay(trace) == recorded(trace)


@pytest.mark.parametrize("rule", ["reject", "block"])
@pytest.mark.parametrize("name", ["model", "suffix", "layerskip"])
def test_other_rules_replay_from_their_coins(name: str, rule: str) -> None:
    trace = Trace.of(run(name, rule).lines)
    assert replay(trace) == recorded(trace)


def test_a_doctored_trace_does_not_replay() -> None:
    trace = Trace.of(run("model").lines)
    line = next(line for line in trace.lines if any(node[4] == "a" for node in line["nodes"]))
    line["nodes"][0][0] = (line["nodes"][0][0] + 1) % 48
    assert replay(trace) != recorded(trace)


def written(path: Path) -> Trace:
    lines = run("suffix").lines
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return Trace.of(lines)


def test_round_trip(tmp_path: Path) -> None:
    trace = written(tmp_path / "run.jsonl")
    again = read(tmp_path / "run.jsonl")
    assert again.header == json.loads(json.dumps(trace.header))
    assert again.lines == json.loads(json.dumps(trace.lines))
    assert again.footer == trace.footer
    assert again.footer["emitted"] == sum(len(line["emitted"]) for line in again.lines)


def test_lines_reach_the_file_as_they_happen() -> None:
    file = io.StringIO()
    recorder = Recorder("summary", file)
    recorder.header(rule="match")
    engine = build_engine(TARGET, Config(drafter="suffix", k=3), listeners=(recorder,))
    decode(engine, Scenario("alone", batch=1), SamplingParams(max_tokens=10))
    assert len(file.getvalue().splitlines()) == 1 + engine.index


def test_a_trace_cut_off_in_mid_line_is_read_up_to_there(tmp_path: Path) -> None:
    trace = written(tmp_path / "run.jsonl")
    text = (tmp_path / "run.jsonl").read_text()
    (tmp_path / "cut.jsonl").write_text(text[: len(text) // 2])
    cut = read(tmp_path / "cut.jsonl")
    assert cut.lines == json.loads(json.dumps(trace.lines[: len(cut.lines)]))
    assert 0 < len(cut.lines) < len(trace.lines)


@pytest.mark.parametrize("content", ["", "hello\n", "[1, 2]\n", '{"a": 1}\n', '{"outrider_trace": 99}\n'])
def test_other_files_are_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "other").write_text(content)
    with pytest.raises(OutriderError, match=r"trace|Outrider"):
        read(tmp_path / "other")


def test_full_lines_say_what_the_target_thought() -> None:
    trace = Trace.of(run("model", temperature=0.0).lines)
    for line in trace.lines:
        assert len(line["chose"]) == len(line["emitted"])
        for (token, p, margin, top), emitted in zip(line["chose"], line["emitted"], strict=True):
            assert token == emitted == top[0][0]  # greedy: the choice is the likeliest
            assert p == top[0][1]
            assert margin >= 0
        assert set(line["us"]) == {"draft", "verify", "overlap", "judge"}


def test_only_full_lines_look_at_logits() -> None:
    """On a GPU they would have to be copied: once for each line, and only at the level that shows them."""

    class Elsewhere:
        """Logits on another device."""

        copied = 0

        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

        def __getitem__(self, rows: slice) -> Elsewhere:
            return Elsewhere(self.logits[rows])

        def cpu(self) -> Tensor:
            Elsewhere.copied += 1
            return self.logits

    steps: list[Step] = []

    class Collector(Listener):
        def observe(self, step: Step) -> None:
            steps.append(step)

    engine = build_engine(TARGET, Config(drafter="suffix", k=3), listeners=(Collector(),))
    decode(engine, Scenario("alone", batch=1), SamplingParams(max_tokens=10))
    for level, expected in (("summary", 0), ("full", len(steps))):
        recorder = Recorder(level)
        Elsewhere.copied = 0
        for step in steps:
            away = replace(step.output, logits=Elsewhere(step.output.logits))  # type: ignore[arg-type]
            recorder.observe(replace(step, output=away))
        assert (len(recorder.lines), Elsewhere.copied) == (len(steps), expected)


def test_off_records_and_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("the recorder is off")

    monkeypatch.setattr("outrider.engine.trace._line", forbidden)
    assert run("suffix", level="off").lines == []


def test_full_lines_carry_the_noise_that_decided() -> None:
    """The choice is the highest ln p / T + g among the recorded tokens, whatever was drafted."""
    trace = Trace.of(run("model", temperature=0.8).lines)
    compared = 0
    for line in trace.lines:
        for i, ((token, p, _, top), noise) in enumerate(zip(line["chose"], line["noise"], strict=True)):
            drafted = {node[0] for node in line["nodes"] if node[1] < 0} if i == 0 else set()
            assert set(noise) >= {str(each) for each in {token, *drafted, *(t for t, _ in top)}}
            for other, chance in top:
                if chance > 0.01 and p > 0.01 and other != token:
                    compared += 1
                    assert log(p) / 0.8 + noise[str(token)] > log(chance) / 0.8 + noise[str(other)] - 0.03
    assert compared > 40
    assert "noise" not in Trace.of(run("model", temperature=0.0).lines).lines[0]


@pytest.mark.parametrize(("name", "tree"), [("model", False), ("model", True), ("head", False), ("layerskip", False)])
def test_full_lines_carry_what_else_the_drafter_thought_likely(name: str, tree: bool) -> None:
    pytest.importorskip(f"outrider.drafters.{name}")
    lines = [line for line in run(name, tree=tree).lines if line.get("nodes")]
    guessed = [line for line in lines if "guesses" in line]
    assert len(guessed) > 10
    for line in guessed:
        assert set(line["guesses"]) == {str(node[1]) for node in line["nodes"]}
        for token, parent, q, *_ in line["nodes"]:
            guesses = dict(line["guesses"][str(parent)])
            assert len(guesses) <= 5
            assert guesses[token] == pytest.approx(q, abs=2e-3)


def test_summaries_tell_no_thoughts() -> None:
    assert not any({"guesses", "noise", "chose"} & line.keys() for line in run("model", level="summary").lines)


def test_the_recorders_own_time_is_not_in_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: Recorder, line: object) -> None:
        time.sleep(0.01)
        put(self, line)  # type: ignore[arg-type]

    put = Recorder._put
    monkeypatch.setattr(Recorder, "_put", slow)
    recorder = Recorder("full")
    engine = build_engine(TARGET, Config(drafter="suffix", k=3), listeners=(recorder,))
    decode(engine, Scenario("alone", batch=1), SamplingParams(max_tokens=30))
    spans = [line["us"] for line in recorder.lines]
    pauses = [after["draft"][0] - sum(before["judge"]) for before, after in pairwise(spans)]
    assert 0 <= sorted(pauses)[len(pauses) // 2] < 9_000
