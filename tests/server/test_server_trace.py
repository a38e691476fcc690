"""Streamed traces: the lines that a recorder writes, of the request's own sequence only."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import LLM, SamplingParams
from outrider.engine.trace import Line, Note, Recorder, Trace, recorded, replay, tokens_of
from outrider.server import notes

from support.serving import HELLO, client, events

BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "one two three one two three one two"}], "temperature": 0.7, "seed": 11,
    "max_tokens": 40, "ignore_eos": True, "return_token_ids": True, "stream": True,
}  # fmt: skip
SKIP: dict[str, Any] = {"skip_layers": [0], "refine": False}
ENGINES_OWN = ("step", "seq", "us")  # differ between engines
STREAM_ONLY = ("texts", "pieces")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """Several drafters, none with a memory of other requests."""
    return LLM(folder, drafter="auto", auto="ngram,layerskip", **SKIP, dtype="float32", k=4)


@pytest.fixture(scope="module")
def web(llm: LLM) -> Iterator[TestClient]:
    with client(llm) as one:
        yield one


def chunks(web: TestClient, **fields: Any) -> list[dict[str, Any]]:
    answer = web.post("/v1/chat/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return events(answer.text)


def lines_of(streamed: list[dict[str, Any]], index: int = 0) -> list[Line]:
    return [line for chunk in streamed if chunk["choices"][0]["index"] == index for line in chunk["trace"]]


def ids_of(streamed: list[dict[str, Any]], index: int = 0) -> list[int]:
    choices = [chunk["choices"][0] for chunk in streamed]
    return [token for choice in choices if choice["index"] == index for token in choice["token_ids"]]


def bare(line: Line, without: tuple[str, ...] = ENGINES_OWN + STREAM_ONLY) -> Line:
    return {name: value for name, value in line.items() if name not in without}


# ---------------------------------------------------------------- the lines


@pytest.mark.parametrize("drafter", ["ngram", "layerskip"])
@pytest.mark.parametrize("level", ["summary", "full"])
def test_the_lines_are_a_local_recorders(web: TestClient, llm: LLM, level: str, drafter: str) -> None:
    recorder = Recorder(level)
    local = llm.using(recorder, drafter=drafter, **(SKIP if drafter == "layerskip" else {}))
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=40, ignore_eos=True)
    for run in (lambda: local.chat(BODY["messages"], params), lambda: chunks(web)):
        run()  # so that both have the prompt's K/V: then a drafter may draft for the first pass
    recorder.lines.clear()
    (result,) = local.chat(BODY["messages"], params)
    streamed = chunks(web, speculation={"drafter": drafter, "trace": level})
    trace, lines = Trace.of(lines_of(streamed)), json.loads(json.dumps(recorder.lines))
    assert [bare(line) for line in trace.lines] == [bare(line) for line in lines]
    assert any("guesses" in line for line in trace.lines) == (level == "full" and drafter == "layerskip")
    assert any(line["nodes"] for line in trace.lines)
    assert ("chose" in trace.lines[0]) == (level == "full")
    assert ids_of(streamed) == result.token_ids == [token for line in trace.lines for token in line["emitted"]]


def test_a_streamed_trace_is_complete(web: TestClient, llm: LLM) -> None:
    streamed = chunks(web, speculation={"trace": "full"})
    lines = lines_of(streamed)
    assert "outrider_trace" in streamed[0]["trace"][0]
    assert streamed[-1]["trace"][-1]["end"]
    assert sum("outrider_trace" in line or "end" in line for line in lines) == 2
    trace = Trace.of(lines)
    assert replay(trace) == recorded(trace)
    header, footer = trace.header, trace.footer
    assert (header["drafter"], header["level"], header["seed"], header["rule"]) == ("auto", "full", 11, "match")
    assert header["prompt"] == streamed[0]["choices"][0]["prompt_token_ids"]
    assert header["prompt_text"] == llm.tokenizer.decode(header["prompt"], skip_special=False)
    facts = streamed[-1]["metrics"]["speculative_decoding"]
    assert footer["emitted"] == len(ids_of(streamed))
    assert (footer["drafted"], footer["accepted"]) == (facts["num_draft_tokens"], facts["num_accepted_draft_tokens"])
    assert footer["finish"] == streamed[-1]["choices"][0]["finish_reason"]


def test_texts_and_pieces_come_with_the_lines_that_need_them(web: TestClient) -> None:
    streamed = chunks(web, speculation={"trace": "full"})
    known: dict[str, str] = {}
    for chunk in streamed:
        for line in chunk["trace"]:
            assert not known.keys() & line.get("pieces", {}).keys(), "sent twice"
            known |= line.get("pieces", {})
            shown = tokens_of(line) if "nodes" in line else set()
            assert {str(token) for token in shown} <= known.keys()
            assert len(line.get("texts", [])) == (len(line["emitted"]) if "nodes" in line else 0)
        texts = [text for line in chunk["trace"] for text in line.get("texts", [])]
        assert "".join(texts) == chunk["choices"][0]["delta"]["content"]


def test_pieces_stay_in_order_where_lines_are_slower_than_steps(
    web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Note.line

    def slow(note: Note) -> Line:  # until more rows wait than may
        time.sleep(0.02)
        return compute(note)

    monkeypatch.setattr(Note, "line", slow)
    traced = chunks(web, speculation={"drafter": "layerskip", "trace": "full"})
    assert ids_of(traced) == ids_of(chunks(web))
    assert any("chose" not in line for line in lines_of(traced))


def test_a_trace_changes_no_text(web: TestClient) -> None:
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
    streamed = chunks(web, **guided, speculation={"drafter": "layerskip", "trace": "full"})
    assert any(line.get("guesses") for line in lines_of(streamed))
    assert ids_of(streamed) == ids_of(chunks(web, **guided, speculation={"enabled": False}))


def test_a_trace_needs_a_stream(web: TestClient) -> None:
    whole = web.post("/v1/chat/completions", json=BODY | {"stream": False, "speculation": {"trace": "full"}})
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "speculation.trace")
    assert "stream" in whole.json()["error"]["message"]
    odd = web.post("/v1/chat/completions", json=BODY | {"speculation": {"trace": "everything"}})
    assert (odd.status_code, odd.json()["error"]["param"]) == (400, "speculation.trace")
    schema = web.get("/openapi.json").json()["components"]["schemas"]["Speculation"]["properties"]
    assert "trace" in schema


# ---------------------------------------------------------------- concurrent requests


def test_a_trace_has_no_tokens_of_other_requests(web: TestClient) -> None:
    """Others stream at the same time; the trace is the same as alone."""
    alone = [bare(line) for line in lines_of(chunks(web, speculation={"trace": "full", "drafter": "ngram"}))[1:-1]]
    others = [threading.Thread(target=chunks, args=(web,), kwargs={"seed": i, "messages": HELLO}) for i in range(5)]
    for other in others:
        other.start()
    streamed = chunks(web, speculation={"trace": "full", "drafter": "ngram"})
    for other in others:
        other.join()
    assert [bare(line) for line in lines_of(streamed)[1:-1]] == alone
    assert {line["seq"] for line in lines_of(streamed)[1:-1]} == {0}


def test_several_answers_have_a_trace_each(web: TestClient) -> None:
    streamed = chunks(web, n=3, temperature=2.0, speculation={"trace": "summary"})
    for index in range(3):
        lines = lines_of(streamed, index)
        assert "outrider_trace" in lines[0]
        assert lines[-1]["end"]
        assert lines[0]["seed"] == 11 + index
        assert {line["seq"] for line in lines[1:-1]} == {index}
        assert [token for line in lines[1:-1] for token in line["emitted"]] == ids_of(streamed, index)


def test_logits_are_dropped_for_a_slow_reader(web: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "MAX_PENDING_ROWS", 0)  # as if all notes were still pending
    streamed = chunks(web, speculation={"trace": "full"})
    lines = lines_of(streamed)[1:-1]
    assert [token for line in lines for token in line["emitted"]] == ids_of(streamed)
    assert not any("chose" in line for line in lines)


def test_pending_rows_are_counted(llm: LLM) -> None:
    (seq,) = llm.prepare("one two three", SamplingParams(max_tokens=30, ignore_eos=True))
    recorder = notes.StepNotes(seq, "full")
    llm.engine.add(seq)
    taken = []
    while not seq.done:
        taken.append(recorder.note(llm.engine.step(), 0))
    llm.completion(seq)
    kept = sum(note.rows for note in taken if note is not None)
    assert recorder._pending_rows == kept
    assert all(note is not None and recorder.line(note) for note in taken)
    assert recorder._pending_rows == 0
    assert kept < notes.MAX_PENDING_ROWS + 5  # the last that fitted, a draft of four and its root


def test_failing_notes_cost_lines_not_the_answer(web: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(notes.StepNotes, "note", broken)
    streamed = chunks(web, speculation={"trace": "full"})
    monkeypatch.undo()
    assert ids_of(streamed) == ids_of(chunks(web))
    assert len(lines_of(streamed)) == 2


# ---------------------------------------------------------------- which drafter


def test_a_request_may_choose_a_part_of_the_drafter(web: TestClient) -> None:
    listed = web.get("/v1/drafters").json()
    assert [each["id"] for each in listed["data"]] == ["auto", "ngram", "layerskip", "off"]
    assert [each["default"] for each in listed["data"]] == [True, False, False, False]
    assert all(each["about"] for each in listed["data"])
    assert listed["limits"]["max_tokens"] == 4096
    texts = []
    for name in ("auto", "ngram", "layerskip", "off"):
        streamed = chunks(web, speculation={"drafter": name, "trace": "summary"})
        sources = {line["source"] for line in lines_of(streamed)[1:-1] if line["nodes"]}
        assert sources <= ({name} if name != "auto" else {"ngram", "layerskip"})
        assert bool(sources) == (name != "off")
        assert lines_of(streamed)[0]["drafter"] == name
        assert streamed[-1]["metrics"]["speculative_decoding"]["drafter"] == name
        texts.append(ids_of(streamed))
    assert texts == texts[:1] * 4
    refused = web.post("/v1/chat/completions", json=BODY | {"speculation": {"drafter": "suffix"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculation.drafter")


def test_a_server_with_one_drafter_lists_that(folder: Path) -> None:
    with client(LLM(folder, drafter="off", dtype="float32")) as web:
        assert [each["id"] for each in web.get("/v1/drafters").json()["data"]] == ["off"]
    llm = LLM(folder, drafter="cascade", cascade="suffix,ngram", dtype="float32")
    assert list(llm.drafters) == ["cascade", "suffix", "ngram", "off"]
