"""The worker under stress: fairness, full queues, cancelled jobs, failing drafters and disks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, Draft, Drafter, ModelError, SamplingParams
from outrider.drafters import DraftRequest
from outrider.server.errors import ApiError
from outrider.server.host import FairQueue, facts_of
from outrider.server.jobs import Delta, Job
from outrider.server.links import LocalEngine
from outrider.server.requests import ParsedRequest, Prompt
from outrider.server.settings import Limits, Settings
from outrider.server.tracing import TraceStore
from outrider.server.worker import Worker
from outrider.types import Sequence

from support import tiny
from support.serving import HELLO, client, events, is_openai_error, wait_for

LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.7, seed=1)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.7, seed=1)


class Raising(Drafter):
    name = "raising"

    def draft(self, request: DraftRequest) -> Draft:
        raise RuntimeError("a drafter that fails")


class Hanging(Drafter):
    """Hangs in every draft until the gate opens."""

    name = "hanging"
    gate = threading.Event()

    def draft(self, request: DraftRequest) -> Draft:
        seqs = request.seqs
        Hanging.gate.wait(20)
        return Draft.empty(len(seqs))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny.save(tmp_path_factory.mktemp("tiny")), drafter="suffix", dtype="float32", k=4, max_batch=2)


def run(llm: LLM, scenario: Callable[[Worker], Any], queue: int = 100) -> Any:
    """Run a scenario with a worker; afterwards every slot is free."""

    async def live() -> Any:
        worker = Worker(LocalEngine(llm), queue)
        worker.start()
        try:
            return await scenario(worker)
        finally:
            await asyncio.to_thread(worker.stop)

    result = asyncio.run(live())
    llm.engine.cache.check()
    assert not llm.engine.busy
    assert not llm._rejected
    return result


def job(llm: LLM, params: SamplingParams = SHORT, client: str = "me", streams: bool = True) -> Job:
    prompt = Prompt(llm.tokenizer.encode_prompt("the quick brown fox"), raw=True)
    return Job("id", client, streams, ParsedRequest([prompt], params), facts_of(llm), llm.tokenizer)


async def ids(one: Job) -> list[int] | ApiError:
    found: list[int] = []
    while True:
        event = await one.events.get(20)
        assert event is not None, "no event in time"
        if isinstance(event, ApiError):
            return event
        found += event.tokens
        if event.finish:
            return found


# ---------------------------------------------------------------- queue


def test_the_queue_is_fair() -> None:
    queue: FairQueue[str] = FairQueue()
    for i in range(3):
        queue.put("greedy", f"g{i}")
    queue.put("modest", "m0")
    queue.put("other", "o0")
    assert len(queue) == 5
    assert queue.remove(lambda item: item == "g1") == ["g1"]
    assert [queue.take() for _ in range(len(queue))] == ["g0", "m0", "o0", "g2"]


def test_the_text_does_not_depend_on_the_load(llm: LLM) -> None:
    alone = llm.generate("the quick brown fox", LONG)[0].token_ids

    async def scenario(worker: Worker) -> None:
        jobs = [job(llm, LONG if i % 3 == 0 else SHORT) for i in range(9)]
        for each in jobs:
            worker.submit(each)
        for i, each in enumerate(jobs):
            assert await ids(each) == (alone if i % 3 == 0 else alone[:5])

    run(llm, scenario)


def test_a_full_queue_has_a_retry_after(llm: LLM) -> None:
    async def scenario(worker: Worker) -> ApiError:
        first = [job(llm, LONG) for _ in range(3)]
        for each in first:
            worker.submit(each)
        with pytest.raises(ApiError) as refused:
            worker.submit(job(llm))
        for each in first:
            worker.cancel(each)
        return refused.value

    problem = run(llm, scenario, queue=1)
    assert problem.status == 429
    assert 1 <= int(problem.headers["retry-after"]) <= 60


def test_a_cancelled_job_has_left_before_the_next_step(llm: LLM) -> None:
    async def scenario(worker: Worker) -> None:
        gone, stays = job(llm, LONG), job(llm, LONG)
        worker.submit(gone)
        worker.submit(stays)
        assert isinstance(await gone.events.get(20), Delta)
        before = gone.choices[0].stats.steps
        worker.cancel(gone)
        await asyncio.to_thread(wait_for, lambda: gone.choices[0].ended > 0)
        assert gone.choices[0].stats.steps <= before + 2  # the step under way, and no other with it
        assert gone.choices[0].finish == "cancelled"
        waiting = job(llm, LONG)
        worker.submit(waiting)
        worker.cancel(waiting)
        assert len(await ids(stays)) == 200
        worker.cancel(stays)  # after the end: nothing happens

    run(llm, scenario)


# ---------------------------------------------------------------- draining


def test_draining_ends_jobs_and_accepts_none(llm: LLM) -> None:
    async def scenario(worker: Worker) -> None:
        inside = job(llm, LONG)
        worker.submit(inside)
        worker.drain(20)
        with pytest.raises(ApiError, match="shutting down"):
            worker.submit(job(llm))
        assert len(await ids(inside)) == 200

    run(llm, scenario)


def test_jobs_that_outlast_the_drain_end_with_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.01), step())[1])  # else they may end before it

    async def scenario(worker: Worker) -> list[Any]:
        jobs = [job(llm, LONG) for _ in range(4)]
        for each in jobs:
            worker.submit(each)
        await jobs[0].events.get(20)
        worker.drain(0)
        return [await ids(each) for each in jobs]

    assert all(isinstance(end, ApiError) and end.status == 503 for end in run(llm, scenario))


# ---------------------------------------------------------------- faults


def test_a_failing_step_fails_running_jobs_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = llm.generate("the quick brown fox", SHORT)[0].token_ids

    async def scenario(worker: Worker) -> None:
        for error, words in ((RuntimeError("a secret"), "log says why"), (ModelError("NaN."), "NaN.")):
            engine = llm.engine
            monkeypatch.setattr(engine, "step", lambda error=error: (_ for _ in ()).throw(error))
            broken = job(llm, LONG)
            worker.submit(broken)
            problem = await ids(broken)
            assert isinstance(problem, ApiError)
            assert words in problem.message
            assert llm.engine is not engine
            after = job(llm, SHORT)
            worker.submit(after)
            assert await ids(after) == alone
        monkeypatch.setattr(llm, "restart", lambda: 1 / 0)
        monkeypatch.setattr(llm.engine, "step", lambda: 1 / 0)
        last = job(llm, LONG)
        worker.submit(last)
        assert isinstance(await ids(last), ApiError)
        assert worker.unhealthy
        with pytest.raises(ApiError, match="could not be restarted"):
            worker.submit(job(llm))
        monkeypatch.undo()

    run(llm, scenario)


def test_a_raising_drafter_never_kills_a_stream(llm: LLM) -> None:
    body = {"messages": HELLO, "max_tokens": 20, "temperature": 0.8, "seed": 3, "return_token_ids": True}
    with client(llm.using(drafter="off")) as web:
        plain = web.post("/v1/chat/completions", json=body).json()["choices"][0]["token_ids"]
    with client(llm.using(drafter=Raising, k=4)) as web:
        data = web.post("/v1/chat/completions", json=body).json()
        metrics = web.get("/metrics").text
    assert data["choices"][0]["token_ids"] == plain
    assert data["metrics"]["speculative_decoding"]["drafter_failures"] > 0
    assert "outrider:spec_decode_drafter_failures_total" in metrics


def test_a_request_with_a_hanging_drafter_ends_at_its_deadline(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request ends in time, /health reports it, and when the drafter returns the server goes on."""
    monkeypatch.setattr("outrider.server.worker.STALLED", 0.2)
    Hanging.gate.clear()
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 8, "timeout": 0.5}
    with client(llm.using(drafter=Hanging, k=4)) as web:
        late = web.post("/v1/chat/completions", json=body)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
        assert web.get("/health").status_code == 503
        assert "not moved" in web.get("/ready").json()["status"]
        stream = web.post("/v1/chat/completions", json=body | {"stream": True}).text
        assert is_openai_error(events(stream)[-1])
        Hanging.gate.set()
        monkeypatch.setattr("outrider.server.worker.STALLED", 60.0)
        assert web.post("/v1/chat/completions", json=body | {"timeout": 20}).status_code == 200
        assert web.get("/health").status_code == 200


class Stuck(Drafter):
    """Never returns from one of its methods: in a Python loop, or waiting in C."""

    name = "stuck"
    verb, python = "draft", True
    came = threading.Event()

    def _hang(self, verb: str) -> None:
        if verb == Stuck.verb:
            Stuck.came.set()
            while Stuck.python:
                pass
            threading.Event().wait()

    def begin(self, seq: Sequence) -> None:
        self._hang("begin")

    def draft(self, request: DraftRequest) -> Draft:
        seqs = request.seqs
        self._hang("draft")
        return Draft.empty(len(seqs))

    def observe(self, step: Any) -> None:
        self._hang("observe")

    def end(self, seq: Sequence) -> None:
        self._hang("end")


@pytest.mark.parametrize("python", [True, False])
@pytest.mark.parametrize("verb", ["begin", "draft", "observe", "end"])
def test_a_drafter_that_never_returns_changes_no_text(
    llm: LLM, verb: str, python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests, two at a time: all end with the text of plain decoding, and the server is healthy."""
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0.8, "return_token_ids": True, "ignore_eos": True}
    with client(llm.using(drafter="off")) as web:
        plain = [
            web.post("/v1/chat/completions", json=body | {"seed": i}).json()["choices"][0]["token_ids"]
            for i in range(3)
        ]
    monkeypatch.setattr(Stuck, "verb", verb)
    monkeypatch.setattr(Stuck, "python", python)
    stuck = llm.using(drafter=Stuck, k=4)
    threads = threading.active_count()
    with client(stuck, Settings(drafter_seconds=0.3)) as web, ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda i: web.post("/v1/chat/completions", json=body | {"seed": i}).json(), range(3)))
        assert web.get("/health").json() == {"status": "ok"}
        streamed = events(web.post("/v1/chat/completions", json=body | {"seed": 0, "stream": True}).text)
        assert [t for e in streamed if isinstance(e, dict) for c in e["choices"] for t in c["token_ids"]] == plain[0]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == plain
    assert f"'stuck' did not come back from {verb}()" in stuck.engine.controller.why
    stuck.engine.cache.check()
    if python:  # its thread has ended, and no core burns
        wait_for(lambda: threading.active_count() <= threads)


def test_a_drafter_that_returns_late_cannot_touch_the_new_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abandoned call ends its thread before it can touch what another engine has taken over."""
    Hanging.gate.clear()
    body = {"messages": HELLO, "max_tokens": 12, "seed": 1, "return_token_ids": True, "ignore_eos": True}
    late = llm.using(drafter=Hanging, k=4)
    old, engines = late.engine, lambda: sum(thread.name == "engine" for thread in threading.enumerate())
    before = engines()
    with client(late, Settings(drafter_seconds=0.3)) as web:
        first = web.post("/v1/chat/completions", json=body).json()
        assert old.index == 0
        assert late.engine is not old
        Hanging.gate.set()
        second = web.post("/v1/chat/completions", json=body).json()
        wait_for(lambda: engines() == before + 1)
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    assert "switched off until" in first["metrics"]["speculative_decoding"]["reason"]
    assert old.index == 0  # it never finished the step that it was stuck in


def test_a_full_disk_costs_traces_only(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(keys=("a-key-for-tests",), traces=tmp_path / "traces")
    body = {"messages": HELLO, "max_tokens": 5}

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with client(llm, settings) as web:
        web.headers["authorization"] = "Bearer a-key-for-tests"
        monkeypatch.setattr(Path, "write_bytes", full)
        for _ in range(3):
            assert web.post("/v1/chat/completions", json=body).status_code == 200
        wait_for(lambda: web.get("/traces").json()["dropped"] == 3)
        assert "No space" in web.get("/traces").json()["problem"]
        monkeypatch.undo()
        web.post("/v1/chat/completions", json=body)
        wait_for(lambda: len(web.get("/traces").json()["data"]) == 1)
        assert web.get("/traces").json()["problem"] == ""


def test_a_failing_listener_is_only_logged(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TraceStore, "on_step", lambda self, step: 1 / 0)
    monkeypatch.setattr(TraceStore, "on_end", lambda self, choice: 1 / 0)
    with client(llm, Settings(keys=("a-key-for-tests",), traces=tmp_path)) as web:
        web.headers["authorization"] = "Bearer a-key-for-tests"
        assert web.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 5}).status_code == 200


def test_a_bug_in_an_endpoint_is_a_500_without_details(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with client(llm) as web:
        monkeypatch.setattr(web.service.parser, "parse", lambda request: 1 / 0)  # type: ignore[attr-defined]
        answer = web.post("/v1/chat/completions", json={"messages": HELLO})
        assert answer.status_code == 500
        assert is_openai_error(answer.json())
        assert "division" not in answer.text


def test_the_queue_is_full_over_http_too(llm: LLM) -> None:
    body = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True, "n": 2}
    with client(llm, Settings(limits=Limits(queue=0))) as web:
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(web.post("/v1/chat/completions", json=body).status_code))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429}
