"""A server on a real port: OpenAI's own package, schemathesis, clients that hang up, SIGTERM, our own client."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.cli.app import app as cli
from outrider.measure.client import RemoteError, Server
from outrider.server.settings import Limits, Settings

from support.examples import examples
from support.serving import HELLO, listening, wait_for

KEY = "a-key-for-tests"
PROMPTS = ["the quick brown fox", "def add(a, b):", "one two three one two three one two", "the lazy dog " * 6]


@pytest.fixture(scope="module")
def address(llm: LLM) -> Iterator[str]:
    with listening(llm, Settings(keys=(KEY,))) as (url, _):
        yield url


@pytest.fixture(scope="module")
def official(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as one:
        yield one


# ---------------------------------------------------------------- OpenAI's own package


def test_the_official_package(official: openai.OpenAI, llm: LLM) -> None:
    assert [model.id for model in official.models.list()] == [llm.name]
    body: dict[str, Any] = {"model": llm.name, "messages": HELLO, "temperature": 0.8, "seed": 5, "max_tokens": 16}
    whole = official.chat.completions.create(**body, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    assert text
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    content = whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert len(content) == whole.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert whole.metrics["speculative_decoding"]["drafter"] == "suffix"  # type: ignore[attr-defined]
    chunks = list(official.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    plain = official.chat.completions.create(**body, extra_body={"speculation": {"enabled": False}})
    assert plain.choices[0].message.content == text


def test_the_official_package_and_the_old_endpoint(official: openai.OpenAI, llm: LLM) -> None:
    done = official.completions.create(model=llm.name, prompt="one two three", max_tokens=5, logprobs=1, n=2, seed=1)
    assert [choice.index for choice in done.choices] == [0, 1]
    assert len(done.choices[0].logprobs.tokens or ()) == 5  # type: ignore[union-attr]
    stream = official.completions.create(model=llm.name, prompt="one two three", max_tokens=5, seed=1, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == done.choices[0].text


def test_the_official_package_understands_our_errors(official: openai.OpenAI, llm: LLM, address: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        official.chat.completions.create(model=llm.name, messages=HELLO, temperature=-1)  # type: ignore[arg-type]
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        official.chat.completions.create(model="gpt-9", messages=HELLO)  # type: ignore[arg-type]
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0).models.list()
    late = {"max_tokens": 200, "stream": True, "extra_body": {"timeout": 0.01, "ignore_eos": True}}
    with pytest.raises(openai.APIError, match="longer than"):
        list(official.chat.completions.create(model=llm.name, messages=HELLO, **late))  # type: ignore[call-overload]


def test_a_full_server_is_a_rate_limit(llm: LLM) -> None:
    with listening(llm, Settings(limits=Limits(queue=0))) as (url, _):
        one = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.RateLimitError) as refused:
            one.chat.completions.create(model=llm.name, messages=HELLO, n=9, max_tokens=2)  # type: ignore[arg-type]
        assert int(refused.value.response.headers["retry-after"]) >= 1


# ---------------------------------------------------------------- the server against its own description


def test_schemathesis_finds_no_5xx(address: str) -> None:
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json", headers={"authorization": f"Bearer {KEY}"})
    begin, requests = time.monotonic(), 0
    for operation in schema.get_all_operations():

        @examples(100, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
        @given(operation.ok().as_strategy())
        def ask(case: Any) -> None:
            nonlocal requests
            if time.monotonic() - begin > 45:
                return
            if isinstance(case.body, dict):
                case.body["max_tokens"] = 2
            answer = case.call(headers={"authorization": f"Bearer {KEY}"}, timeout=20)
            requests += 1
            assert answer.status_code < 500, (answer.status_code, answer.text)
            assert "Traceback" not in answer.text

        ask()
    assert requests > 100


# ---------------------------------------------------------------- load


def test_streams_under_load_are_those_of_each_request_alone(llm: LLM) -> None:
    """A third of the clients hang up in the middle; every stream that ended is the same request's alone, by ids."""
    dice = random.Random(3)
    bodies = [
        {
            "messages": [{"role": "user", "content": PROMPTS[i % 4]}], "max_tokens": dice.randint(1, 80), "seed": i,
            "temperature": (0.0, 0.9)[i % 2], "return_token_ids": True, "ignore_eos": True,
            "speculation": ({}, {"enabled": False}, {"k": 2})[i % 3],
        }
        for i in range(60)
    ]  # fmt: skip
    leave = [dice.randint(1, 12) if dice.random() < 0.33 else None for _ in bodies]
    for body, left in zip(bodies, leave, strict=True):
        body["max_tokens"] = 200 if left else body["max_tokens"]  # not done before the server sees that nobody listens
    ended: dict[int, list[int]] = {}
    with listening(llm) as (url, application):

        def one(i: int) -> None:
            found: list[int] = []
            for n, (_, chunk) in enumerate(Server(url).chat(bodies[i])):
                if n == leave[i]:
                    return
                found += [token for choice in chunk["choices"] for token in choice["token_ids"]]
            ended[i] = found

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        worker = application.service.worker
        wait_for(lambda: not worker.running and not worker.waiting)
        llm.engine.cache.check()
        assert len(ended) >= 30
        assert 'finished_reason="cancelled"' in application.service.metrics.text().decode()
        for i, found in ended.items():
            assert found == ids(url, bodies[i]), i


def ids(url: str, body: dict[str, Any]) -> list[int]:
    return [t for _, chunk in Server(url).chat(body) for choice in chunk["choices"] for t in choice["token_ids"]]


def test_hanging_up_before_a_whole_answer_frees_its_slots(llm: LLM) -> None:
    with listening(llm) as (url, application):
        worker = application.service.worker
        connection = http.client.HTTPConnection(url.removeprefix("http://"))
        body = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True, "n": 16}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        wait_for(lambda: worker.running)
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        wait_for(lambda: not worker.running and not worker.waiting)
        assert 'finished_reason="cancelled"' in application.service.metrics.text().decode()


# ---------------------------------------------------------------- the program


@pytest.mark.parametrize("drain", [pytest.param("20", marks=pytest.mark.slow), "0"])
def test_sigterm_lets_streams_end(folder: Path, drain: str) -> None:
    """With time to drain a stream ends as it would; without, it ends with a clear error. Both exit with 0."""
    program = [sys.executable, "-m", "outrider", "serve", "-m", str(folder), "--dtype", "float32", "-d", "ngram"]
    program += ["--port", "18431", "--drain", drain, "--k", "3"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(program, env=environment, stderr=subprocess.PIPE, text=True) as process:
        there = Server("http://127.0.0.1:18431")
        wait_for(lambda: _answers(there), 60)
        body = {"messages": HELLO, "max_tokens": 200, "ignore_eos": True, "return_token_ids": True, "seed": 1}
        tokens, error = 0, ""
        try:
            for n, (_, chunk) in enumerate(there.chat(body)):
                tokens += sum(len(choice["token_ids"]) for choice in chunk["choices"])
                if n == 2:
                    process.send_signal(signal.SIGTERM)
        except RemoteError as problem:
            error = str(problem)
        assert (tokens == 200 and not error) if drain == "20" else "shutting down" in error
        assert process.wait(30) == 0
        assert "Traceback" not in (process.stderr.read() if process.stderr else "")


def test_a_second_ctrl_c_leaves_at_once_without_a_traceback(folder: Path) -> None:
    program = [sys.executable, "-m", "outrider", "serve", "-m", str(folder), "--dtype", "float32", "-d", "off"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([*program, "--port", "0"], env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "Serving" in line)
        there = Server(line.split(" at ")[1].partition("/v1")[0])
        chunks = there.chat({"messages": HELLO, "max_tokens": 200, "ignore_eos": True, "n": 16})
        try:
            wait_for(lambda: _answers(there), 60)
            next(chunks)
            process.send_signal(signal.SIGINT)
            told = ""
            while "Ctrl-C again leaves at once" not in told:
                line = process.stderr.readline()
                assert line, told
                told += line
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
            assert "Traceback" not in told + process.stderr.read()
        finally:
            process.kill()


def test_a_port_in_use_is_told_before_a_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = CliRunner().invoke(cli, ["serve", "-m", str(tmp_path / "no-such-model"), "--port", str(port)])
    assert done.exit_code == 1
    assert f"Port {port} is in use" in done.stderr


def _answers(there: Server) -> bool:
    try:
        return bool(there.models())
    except RemoteError:
        return False


def test_serve_needs_a_key_or_open(folder: Path) -> None:
    done = CliRunner().invoke(cli, ["serve", "-m", str(folder), "--host", "0.0.0.0"])
    assert done.exit_code == 1
    assert "--api-key" in done.stderr


def test_bench_serve_and_chat_with_a_server(address: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "the quick brown fox"}\n{"prompt": "one two"}\n')
    arguments = ["bench", "serve", "--server", address, "--api-key", KEY, "--prompts", str(tmp_path / "p.jsonl")]
    arguments += ["--requests", "6", "-n", "5", "--concurrency", "3"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["requests"], result["failed"]) == (6, 0)
    assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"] <= result["e2e_ms"]["p99"]
    plain = ["--rate", "50", "--json", "--body", '{"speculation": {"enabled": false}}']
    rated = CliRunner().invoke(cli, [*arguments, *plain])
    assert json.loads(rated.stdout)["draft_tokens"] == 0
    talk = CliRunner().invoke(cli, ["chat", "--server", address, "--api-key", KEY, "-n", "5"], input="hello\n\n")
    assert talk.exit_code == 0
    assert "5 tokens" in talk.stderr
    unreachable = ["chat", "--server", "http://127.0.0.1:9"]
    for wrong, message in (([*arguments, "--body", "[]"], "JSON object"), (unreachable, "outrider serve")):
        failed = CliRunner().invoke(cli, wrong, input="hello\n\n")
        assert failed.exit_code == 1
        assert message in failed.stderr
    with pytest.raises(RemoteError, match="401"):
        Server(address, "wrong").models()


@pytest.mark.real
def test_the_default_model_serves_its_plain_text() -> None:
    llm = LLM(max_length=512)
    alone = llm.using(drafter="off").chat(HELLO, SamplingParams(max_tokens=24))[0]
    with listening(llm) as (url, _):
        body = {"messages": HELLO, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
        results: list[list[int]] = []
        threads = [threading.Thread(target=lambda: results.append(ids(url, body))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [alone.token_ids] * 6
