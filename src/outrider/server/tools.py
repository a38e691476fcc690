"""Tools of a request: checked, put into the prompt by the chat template, and held to their schemas by a grammar.

Promise: in an answer to a request with tools, every call names one of them and its arguments match its schema (where
the text was not cut off by a limit; without `strict`, by the keywords that llguidance knows), with and without
speculation. Sizes are limited before anything is compiled.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..engine.guides import MAX_CHARACTERS, format_term, schema_term
from ..errors import OutriderError
from ..models.tool_calls import CallForm, CallGrammar, Json, call_form
from .errors import ApiError, bad_request

NO_ARGUMENTS: Json = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolUse:
    """How an answer calls tools."""

    form: CallForm
    guide: Json
    shown: frozenset[int]  # control tokens that belong to the text of a call


def tool_use(
    tools: list[Json], choice: str | Json | None, several: bool, tokenizer: Any, response_format: Json | None = None
) -> ToolUse | None:
    """What `tools`, `tool_choice` and `parallel_tool_calls` of a request mean; None: nothing may be called.

    With a `response_format`, an answer without calls has that form.
    """
    if not tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools.", "tool_choice")
        return None
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("Two tools have the same name; give each its own.", "tools")
    if isinstance(choice, dict):
        if choice["function"]["name"] not in names:
            raise bad_request("tool_choice names a function that is not one of tools.", "tool_choice")
        tools = [tool for tool in tools if tool["function"]["name"] == choice["function"]["name"]]
        several = False
    _check_size(tools)
    form = call_form(tokenizer.chat_template)
    controls = {text: i for text in form.controls if (i := tokenizer.token_to_id(text)) is not None}
    controls = {text: i for text, i in controls.items() if tokenizer.is_special(i)}
    functions = {tool["function"]["name"]: _arguments(i, tool["function"]) for i, tool in enumerate(tools)}
    whole_text = _text_form(response_format, form)
    grammar = str(CallGrammar(form, functions, controls, choice in (None, "auto"), several, whole_text))
    if len(grammar) > MAX_CHARACTERS:
        raise _too_large()
    return ToolUse(form, {"grammar": grammar}, frozenset(controls.values()))


def _check_size(tools: list[Json]) -> None:
    """Before anything is compiled."""
    size = 0
    for tool in tools:
        with suppress(RecursionError):  # it is nested too deeply, which its own check says
            size += len(json.dumps(tool["function"].get("parameters"), ensure_ascii=False))
        if size > 2 * MAX_CHARACTERS:  # a single schema that is too large is refused with its place
            raise _too_large()


def _too_large() -> ApiError:
    return bad_request(f"The tools' schemas have more than {MAX_CHARACTERS} characters; make them smaller.", "tools")


def _text_form(response_format: Json | None, form: CallForm) -> str:
    """A grammar's term for a response format; empty: any text."""
    try:
        term = format_term(response_format)
    except OutriderError as error:
        raise bad_request(str(error), "response_format") from error
    if term and not form.marker:
        message = "This model calls tools by a JSON object, so that response_format cannot be combined with tools."
        raise bad_request(message, "response_format")
    return term


def _arguments(index: int, function: Json) -> str:
    """A grammar's term for the arguments of a function."""
    schema, where = function.get("parameters"), f"tools.{index}.function.parameters"
    if schema is None:
        schema = NO_ARGUMENTS
    if schema.get("type", "object") != "object":
        raise bad_request(f"{where} must be a schema of type object.", where)
    try:
        return schema_term(schema | {"type": "object"}, lenient=not function.get("strict"))
    except OutriderError as error:
        raise bad_request(f"{where}: {error}", where) from error


def checked_messages(messages: list[Json]) -> list[Json]:
    """Messages whose calls have arguments as objects, and whose results belong to calls before them."""
    ids: set[str] = set()
    checked = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls and message["role"] != "assistant":
            raise bad_request(f"messages.{i}.tool_calls: only the assistant calls tools.", f"messages.{i}.tool_calls")
        if message["role"] == "tool" and message.get("tool_call_id") not in ids:
            where = f"messages.{i}.tool_call_id"
            raise bad_request(f"{where} is not the id of a call in a message before it.", where)
        if calls:
            ids |= {call["id"] for call in calls}
            calls = [_with_object(call, f"messages.{i}.tool_calls.{j}") for j, call in enumerate(calls)]
            message = message | {"tool_calls": calls}
        checked.append(message)
    return checked


def _with_object(call: Json, where: str) -> Json:
    """A call whose arguments are an object: templates want it so, and OpenAI sends a text."""
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        where += ".function.arguments"
        raise bad_request(f"{where} is not the text of a JSON object.", where)
    return call | {"function": {"name": call["function"]["name"], "arguments": arguments}}
