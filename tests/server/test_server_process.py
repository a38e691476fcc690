"""The engine in a process of its own: the same answers as in memory, and what happens when either side dies."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outrider import LLM, OutriderError, SamplingParams
from outrider.engine.trace import Trace, recorded, replay
from outrider.measure.client import RemoteError, Server
from outrider.server.host import EngineHost
from outrider.server.links import EngineProcess, Frames, Outbox, frame
from outrider.server.messages import Cancel, Progress, Stop
from outrider.server.requests import ParsedRequest, Prompt
from outrider.server.responses import ResponseBuilder, _event
from outrider.server.settings import Limits, Settings

from support.serving import HELLO, client, events, listening, wait_for

BODY: dict[str, Any] = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True, "return_token_ids": True}
OPTIONS: dict[str, Any] = {"drafter": "ngram", "dtype": "float32", "k": 4}  # a drafter without a memory


def slow(folder: Path, seconds: float) -> LLM:
    """An engine whose steps take a while, so that there is time to break something."""
    llm = LLM(folder, **OPTIONS)
    step = llm.engine.step
    llm.engine.step = lambda: (time.sleep(seconds), step())[1]  # type: ignore[method-assign]
    return llm


def broken(folder: Path) -> LLM:
    raise OutriderError("This model cannot be loaded.")


def dies(folder: Path) -> LLM:
    os._exit(3)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, **OPTIONS)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    with listening(EngineProcess(partial(LLM, folder, **OPTIONS, max_batch=16))) as (url, _):
        yield url


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


# ---------------------------------------------------------------- the same answers


def test_64_streams_have_the_texts_of_an_engine_in_memory(served: str, llm: LLM) -> None:
    prompts = ["the quick brown fox", "def add(a, b):", "one two three one two three one two", "the lazy dog " * 6]
    bodies = [
        {
            "model": llm.name, "messages": [{"role": "user", "content": prompts[i % 4]}], "max_tokens": 8 + i % 32,
            "temperature": (0.0, 0.9)[i % 2], "seed": i, "extra_body": {"ignore_eos": True},
        }
        for i in range(64)
    ]  # fmt: skip

    def text(one: openai.OpenAI, body: dict[str, Any]) -> str:
        chunks = one.chat.completions.create(**body, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0) as one, ThreadPoolExecutor(64) as pool:
        far = list(pool.map(lambda body: text(one, body), bodies))
    with listening(llm) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
        assert [text(one, body) for body in bodies] == far


def test_whatever_the_api_has_comes_over_the_socket(served: str, llm: LLM) -> None:
    """Logprobs, guides, predictions, traces, errors: field by field as from an engine in memory, times aside."""
    text = "one two three one two three one two"
    bodies = [
        BODY | {"max_tokens": 12, "seed": 3, "n": 2, "logprobs": True, "top_logprobs": 2},
        {"messages": HELLO, "guided_regex": "[ab]{3,5}", "seed": 1},
        {"messages": HELLO, "response_format": {"type": "text"}, "seed": 1, "max_tokens": 5},
        BODY | {"max_tokens": 20, "temperature": 0, "seed": 1, "prediction": {"type": "content", "content": text}},
        BODY | {"max_tokens": 3, "bad_words": ["fox"], "logit_bias": {"10": 5}, "seed": 2},
        {"messages": HELLO, "response_format": {"type": "poem"}},
        {"messages": HELLO, "guided_grammar": "start: ("},
        {"messages": [{"role": "user", "content": "fox " * 400}]},
        {"messages": HELLO, "speculation": {"drafter": "nobody"}},
    ]
    with httpx.Client(base_url=served, timeout=30) as far, client(llm) as near:
        assert far.get("/v1/drafters").json() == near.get("/v1/drafters").json()
        for body in bodies:
            answers = [web.post("/v1/chat/completions", json=body) for web in (far, near)]
            assert answers[0].status_code == answers[1].status_code
            assert _timeless(answers[0].json()) == _timeless(answers[1].json())
        traced = BODY | {"max_tokens": 30, "seed": 1, "stream": True, "speculation": {"trace": "full"}}
        lines = [
            line for chunk in events(far.post("/v1/chat/completions", json=traced).text) for line in chunk["trace"]
        ]
        trace = Trace.of(lines)
        assert replay(trace) == recorded(trace)
        assert all("chose" in line for line in trace.lines)
        assert "outrider:kv_cache_usage_perc" in far.get("/metrics").text


def _timeless(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs each time: its id, its times, what the prefix cache held, and its own reason."""
    answer = {name: value for name, value in answer.items() if name not in ("id", "created", "timings")}
    if "usage" in answer:
        answer["usage"] = {name: v for name, v in answer["usage"].items() if name != "prompt_tokens_details"}
        names = ("enabled", "drafter")
        answer["metrics"] = {name: answer["metrics"]["speculative_decoding"][name] for name in names}
    return answer


# ---------------------------------------------------------------- stop strings


def test_a_stop_string_inside_an_accepted_run_cuts_everything_at_one_place(llm: LLM) -> None:
    """The library cuts in the engine, the server in the text: both count the same."""
    body = BODY | {"temperature": 0.0, "max_tokens": 40}
    with client(llm) as web:
        plain = web.post("/v1/chat/completions", json=body).json()["choices"][0]
    text, inside = plain["message"]["content"], 0
    for place in (7, 12, 19, 26):
        stop = text[place : place + 3]
        fields = body | {"stop": stop, "logprobs": True, "prediction": {"type": "content", "content": text}}
        params = SamplingParams(
            max_tokens=40, ignore_eos=True, stop=stop, prediction=tuple(llm.tokenizer.encode(text)), logprobs=0
        )
        ahead = llm.using(drafter="ngram", k=8)
        ahead.chat(HELLO, params)  # so that both find the prompt's K/V
        (own,) = ahead.chat(HELLO, params)
        with client(llm.using(drafter="ngram", k=8)) as web:
            web.post("/v1/chat/completions", json=fields)
            before = _counters(web)
            stream = fields | {
                "stream": True,
                "speculation": {"trace": "full"},
                "stream_options": {"include_usage": True},
            }
            *chunks, last = events(web.post("/v1/chat/completions", json=stream).text)
            metrics = {name: value - before[name] for name, value in _counters(web).items()}
            whole = web.post("/v1/chat/completions", json=fields).json()
        choices = [chunk["choices"][0] for chunk in chunks]
        ids = [token for choice in choices for token in choice["token_ids"]]
        assert "".join(choice["delta"]["content"] for choice in choices) == own.text == text[: text.find(stop)]
        assert ids == own.token_ids == whole["choices"][0]["token_ids"] == plain["token_ids"][: len(ids)]
        assert choices[-1]["finish_reason"] == own.finish_reason == "stop"
        assert sum(len(choice["logprobs"]["content"]) for choice in choices) == len(ids)
        assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == len(ids)
        details = last["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == own.stats.accepted_prediction_tokens
        trace = Trace.of(line for chunk in chunks for line in chunk["trace"])
        assert [token for line in trace.lines for token in line["emitted"]] == ids
        assert trace.footer["emitted"] == len(ids)
        fates = "".join(node[4] for node in trace.lines[-1]["nodes"])
        inside += fates.startswith("a" * len(trace.lines[-1]["emitted"]) + "u")
        assert replay(trace) == recorded(trace)
        facts = chunks[-1]["metrics"]["speculative_decoding"]
        assert (facts["num_draft_tokens"], facts["num_accepted_draft_tokens"], facts["alpha"]) == (
            own.stats.drafted, own.stats.accepted, own.stats.alpha,
        )  # fmt: skip
        assert metrics == {
            "generation_tokens": len(ids), "spec_decode_num_accepted_tokens": own.stats.accepted,
            "spec_decode_num_draft_tokens": own.stats.drafted,
        }  # fmt: skip
    assert inside  # at least once the target had accepted more than the text has


def _counters(web: Any) -> dict[str, float]:
    names = ("generation_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens")
    lines = web.get("/metrics").text.splitlines()
    return {n: next(float(x.split()[-1]) for x in lines if x.startswith(f"outrider:{n}_total{{")) for n in names}


# ---------------------------------------------------------------- deaths


def test_when_the_engine_is_killed_streams_end_and_health_says_so(folder: Path) -> None:
    engine = EngineProcess(partial(slow, folder, 0.02))
    errors: list[str] = []

    def follow(url: str) -> None:
        try:
            for _ in Server(url).chat(BODY):
                pass
        except RemoteError as error:
            errors.append(str(error))

    with listening(engine) as (url, application):
        threads = [threading.Thread(target=follow, args=(url,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_for(lambda: application.service.worker.running == 3)
        assert engine.process.pid is not None
        os.kill(engine.process.pid, signal.SIGKILL)
        begin = time.monotonic()
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert time.monotonic() - begin < 1
        for thread in threads:
            thread.join(5)
        assert len(errors) == 3
        assert all("signal 9, SIGKILL" in error for error in errors)
        assert "ended unexpectedly" in httpx.get(f"{url}/health").json()["status"]
        refused = httpx.post(f"{url}/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        assert "ended unexpectedly" in refused.json()["error"]["message"]
        assert httpx.get(f"{url}/ready").status_code == 503
        assert httpx.get(f"{url}/metrics").status_code == 200


@pytest.mark.slow
def test_when_the_http_process_is_killed_the_engine_ends(folder: Path) -> None:
    program = [sys.executable, "-m", "outrider", "serve", "-m", str(folder), "--dtype", "float32", "-d", "ngram"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([*program, "--port", str(port)], env=environment, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: _answers(port), 60)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        engines = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(engines) == 1
        os.kill(engines[0], signal.SIGINT)  # a terminal's Ctrl-C reaches it too: it does not care
        os.kill(engines[0], signal.SIGTERM)
        assert _answers(port)
        process.kill()
        begin = time.monotonic()
        wait_for(lambda: gone(engines[0]), 10)
        assert time.monotonic() - begin < 1.5


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why(folder: Path) -> None:
    with pytest.raises(OutriderError, match="This model cannot be loaded"):
        EngineProcess(partial(broken, folder))
    with pytest.raises(OutriderError, match="exit status 3"):
        EngineProcess(partial(dies, folder))


# ---------------------------------------------------------------- clients


def test_a_client_that_does_not_read_slows_nobody(folder: Path) -> None:
    """Its text waits here; others stream, and when it reads it gets all of it."""
    settings = Settings(limits=Limits(max_tokens=8000))
    engine = EngineProcess(partial(LLM, folder, **OPTIONS, max_batch=4))
    with listening(engine, settings) as (url, application):
        host, port = url.removeprefix("http://").split(":")
        bodies = [BODY | {"n": 3, "stream": True, "logprobs": True, "top_logprobs": 20, "seed": 5}]
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect((host, int(port)))
            data = json.dumps(bodies[0]).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            lazy.sendall(f"{head}connection: close\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
            wait_for(lambda: application.service.worker.running == 3)
            for _ in range(3):
                tokens = sum(len(c["choices"][0]["token_ids"]) for _, c in Server(url).chat(BODY | {"seed": 1}))
                assert tokens == 200
            wait_for(lambda: application.service.worker.idle)  # the engine has long finished with the lazy one
            received = b""
            while part := lazy.recv(1 << 16):
                received += part
        assert b"data: [DONE]" in received


# ---------------------------------------------------------------- the pieces


def test_frames_are_put_together_however_they_arrive() -> None:
    messages = [Cancel(1), Progress([1], [2], [0], [0], [-1], [7, 8]), Stop()]
    data = b"".join(map(frame, messages))
    for size in (1, 7, 1000):
        frames = Frames()
        assert [m for at in range(0, len(data), size) for m in frames.add(data[at : at + size])] == messages


def test_an_outbox_never_waits_for_its_reader() -> None:
    ours, theirs = socket.socketpair()
    outbox, frames, found = Outbox(theirs), Frames(), []
    begin = time.monotonic()
    for i in range(2000):
        outbox.send(Progress(seqs=[i], tokens=list(range(1000))))
    assert time.monotonic() - begin < 5  # nobody reads, and there is far more than a buffer takes
    while len(found) < 2000:
        found += frames.add(ours.recv(1 << 20))
    assert [message.seqs for message in found] == [[i] for i in range(2000)]
    outbox.wait(1)
    theirs.close()
    ours.close()


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("kind", ["chat.completion", "text_completion"])
def test_a_chunk_from_the_template_is_the_whole_objects(llm: LLM, ids: bool, kind: str) -> None:
    from outrider.server.jobs import Delta, Job
    from outrider.server.links import LocalEngine

    async def compare() -> None:
        engine = LocalEngine(llm)
        request = ParsedRequest([Prompt([5, 6])], SamplingParams(n=2))
        job = Job("chatcmpl-1", "me", True, request, engine.facts, engine.tokenizer)
        builder = ResponseBuilder(engine, "a name", job, ids, kind)
        for index in (0, 1):
            builder.event(Delta(index, "first", [1], [], None, ["first"], []))
            for text, tokens in (('" \\ é 😀 \n\0text', [7, 8]), ("", []), ('["\\u0000ids"]', [9])):
                delta = Delta(index, text, tokens, [], None, [text], [])
                assert builder.event(delta) == _event(builder.chunk(delta))

    asyncio.run(compare())


def test_a_job_that_is_cancelled_while_its_guide_is_compiled_never_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.server.messages import Accepted, Left, Submit

    gate, sent = threading.Event(), []
    compile_guide = llm.guide_for
    monkeypatch.setattr(llm, "guide_for", lambda spec: (gate.wait(10) if spec else None, compile_guide(spec))[1])
    host = EngineHost(llm, sent.append)
    host.start()
    host.handle(Submit(1, "me", [[5, 6]], SamplingParams(guide={"regex": "a+"})))
    host.handle(Cancel(1))
    host.handle(Submit(2, "me", [[5, 6]], SamplingParams(max_tokens=3)))  # is not held up by it
    wait_for(lambda: any(isinstance(message, Progress) and message.ended for message in sent))
    gate.set()
    wait_for(lambda: any(isinstance(message, Left) for message in sent))
    host.handle(Stop())
    assert host.join(5)
    (accepted,) = [message for message in sent if isinstance(message, Accepted) and message.job == 1]
    assert not any(seq in message.seqs for message in sent if isinstance(message, Progress) for seq in accepted.seqs)


def test_a_tokenizer_crosses_to_another_process(llm: LLM) -> None:
    core = llm.tokenizer
    core.render_chat(HELLO)  # compiles its template, which stays here
    copy = pickle.loads(pickle.dumps(core))
    ids = core.encode_chat(HELLO)
    assert copy.encode_chat(HELLO) == ids
    assert copy.encode_prompt("naïve €5 😀!") == core.encode_prompt("naïve €5 😀!")
    assert copy.decode(ids, skip_special=False) == core.decode(ids, skip_special=False)
    assert (copy.eos_ids, copy.vocab_size, copy.strip) == (core.eos_ids, core.vocab_size, core.strip)
