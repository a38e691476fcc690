"""What the request schema refuses is a sentence with the field, what it got and what it takes; no text is repeated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st
from pydantic import BaseModel, ValidationError

from outrider.server.errors import ApiError
from outrider.server.requests import ChatRequest, CompletionRequest
from outrider.server.responses_api import ResponsesRequest
from outrider.server.validation import validation_error

from support.examples import examples

HELLO = [{"role": "user", "content": "hello"}]
FIELDS = [*ChatRequest.model_fields, *CompletionRequest.model_fields, *ResponsesRequest.model_fields]


def refused(model: type[BaseModel], body: Any) -> ApiError | None:
    try:
        model.model_validate_json(json.dumps(body))
    except ValidationError as error:
        located: list[Any] = [each | {"loc": ("body", *each["loc"])} for each in error.errors()]
        return validation_error(located, [*model.model_fields])
    return None


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "messages is missing; it must be given."),
        ({"messages": "x"}, "messages is a text, but it must be a list."),
        ({"messages": []}, "messages must have at least 1 entry."),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content is 5, but it must be a text or a list."),
        (
            {"messages": [{"role": "king", "content": "x"}]},
            "messages.0.role is a text, but it must be 'system', 'developer', 'user', 'assistant' or 'tool'.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "messages.0.content.0.type is a text, but it must be 'text'.",
        ),
        ({"messages": HELLO, "stop": 5}, "stop is 5, but it must be a text or a list."),
        ({"messages": HELLO, "stop": [None]}, "stop.0 is null, but it must be a text."),
        ({"messages": HELLO, "temperature": -1}, "temperature is -1, but it must be at least 0."),
        ({"messages": HELLO, "temperature": "warm"}, "temperature is a text, but it must be a number."),
        ({"messages": HELLO, "top_p": 0}, "top_p is 0, but it must be more than 0."),
        ({"messages": HELLO, "stream": 3}, "stream is 3, but it must be true or false."),
        ({"messages": HELLO, "speculation": [1]}, "speculation is a list, but it must be an object."),
        ({"messages": HELLO, "tools": [{}]}, "tools.0.type is missing; it must be given."),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [1]}]}, "messages.1.tool_calls.0 is 1, but it must "
         "be an object."),
        ({"messages": [*HELLO, {"role": "user", "audio": {}}]}, "messages.1.audio is not supported: leave it out."),
        ({"messages": HELLO, "tool_choice": 5}, "tool_choice is 5, but it must be 'none', 'auto' or 'required'."),
        ({"messages": HELLO, "temprature": 1}, "There is no parameter temprature. Did you mean temperature?"),
        ({"messages": HELLO, "int": 1}, "There is no parameter int."),
        ({"messages": HELLO, "model": "x" * 300}, "model must have at most 256 characters."),
        ({"messages": HELLO, "logit_bias": {"7": 101}}, "logit_bias.7 is 101, but it must be at most 100."),
    ],
)  # fmt: skip
def test_a_chat(body: Any, sentence: str) -> None:
    error = refused(ChatRequest, body)
    assert error is not None
    assert error.message == sentence
    assert error.status == 400


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"prompt": {"a": 1}}, "prompt is an object, but it must be a text or a list."),
        ({"prompt": "x", "echo": True}, "echo is true, but it must be false."),
        ({"prompt": "x", "suffix": "y"}, "suffix is not supported: leave it out."),
        ({"prompt": "x", "n": 1.5}, "n is 1.5, but it must be a whole number of at most 64 bits."),
    ],
)
def test_a_completion(body: Any, sentence: str) -> None:
    error = refused(CompletionRequest, body)
    assert error is not None
    assert error.message == sentence


SECRET = "s3cr3t"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.just(SECRET),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "type", "role"]), inner),
    max_leaves=6,
)
FOREIGN = ("constrained", "validation", "should", "valid ", "Input", "Extra", "instance", "pydantic", SECRET)


@examples(300)
@given(st.sampled_from(FIELDS), JSON)
def test_no_value_brings_up_the_schema_librarys_words(field: str, value: Any) -> None:
    usual = (
        (ChatRequest, {"messages": HELLO}),
        (CompletionRequest, {"prompt": "x"}),
        (ResponsesRequest, {"input": "x"}),
    )
    for model, body in usual:
        error = refused(model, body | {field: value})
        if error is not None:
            assert not any(word in error.message for word in FOREIGN), error.message
            assert error.message.endswith((".", "?"))
            assert "something else" not in error.message
