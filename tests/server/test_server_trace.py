"""A request's own trace while it streams: the lines a recorder would have written, of its own sequence and no other."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import LLM, SamplingParams
from outrider.engine.trace import Line, Recorder, Trace, recorded, replay, tokens_of
from outrider.server import jobs

from support.serving import HELLO, client, events

ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "one two three one two three one two"}], "temperature": 0.7, "seed": 11,
    "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, "stream": True,
}  # fmt: skip
SKIP: dict[str, Any] = {"skip_layers": [0], "refine": False}
ENGINES_OWN = ("step", "seq", "us")  # numbers and clocks of the engine that ran it
TOLD_BESIDE = ("texts", "pieces")  # what a stream says with each line


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """Several drafters together, none of which remembers other requests."""
    return LLM(folder, drafter="auto", auto="ngram,layerskip", **SKIP, dtype="float32", k=4)


@pytest.fixture(scope="module")
def web(llm: LLM) -> Iterator[TestClient]:
    with client(llm) as one:
        yield one


def chunks(web: TestClient, **wish: Any) -> list[dict[str, Any]]:
    answer = web.post("/v1/chat/completions", json=ASKED | wish)
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def lines_of(told: list[dict[str, Any]], index: int = 0) -> list[Line]:
    return [line for chunk in told if chunk["choices"][0]["index"] == index for line in chunk["trace"]]


def ids_of(told: list[dict[str, Any]], index: int = 0) -> list[int]:
    choices = [chunk["choices"][0] for chunk in told]
    return [token for choice in choices if choice["index"] == index for token in choice["token_ids"]]


def bare(line: Line, without: tuple[str, ...] = ENGINES_OWN + TOLD_BESIDE) -> Line:
    return {name: value for name, value in line.items() if name not in without}


# ---------------------------------------------------------------- the lines


@pytest.mark.parametrize("drafter", ["ngram", "layerskip"])
@pytest.mark.parametrize("level", ["summary", "full"])
def test_the_lines_are_a_local_recorders(web: TestClient, llm: LLM, level: str, drafter: str) -> None:
    recorder = Recorder(level)
    local = llm.using(recorder, drafter=drafter, **(SKIP if drafter == "layerskip" else {}))
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=40, ignore_eos=True)
    for say in (lambda: local.chat(ASKED["messages"], params), lambda: chunks(web)):
        say()  # so that both know the prompt's K/V: a drafter may begin with the first pass where it is known
    recorder.lines.clear()
    (result,) = local.chat(ASKED["messages"], params)
    told = chunks(web, speculation={"drafter": drafter, "trace": level})
    trace, lines = Trace.of(lines_of(told)), json.loads(json.dumps(recorder.lines))
    assert [bare(line) for line in trace.lines] == [bare(line) for line in lines]
    assert any("guesses" in line for line in trace.lines) == (level == "full" and drafter == "layerskip")
    assert any(line["nodes"] for line in trace.lines)
    assert ("chose" in trace.lines[0]) == (level == "full")
    assert ids_of(told) == result.token_ids == [token for line in trace.lines for token in line["emitted"]]


def test_it_is_a_whole_trace(web: TestClient, llm: LLM) -> None:
    told = chunks(web, speculation={"trace": "full"})
    lines = lines_of(told)
    assert "outrider_trace" in told[0]["trace"][0]
    assert told[-1]["trace"][-1]["end"]
    assert sum("outrider_trace" in line or "end" in line for line in lines) == 2
    trace = Trace.of(lines)
    assert replay(trace) == recorded(trace)
    header, footer = trace.header, trace.footer
    assert (header["drafter"], header["level"], header["seed"], header["rule"]) == ("auto", "full", 11, "match")
    assert header["prompt"] == told[0]["choices"][0]["prompt_token_ids"]
    assert header["prompt_text"] == llm.tokenizer.decode(header["prompt"], skip_special=False)
    facts = told[-1]["metrics"]["speculative_decoding"]
    assert footer["emitted"] == len(ids_of(told))
    assert (footer["drafted"], footer["accepted"]) == (facts["num_draft_tokens"], facts["num_accepted_draft_tokens"])
    assert footer["finish"] == told[-1]["choices"][0]["finish_reason"]


def test_texts_and_pieces_come_with_the_lines_that_need_them(web: TestClient) -> None:
    told = chunks(web, speculation={"trace": "full"})
    known: dict[str, str] = {}
    for chunk in told:
        for line in chunk["trace"]:
            assert not known.keys() & line.get("pieces", {}).keys(), "told twice"
            known |= line.get("pieces", {})
            shown = tokens_of(line) if "nodes" in line else set()
            assert {str(token) for token in shown} <= known.keys()
            assert len(line.get("texts", [])) == (len(line["emitted"]) if "nodes" in line else 0)
        texts = [text for line in chunk["trace"] for text in line.get("texts", [])]
        assert "".join(texts) == chunk["choices"][0]["delta"]["content"]


def test_asking_for_it_changes_no_text(web: TestClient) -> None:
    quiet, off = chunks(web), chunks(web, speculation={"trace": "off"})
    assert not any("trace" in chunk for chunk in quiet + off)
    for level in ("summary", "full"):
        assert ids_of(chunks(web, speculation={"trace": level})) == ids_of(quiet)
    plain = chunks(web, speculation={"enabled": False, "trace": "summary"})
    assert ids_of(plain) == ids_of(quiet)
    assert lines_of(plain)[0]["drafter"] == "off"
    assert not any(line.get("nodes") for line in lines_of(plain))


def test_a_guided_answer_is_traced_too(web: TestClient) -> None:
    guided = {"guided_regex": "(one|two|three)( (one|two|three)){3,9}", "temperature": 1.0, "ignore_eos": False}
    told = chunks(web, **guided, speculation={"drafter": "layerskip", "trace": "full"})
    assert any(line.get("guesses") for line in lines_of(told))
    assert ids_of(told) == ids_of(chunks(web, **guided, speculation={"enabled": False}))


def test_it_is_refused_where_it_cannot_be(web: TestClient) -> None:
    whole = web.post("/v1/chat/completions", json=ASKED | {"stream": False, "speculation": {"trace": "full"}})
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "speculation.trace")
    assert "stream" in whole.json()["error"]["message"]
    odd = web.post("/v1/chat/completions", json=ASKED | {"speculation": {"trace": "everything"}})
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "speculation.trace")
    schema = web.get("/openapi.json").json()["components"]["schemas"]["Speculation"]["properties"]
    assert "trace" in schema


# ---------------------------------------------------------------- company


def test_nobody_elses_tokens_are_in_it(web: TestClient) -> None:
    """Others stream at the same time, with other words; the trace is what it is alone."""
    alone = [bare(line) for line in lines_of(chunks(web, speculation={"trace": "full", "drafter": "ngram"}))[1:-1]]
    others = [threading.Thread(target=chunks, args=(web,), kwargs={"seed": i, "messages": HELLO}) for i in range(5)]
    for other in others:
        other.start()
    told = chunks(web, speculation={"trace": "full", "drafter": "ngram"})
    for other in others:
        other.join()
    assert [bare(line) for line in lines_of(told)[1:-1]] == alone
    assert {line["seq"] for line in lines_of(told)[1:-1]} == {0}


def test_several_answers_have_a_trace_each(web: TestClient) -> None:
    told = chunks(web, n=3, temperature=2.0, speculation={"trace": "summary"})
    for index in range(3):
        lines = lines_of(told, index)
        assert "outrider_trace" in lines[0]
        assert lines[-1]["end"]
        assert lines[0]["seed"] == 11 + index
        assert {line["seq"] for line in lines[1:-1]} == {index}
        assert [token for line in lines[1:-1] for token in line["emitted"]] == ids_of(told, index)


def test_the_target_is_not_heard_by_those_who_cannot_follow(web: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_PENDING_ROWS", 0)  # as if nothing that was noted had been told yet
    told = chunks(web, speculation={"trace": "full"})
    lines = lines_of(told)[1:-1]
    assert [token for line in lines for token in line["emitted"]] == ids_of(told)
    assert not any("chose" in line for line in lines)


def test_what_waits_to_be_told_is_counted(llm: LLM) -> None:
    (seq,) = llm.prepare("one two three", SamplingParams(max_tokens=30, ignore_eos=True))
    tape = jobs.StepNotes(seq, "full")
    llm.engine.add(seq)
    notes = []
    while not seq.done:
        notes.append(tape.note(llm.engine.step(), 0))
    llm.close(seq)
    kept = sum(note.rows for note in notes if note is not None)
    assert tape._pending_rows == kept
    assert all(note is not None and tape.line(note) for note in notes)
    assert tape._pending_rows == 0
    assert kept < jobs.MAX_PENDING_ROWS + 5  # the last that fitted, a draft of four and its root


def test_a_tape_that_breaks_costs_lines_not_the_answer(web: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("of ill will")

    monkeypatch.setattr(jobs.StepNotes, "note", broken)
    told = chunks(web, speculation={"trace": "full"})
    monkeypatch.undo()
    assert ids_of(told) == ids_of(chunks(web))
    assert len(lines_of(told)) == 2


# ---------------------------------------------------------------- which drafter


def test_a_request_may_choose_among_those_that_work_together(web: TestClient) -> None:
    listed = web.get("/v1/drafters").json()
    assert [each["id"] for each in listed["data"]] == ["auto", "ngram", "layerskip", "off"]
    assert [each["default"] for each in listed["data"]] == [True, False, False, False]
    assert all(each["about"] for each in listed["data"])
    assert listed["limits"]["max_tokens"] == 4096
    texts = []
    for name in ("auto", "ngram", "layerskip", "off"):
        told = chunks(web, speculation={"drafter": name, "trace": "summary"})
        sources = {line["source"] for line in lines_of(told)[1:-1] if line["nodes"]}
        assert sources <= ({name} if name != "auto" else {"ngram", "layerskip"})
        assert bool(sources) == (name != "off")
        assert lines_of(told)[0]["drafter"] == name
        assert told[-1]["metrics"]["speculative_decoding"]["drafter"] == name
        texts.append(ids_of(told))
    assert texts == texts[:1] * 4
    refused = web.post("/v1/chat/completions", json=ASKED | {"speculation": {"drafter": "suffix"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculation.drafter")


def test_a_server_with_one_drafter_lists_that(folder: Path) -> None:
    with client(LLM(folder, drafter="off", dtype="float32")) as web:
        assert [each["id"] for each in web.get("/v1/drafters").json()["data"]] == ["off"]
    llm = LLM(folder, drafter="cascade", cascade="suffix,ngram", dtype="float32")
    assert list(llm.drafters) == ["cascade", "suffix", "ngram", "off"]
