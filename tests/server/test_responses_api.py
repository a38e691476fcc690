"""/v1/responses through the official client: text and calls, whole and streamed; /tokenize, /detokenize, /docs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest
from openai import OpenAI

from outrider import LLM
from outrider.models.tool_calls import HERMES
from outrider.server.pages import POLICY
from outrider.server.settings import Settings

from support import tiny
from support.serving import HELLO, is_openai_error, listening
from support.tools import ADDED, CLOCK, TEMPLATES, WEATHER

TOOLS = [{"type": "function"} | one["function"] for one in (WEATHER, CLOCK)]
SCHEMAS = {tool["name"]: tool["parameters"] for tool in TOOLS}
TEXT = "the quick brown fox"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    llm = LLM(tiny.save(tmp_path_factory.mktemp("tiny"), context=1024, added=ADDED), drafter="suffix", k=8)
    llm.tokenizer.chat_template = TEMPLATES[HERMES]
    return llm


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with listening(llm, Settings(any_name=True)) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def create(client: OpenAI, **body: Any) -> Any:
    usual = {"model": "any", "input": TEXT, "temperature": 0.8, "max_output_tokens": 24}
    extra = {"seed": 7} | body.pop("extra_body", {})
    return client.responses.create(**usual | body, extra_body=extra)


def chat(client: OpenAI, **body: Any) -> Any:
    usual = {"model": "any", "messages": HELLO, "temperature": 0.8, "max_tokens": 24, "seed": 7}
    return client.chat.completions.create(**usual | body)


# ---------------------------------------------------------------- responses


def test_a_text_is_that_of_a_chat(client: OpenAI) -> None:
    response, same = create(client), chat(client)
    assert response.output_text == same.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.input_tokens, response.usage.output_tokens) == (same.usage.prompt_tokens, 24)
    assert response.model_extra["metrics"]["speculative_decoding"]["enabled"]
    told = [{"role": "developer", "content": "Be brief."}, *HELLO]
    spoken = create(client, instructions="Be brief.", input=[{"role": "user", "content": TEXT}])
    assert spoken.output_text == chat(client, messages=told).choices[0].message.content
    assert spoken.output[0].status == "incomplete"


def test_a_stream_builds_the_same_response(client: OpenAI) -> None:
    for body in ({}, {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 90}):
        whole = create(client, **body)
        events = list(create(client, **body, stream=True))
        assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        final = events[-1].response
        assert events[-1].type == f"response.{whole.status}"
        plain = [[item.model_dump(exclude={"id", "call_id"}) for item in each.output] for each in (whole, final)]
        assert plain[0] == plain[1]
        assert final.usage.output_tokens == whole.usage.output_tokens
        deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert deltas == whole.output_text
        opened = [event.item.id for event in events if event.type == "response.output_item.added"]
        closed = [event.item.id for event in events if event.type == "response.output_item.done"]
        assert opened == closed == [item.id for item in final.output]
        calls = [item for item in final.output if item.type == "function_call"]
        for i, item in enumerate(final.output):
            if item in calls:
                parts = [e for e in events if e.type == "response.function_call_arguments.delta"]
                assert "".join(e.delta for e in parts if e.output_index == i) == item.arguments


def test_the_clients_own_stream(client: OpenAI) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"const": "yes"}}}
    with client.responses.stream(model="any", input=TEXT, text=form, extra_body={"seed": 7}) as stream:
        types = {event.type for event in stream}
        assert stream.get_final_response().output_text == '"yes"'
    assert {"response.content_part.added", "response.output_text.done", "response.content_part.done"} <= types


def test_calls_and_their_results(client: OpenAI) -> None:
    named = {"type": "function", "name": "clock"}
    first = create(client, tools=TOOLS, tool_choice=named, max_output_tokens=200)
    (call,) = first.output
    jsonschema_rs.validate(SCHEMAS["clock"], json.loads(call.arguments))
    assert (call.name, call.status, first.status) == ("clock", "completed", "completed")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    turns = [{"role": "user", "content": TEXT}, call.model_dump(exclude_none=True), result]
    second = create(client, input=turns, tools=TOOLS, tool_choice="none")
    assert second.output_text
    talk = [*first.output, *second.output]
    assert create(client, input=[*turns, *[item.model_dump() for item in talk[1:]], {"role": "user", "content": "x"}])


def test_text_in_a_requested_form(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    assert json.loads(create(client, text=form, max_output_tokens=60).output_text)["a"] in (1, 2)
    assert create(client, text={"format": {"type": "text"}}).output_text


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "is not supported: leave it out."),
        ({"background": True}, "background", "must be false"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function'"),
        ({"input": []}, "input", "at least 1 entry"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "messages.0.tool_call_id",
         "is not the id of a call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input.0.content.0.type", "must be 'input_text', 'output_text' or 'text'"),
        ({"extra_body": {"speculation": {"trace": "full"}}, "stream": True}, "speculation.trace",
         "chat/completions only"),
        ({"input": [{"type": "function_call", "call_id": str(i), "name": "f", "arguments": "{}"} for i in range(200)]},
         "messages.0.tool_calls", "at most 128 entries"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "is not supported"),
        ({"max_output_tokens": 5000}, "max_tokens", "this server's limit is 4096"),
    ],
)  # fmt: skip
def test_refusals(client: OpenAI, body: dict[str, Any], param: str, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, **body)
    assert refused.value.body["param"] == param
    assert sentence in refused.value.body["message"]


def test_an_error_in_a_stream_is_an_event(client: OpenAI) -> None:
    body = {"max_output_tokens": 900, "extra_body": {"timeout": 0.05}, "stream": True}
    events = list(create(client, **body))
    assert (events[-1].type, events[-1].code) == ("error", "deadline_exceeded")


# ---------------------------------------------------------------- tokens


PLAIN = httpx.Client(verify=False)  # a client for each request would read all certificates each time


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return PLAIN.post(url + path, json=body)


def test_tokens_and_back(url: str, llm: LLM) -> None:
    tokenizer = llm.tokenizer
    data = post(url, "/tokenize", prompt=TEXT).json()
    assert data == {"count": len(data["tokens"]), "max_model_len": 1024, "tokens": tokenizer.encode_prompt(TEXT)}
    assert post(url, "/tokenize", prompt=TEXT, add_special_tokens=False).json()["tokens"] == tokenizer.encode(TEXT)
    assert post(url, "/tokenize", messages=HELLO).json()["tokens"] == tokenizer.encode_chat(HELLO)
    short = post(url, "/tokenize", messages=HELLO, add_generation_prompt=False).json()["tokens"]
    assert short == tokenizer.encode_chat(HELLO, add_generation_prompt=False)
    told = post(url, "/tokenize", messages=HELLO, tools=[CLOCK]).json()["tokens"]
    assert "does clock" in post(url, "/detokenize", tokens=told).json()["prompt"]
    assert post(url, "/detokenize", tokens=data["tokens"]).json() == {"prompt": "<s>" + TEXT}
    assert post(url, "/detokenize", tokens=[]).json() == {"prompt": ""}


def test_tokens_that_are_refused(url: str) -> None:
    for path, body, status in (
        ("/tokenize", {}, 400), ("/tokenize", {"prompt": "x", "messages": HELLO}, 400),
        ("/detokenize", {"tokens": [10**6]}, 400), ("/detokenize", {"tokens": [-1]}, 400),
        ("/tokenize", {"messages": [{"role": "tool", "content": "x"}]}, 400),
    ):  # fmt: skip
        answer = post(url, path, **body)
        assert (answer.status_code, is_openai_error(answer.json())) == (status, True)


# ---------------------------------------------------------------- the reference


def test_the_reference_has_every_endpoint_and_field(url: str) -> None:
    page, schema = PLAIN.get(f"{url}/docs"), PLAIN.get(f"{url}/openapi.json").json()
    assert page.headers["content-security-policy"] == POLICY
    assert "<script" not in page.text
    for path, methods in schema["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page.text
    for name in ("tool_choice", "guided_regex", "max_output_tokens", "add_special_tokens"):
        assert f"<code>{name}</code>" in page.text
    assert PLAIN.get(f"{url}/docs", headers={"if-none-match": page.headers["etag"]}).status_code == 304
