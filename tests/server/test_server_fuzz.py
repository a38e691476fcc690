"""Thousands of malformed bodies: never a 5xx, never a traceback, always OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, strategies as st
from pydantic import BaseModel
from starlette.testclient import TestClient

from outrider import LLM
from outrider.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.server.responses_api import ResponsesRequest
from outrider.server.settings import Limits, Settings

from support import tiny
from support.examples import examples
from support.serving import client, is_openai_error

PATHS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest, "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
}  # fmt: skip
NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e-30, 1e308, "", "a", "\x00", "\ud800",
    "é" * 40, "<|im_end|>", "../../etc/passwd", "{{ 7*7 }}", [], {}, [[]], [None], ["a"], [1, 2], [[1], [2]],
    {"type": "text"}, {"a": {"b": [1]}}, {"enabled": False}, {"k": 2}, {"1": 5, "2": -5},
    [{"role": "user", "content": "fox"}], [{"role": "assistant", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "fox"}]}], "x" * 3000, "required",
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}],
    [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}, {"role": "user", "content": []}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f",
      "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "y"}],
)  # fmt: skip
values = st.sampled_from(NASTY) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
USUAL: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the fox"}], "prompt": "one two", "max_tokens": 3,
    "input": "one two", "tokens": [5, 6],
}  # fmt: skip


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    llm = LLM(tiny.save(tmp_path_factory.mktemp("tiny")), drafter="suffix", dtype="float32", k=4)
    with client(llm, Settings(limits=Limits(max_tokens=8, body_bytes=100_000, seconds=20))) as one:
        yield one


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A request that would be fine but for a few fields."""
    path = draw(st.sampled_from([*PATHS]))
    names = [*PATHS[path].model_fields, "unknown"]
    body = {name: value for name, value in USUAL.items() if name in names}
    for name in draw(st.lists(st.sampled_from(names), max_size=4)):
        body[name] = draw(values)
    return path, body


def check(answer: Any) -> None:
    assert answer.status_code in (200, 400, 404, 408, 413), answer.text
    assert "Traceback" not in answer.text
    if answer.status_code != 200:
        assert is_openai_error(answer.json())


FUZZ = examples(900, suppress_health_check=list(HealthCheck))


@FUZZ
@given(request=bodies())
def test_almost_a_request(web: TestClient, request: tuple[str, dict[str, Any]]) -> None:
    path, body = request
    content = json.dumps(body)  # NaN and infinities as Python writes them: not JSON, and sent by some
    check(web.post(path, content=content, headers={"content-type": "application/json"}))


@FUZZ
@given(
    st.sampled_from([*PATHS]), st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | values.map(json.dumps)
)
def test_no_request_at_all(web: TestClient, path: str, content: bytes | str) -> None:
    check(web.post(path, content=content, headers={"content-type": "application/json"}))


def test_the_server_is_healthy_afterwards(web: TestClient) -> None:
    assert web.get("/health").status_code == 200
    assert web.post("/v1/chat/completions", json={"messages": USUAL["messages"], "max_tokens": 3}).status_code == 200
