"""Responses: the library's text in OpenAI's objects, streamed or whole, and OpenAI errors for bad requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from outrider import LLM, ConfigError, SamplingParams
from outrider.engine.trace import read, recorded, replay
from outrider.server.settings import Limits, Settings

from support.serving import HELLO, client, events, is_openai_error

KEY = "a-key-for-tests"
NAME = re.compile(r"outrider:\w+")
WITH_KEY = {"authorization": f"Bearer {KEY}"}
WARM: dict[str, Any] = {"messages": HELLO, "temperature": 0.8, "seed": 7, "max_tokens": 24, "return_token_ids": True}


@pytest.fixture(scope="module")
def web(llm: LLM) -> Iterator[TestClient]:
    with client(llm) as one:
        yield one


def ask(web: TestClient, path: str = "/v1/chat/completions", **body: Any) -> Any:
    return web.post(path, json=body)


def complete(web: TestClient, **body: Any) -> dict[str, Any]:
    answer = ask(web, **body)
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()
    return data


# ---------------------------------------------------------------- answers


def test_a_chat_is_the_librarys_text(web: TestClient, llm: LLM) -> None:
    plain = llm.using(drafter="off").chat(HELLO, SamplingParams(temperature=0.8, seed=7, max_tokens=24))[0]
    data = complete(web, **WARM)
    (choice,) = data["choices"]
    assert choice["token_ids"] == plain.token_ids
    assert choice["message"] == {"role": "assistant", "content": plain.text, "refusal": None}
    assert (choice["finish_reason"], data["object"], data["seed"]) == (plain.finish_reason, "chat.completion", 7)
    prompt = len(plain.prompt_token_ids)
    usage = {name: data["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    assert list(usage.values()) == [prompt, len(plain.token_ids), prompt + len(plain.token_ids)]


def test_a_stream_has_the_same_text(web: TestClient) -> None:
    whole = complete(web, **WARM)
    chunks = events(ask(web, **WARM, stream=True, stream_options={"include_usage": True}).text)
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(c["delta"]["content"] for c in choices) == whole["choices"][0]["message"]["content"]
    assert [i for c in choices for i in c["token_ids"]] == whole["choices"][0]["token_ids"]
    assert choices[0]["delta"]["role"] == "assistant"
    assert not any("role" in c["delta"] for c in choices[1:])
    assert [c["finish_reason"] for c in choices][-1] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in events(ask(web, **WARM, stream=True).text)[-1]


def test_a_text_several_texts_and_ids_are_continued(web: TestClient, llm: LLM) -> None:
    ids = llm.tokenizer.encode_prompt("one two")
    same = {"temperature": 0, "max_tokens": 6, "return_token_ids": True}
    for prompt in ("one two", ["one two"], ids, [ids]):
        data = ask(web, "/v1/completions", prompt=prompt, **same).json()
        assert data["object"] == "text_completion"
        assert data["choices"][0]["prompt_token_ids"] == ids
    data = ask(web, "/v1/completions", prompt=["one two", "the fox"], n=2, seed=3, **same).json()
    assert [choice["index"] for choice in data["choices"]] == [0, 1, 2, 3]
    assert data["choices"][0]["text"] == data["choices"][1]["text"]  # greedy: seeds do not matter
    assert data["usage"]["prompt_tokens"] == len(ids) + len(llm.tokenizer.encode_prompt("the fox"))
    assert len(ask(web, "/v1/completions", prompt="one").json()["choices"][0]["text"]) > 0


def test_n_answers_have_seeds_of_their_own(web: TestClient) -> None:
    three = complete(web, **WARM | {"n": 3, "temperature": 2.0})["choices"]
    alone = [complete(web, **WARM | {"seed": 7 + j, "temperature": 2.0})["choices"][0] for j in range(3)]
    assert [c["token_ids"] for c in three] == [c["token_ids"] for c in alone]
    assert len({tuple(c["token_ids"]) for c in three}) > 1


def test_every_parameter_reaches_the_library(web: TestClient, llm: LLM) -> None:
    many = {
        "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [90], "bad_words": ["fox"],
    }  # fmt: skip
    bias = {"10": 3.0, "11": -100}
    data = complete(web, **WARM | many | {"logit_bias": bias})
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=24, logit_bias={10: 3.0, 11: -100}, **many)
    assert data["choices"][0]["token_ids"] == llm.chat(HELLO, params)[0].token_ids
    assert complete(web, messages=HELLO, max_completion_tokens=3, max_tokens=9)["usage"]["completion_tokens"] == 3


def test_stop_strings_are_never_streamed(web: TestClient) -> None:
    whole = complete(web, **WARM)["choices"][0]["message"]["content"]
    stop = whole[6:9]
    text = complete(web, **WARM, stop=[stop, "never said"])["choices"][0]
    assert text["message"]["content"] == whole[: whole.find(stop)]
    assert text["finish_reason"] == "stop"
    chunks = events(ask(web, **WARM, stop=stop, stream=True).text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == whole[: whole.find(stop)]


def test_logprobs_whole_and_streamed(web: TestClient, llm: LLM) -> None:
    body = WARM | {"logprobs": True, "top_logprobs": 3}
    content = complete(web, **body)["choices"][0]["logprobs"]["content"]
    entries = llm.chat(HELLO, SamplingParams(temperature=0.8, seed=7, max_tokens=24, logprobs=3))[0].logprobs
    assert [e["logprob"] for e in content] == [lp.logprob for lp in entries]
    assert [[t["logprob"] for t in e["top_logprobs"]] for e in content] == [[v for _, v in lp.top] for lp in entries]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    streamed = [c["choices"][0]["logprobs"]["content"] for c in events(ask(web, **body, stream=True).text)]
    assert [entry for part in streamed for entry in part] == content
    old = ask(web, "/v1/completions", prompt="one two", max_tokens=4, logprobs=2, temperature=0).json()
    form = old["choices"][0]["logprobs"]
    assert {name: len(value) for name, value in form.items()} == dict.fromkeys(form, 4)
    assert form["text_offset"] == [len("".join(form["tokens"][:i])) for i in range(4)]
    assert complete(web, messages=HELLO, max_tokens=2)["choices"][0]["logprobs"] is None


# ---------------------------------------------------------------- speculation


def test_speculation_is_reported_and_can_be_switched_off(web: TestClient) -> None:
    body = WARM | {"messages": [{"role": "user", "content": "one two three one two three one two"}]}
    default = complete(web, **body)
    facts = default["metrics"]["speculative_decoding"]
    assert (facts["enabled"], facts["drafter"]) == (True, "suffix")
    assert facts["num_draft_tokens"] == default["timings"]["draft_n"] > 0
    assert sum(facts["acceptance_histogram"]) == facts["num_spec_steps"]
    assert facts["reason"]
    for options in ({"enabled": False}, {"drafter": "off"}, {"k": 0}):
        data = complete(web, **body, speculation=options)
        facts = data["metrics"]["speculative_decoding"]
        assert (facts["enabled"], facts["num_draft_tokens"]) == (False, 0)
        assert facts["reason"] == "the request switched speculation off"
        assert data["choices"][0]["token_ids"] == default["choices"][0]["token_ids"]
    one = complete(web, **body, speculation={"k": 1, "drafter": "suffix"})["metrics"]["speculative_decoding"]
    assert one["num_draft_tokens"] <= one["num_spec_steps"]
    refused = ask(web, **body, speculation={"drafter": "model"})
    assert refused.status_code == 400
    assert "drafters are: suffix, off." in refused.json()["error"]["message"]


def test_a_server_without_a_drafter_says_so(llm: LLM) -> None:
    with client(llm.using(drafter="off")) as web:
        facts = complete(web, **WARM)["metrics"]["speculative_decoding"]
    assert (facts["enabled"], facts["reason"]) == (False, "the server runs without a drafter")


# ---------------------------------------------------------------- errors


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ({"messages": HELLO, "temperature": -1}, "temperature"),
    ({"messages": HELLO, "temperature": "hot"}, "temperature"),
    ({"messages": HELLO, "top_p": 0}, "top_p"),
    ({"messages": HELLO, "n": 0}, "n"),
    ({"messages": HELLO, "n": 17}, "n"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": 5000}, "max_tokens"),
    ({"messages": HELLO, "max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"messages": HELLO, "stop": ["a"] * 9}, "stop"),
    ({"messages": HELLO, "stop": "a" * 257}, "stop"),
    ({"messages": HELLO, "logit_bias": {"one": 1}}, "logit_bias"),
    ({"messages": HELLO, "logit_bias": {"99999": 1}}, "logit_bias"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": HELLO, "nonsense": 1}, "nonsense"),
    ({"messages": HELLO, "speculation": {"k": 65}}, "speculation.k"),
    ({"messages": HELLO, "response_format": {"type": "poem"}}, "response_format"),
    ({"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
    ({"messages": HELLO, "prediction": {"type": "content"}}, "prediction"),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_invalid_fields_are_named(web: TestClient, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = ask(web, **body, stream=stream)
        assert answer.status_code == 400
        assert is_openai_error(answer.json())
        assert answer.json()["error"]["param"].startswith(param)


def test_answers_have_the_requested_form(web: TestClient) -> None:
    """With drafts and without: the same text, and it matches."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for temperature in (0.0, 1.0):
        body = {"messages": HELLO, "temperature": temperature, "seed": 3, "max_tokens": 40}
        answers = [ask(web, **body, response_format=form, speculation={"enabled": on}).json() for on in (True, False)]
        texts = {answer["choices"][0]["message"]["content"] for answer in answers}
        assert len(texts) == 1
        assert json.loads(texts.pop())["a"] in (1, 2)
        text = ask(web, **body, guided_regex="[ab]{3,5}").json()["choices"][0]["message"]["content"]
        assert set(text) <= set("ab")
        assert 3 <= len(text) <= 5
    both = ask(web, messages=HELLO, guided_regex="a", response_format=form)
    assert both.status_code == 400


def test_a_prediction_is_drafted(web: TestClient) -> None:
    body: dict[str, Any] = {"messages": HELLO, "temperature": 0.0, "max_tokens": 24}
    plain = ask(web, **body).json()
    text = plain["choices"][0]["message"]["content"]
    for content in (text, [{"type": "text", "text": text}], "nothing of the kind"):
        data = ask(web, **body, prediction={"type": "content", "content": content}).json()
        assert data["choices"][0]["message"]["content"] == text
        found = data["usage"]["completion_tokens_details"]
        if content != "nothing of the kind":
            assert found["accepted_prediction_tokens"] > 0
        assert found["accepted_prediction_tokens"] + found["rejected_prediction_tokens"] > 0


def test_bodies_that_are_not_requests(web: TestClient) -> None:
    path = "/v1/chat/completions"
    for data in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 200_000, b'{"a":' * 50_000, b"9" * 9999):
        answer = web.post(path, content=data, headers={"content-type": "application/json"})
        assert answer.status_code == 400, data[:20]
        assert is_openai_error(answer.json())
    assert (
        web.post(path, content=json.dumps({"messages": HELLO}), headers={"content-type": "text/plain"}).status_code
        == 400
    )
    for answer, status in ((web.get("/nowhere"), 404), (web.get(path), 405), (web.post("/health"), 405)):
        assert answer.status_code == status
        assert is_openai_error(answer.json())


def test_the_prompt_has_to_fit(web: TestClient, llm: LLM) -> None:
    for answer in (
        ask(web, messages=[{"role": "user", "content": "fox " * 400}]),
        ask(web, "/v1/completions", prompt=[5] * 400),
        ask(web, "/v1/completions", prompt=[10**6]),
        ask(web, "/v1/completions", prompt=[]),
    ):
        assert answer.status_code == 400, answer.text
        assert is_openai_error(answer.json())
    with client(llm, Settings(limits=Limits(prompt_tokens=5))) as strict:
        assert "at most 5" in ask(strict, **WARM).json()["error"]["message"]


def test_models_are_compared_never_opened(web: TestClient, llm: LLM, folder: Path) -> None:
    (card,) = web.get("/v1/models").json()["data"]
    assert (card["id"], card["drafter"]) == (llm.name, "suffix")
    assert web.get(f"/v1/models/{llm.name}").json()["id"] == llm.name
    assert complete(web, **WARM, model=llm.name)["model"] == llm.name
    for name in (str(folder), "../x", "gpt-4"):
        answer = ask(web, **WARM, model=name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert name not in answer.text
    assert web.get("/v1/models/../../etc/passwd").status_code == 404
    with client(llm, Settings(name="my-model")) as renamed:
        assert complete(renamed, **WARM, model="my-model")["model"] == "my-model"
        assert "this server has 'my-model'" in ask(renamed, **WARM, model="gpt-4").json()["error"]["message"]
    with client(llm, Settings(name="my-model", any_name=True)) as lenient:
        assert complete(lenient, **WARM, model="gpt-4")["model"] == "my-model"


# ---------------------------------------------------------------- security


def test_all_paths_but_the_probes_need_a_key(llm: LLM) -> None:
    with client(llm, Settings(host="0.0.0.0", keys=("another-key", KEY))) as web:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": KEY + "x"},
            {"authorization": "Bearer é"},
        ):
            for path in ("/v1/models", "/metrics", "/traces", "/openapi.json"):
                answer = web.get(path, headers={k: v.encode() for k, v in headers.items()})
                assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        assert web.get("/v1/models", headers=WITH_KEY).status_code == 200
        assert [web.get(path).status_code for path in ("/health", "/ready")] == [200, 200]


def test_insecure_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        Settings(host="0.0.0.0")
    with pytest.raises(ConfigError, match="8 characters"):
        Settings(keys=("short",))
    with pytest.raises(ConfigError, match="only with a key"):
        Settings(traces=Path("/tmp/x"))
    assert Settings(host="0.0.0.0", open=True).hosts == ()


def test_foreign_hosts_and_origins_are_refused(web: TestClient, llm: LLM) -> None:
    assert web.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    assert "access-control-allow-origin" not in web.get("/health", headers={"origin": "https://evil.example"}).headers
    with client(llm, Settings(origins=("https://mine.example",))) as web:
        allowed = web.get("/health", headers={"origin": "https://mine.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://mine.example"
        assert (
            "access-control-allow-origin" not in web.get("/health", headers={"origin": "https://evil.example"}).headers
        )


def test_large_bodies_are_not_read(llm: LLM) -> None:
    with client(llm, Settings(limits=Limits(body_bytes=1000))) as web:
        for content in (b"x" * 1001, iter([b"x" * 600, b"x" * 600])):
            answer = web.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 413
            assert is_openai_error(answer.json())


def test_no_text_in_the_log_unless_asked(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "outrider.server")
    secret = "the quick brown secret"
    for shown in (False, True):
        caplog.clear()
        with client(llm, Settings(log_text=shown)) as web:
            complete(web, messages=[{"role": "user", "content": secret}], max_tokens=3)
        lines = [str(getattr(record, "fields", "")) + record.getMessage() for record in caplog.records]
        assert any(secret in line for line in lines) == shown
        assert any("'finish': 'length'" in line for line in lines)


# ---------------------------------------------------------------- telemetry


def test_metrics_have_vllms_names(llm: LLM) -> None:
    with client(llm) as web:
        data = complete(web, **WARM)
        ask(web, messages=[])
        text = web.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = f'{{model_name="{llm.name}"}}'
    facts = data["metrics"]["speculative_decoding"]
    for name, expected in {
        "spec_decode_num_drafts_total": facts["num_spec_steps"],
        "spec_decode_num_draft_tokens_total": facts["num_draft_tokens"],
        "spec_decode_num_accepted_tokens_total": facts["num_accepted_draft_tokens"],
        "generation_tokens_total": data["usage"]["completion_tokens"],
        "prompt_tokens_total": data["usage"]["prompt_tokens"],
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "spec_decode_enabled": 1,
        "time_to_first_token_seconds_count": 1,
        "e2e_request_latency_seconds_count": 1,
    }.items():
        assert float(values[f"outrider:{name}{label}"]) == expected, name
    assert "outrider:spec_decode_fallback_total" in text
    assert float(values[f'outrider:requests_refused_total{{model_name="{llm.name}",status="400"}}']) == 1


def test_acceptance_is_reported_by_drafter_and_kind(llm: LLM) -> None:
    before = llm.drift.detectors
    with client(llm) as web:
        long: dict[str, Any] = WARM | {"max_tokens": 60, "speculation": {"kind": "greetings"}}
        texts = [complete(web, **long)["choices"][0]["message"]["content"] for _ in range(12)]
        plain = complete(web, **long | {"speculation": {"enabled": False}})["choices"][0]["message"]["content"]
        assert set(texts) == {plain}
        text = web.get("/metrics").text
        refused = ask(web, **WARM | {"speculation": {"kind": "no spaces"}})
    assert any(kind == "greetings" for _, kind in before)
    rates = [line for line in text.splitlines() if line.startswith("outrider:spec_decode_acceptance_rate{")]
    assert any('kind="greetings"' in line and 0 <= float(line.rsplit(" ", 1)[1]) <= 1 for line in rates)
    assert "outrider:spec_decode_acceptance_stale{drafter=" in text
    assert refused.status_code == 400


def test_traces_are_kept_bounded_and_replayed(llm: LLM, tmp_path: Path) -> None:
    settings = Settings(keys=(KEY,), traces=tmp_path / "t", traces_bytes=20_000)
    with client(llm, settings) as web:
        web.headers.update(WITH_KEY)
        ids = [complete(web, **WARM | {"seed": seed})["id"] for seed in range(12)]
        web.service.traces._writer.submit(lambda: None).result()  # type: ignore[attr-defined]
        names = web.get("/traces").json()["data"]
        assert names[0] == f"{ids[-1]}-0"
        assert 0 < len(names) < 12
        assert sum(path.stat().st_size for path in (tmp_path / "t").iterdir()) <= 20_000
        data = web.get(f"/traces/{names[0]}").content
        plain = complete(web, **WARM, speculation={"enabled": False})["id"]
        web.service.traces._writer.submit(lambda: None).result()  # type: ignore[attr-defined]
        assert json.loads(web.get(f"/traces/{plain}-0").text.splitlines()[0])["drafter"] == "off"
        for name in ("nobody", "...", "%2e%2e%2fx", "x" * 200):
            assert web.get(f"/traces/{name}").status_code == 404
    (tmp_path / "one.jsonl").write_bytes(data)
    trace = read(tmp_path / "one.jsonl")
    assert replay(trace) == recorded(trace)
    assert (trace.header["drafter"], trace.footer["finish"]) == ("suffix", "length")
    with client(llm) as web:
        assert "--traces" in web.get("/traces").json()["error"]["message"]


def test_spans_hold_times_and_sizes_and_no_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    with client(llm) as web:
        data = complete(web, **WARM)
    (span,) = kept.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["gen_ai.usage.output_tokens"] == data["usage"]["completion_tokens"]
    assert [event.name for event in span.events] == ["started", "first_token"]
    assert span.start_time <= span.events[0].timestamp <= span.events[1].timestamp <= span.end_time
    assert data["choices"][0]["message"]["content"] not in str(span.attributes)


def test_the_dashboards_metrics_exist(llm: LLM) -> None:
    dashboard = (Path(__file__).parents[2] / "examples" / "grafana.json").read_text()
    expressions = [target["expr"] for panel in json.loads(dashboard)["panels"] for target in panel["targets"]]
    used = {name for expression in expressions for name in NAME.findall(expression)}
    with client(llm) as web:
        complete(web, **WARM)
        text = web.get("/metrics").text
    there = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert used
    assert {name.removesuffix("_bucket") for name in used} <= there
