"""Tools through the official client: every choice, whole and streamed, in every form; and what is refused."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from outrider import LLM
from outrider.models.tool_calls import FORMS, HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, CallForm
from outrider.server.settings import Settings
from outrider.server.tools import tool_use

from support import tiny
from support.serving import HELLO, listening
from support.tools import ADDED, CLOCK, CONTROLS, TEMPLATES, WEATHER, arguments, object_schema, tool

BOTH = [WEATHER, CLOCK]
SCHEMAS = {one["function"]["name"]: one["function"]["parameters"] for one in BOTH}
NAMED = {"type": "function", "function": {"name": "clock"}}
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tiny.save(tmp_path_factory.mktemp("tiny"), context=1024, controls=CONTROLS, added=ADDED)
    return LLM(folder, drafter="suffix", dtype="float32", k=8)


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[OpenAI]:
    with listening(llm, Settings(any_name=True)) as (url, _):
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def use(llm: LLM, form: CallForm | None) -> None:
    """Let the model's template write calls in this form; None: it knows no tools."""
    llm.tokenizer.chat_template = tiny.TEMPLATE if form is None else TEMPLATES[form]
    llm.tokenizer._template = None


def ask(client: OpenAI, **body: Any) -> Any:
    usual = {"model": "any", "messages": HELLO, "tools": BOTH, "temperature": 0.8, "seed": 5}
    extra = {"min_tokens": 1} | body.pop("extra_body", {})
    return client.chat.completions.create(**usual | {"max_tokens": 200} | body, extra_body=extra)


def calls_of(answer: ChatCompletion) -> list[tuple[str, Any]]:
    """The calls of an answer, which match their schemas."""
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in answer.choices[0].message.tool_calls]
    for name, values in calls:
        jsonschema_rs.validate(SCHEMAS[name], values)
    return calls


def bias_to_call(llm: LLM, form: CallForm) -> dict[str, float]:
    """So that the tiny model begins a call by itself, where its first token can be named."""
    first = llm.tokenizer.encode(form.start, special=True)[0]
    return {str(first): 60.0}


@pytest.mark.one_in(6)
@every_form
def test_every_choice_is_followed(client: OpenAI, llm: LLM, form: CallForm) -> None:
    use(llm, form)
    for choice, names in (("required", {"weather", "clock"}), (NAMED, {"clock"})):
        answer = ask(client, tool_choice=choice, parallel_tool_calls=False)
        ((name, _),) = calls_of(answer)
        assert name in names
        assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)
        plain = ask(
            client, tool_choice=choice, parallel_tool_calls=False, extra_body={"speculation": {"enabled": False}}
        )
        assert calls_of(plain) == calls_of(answer)
        passes = [each.metrics["speculative_decoding"]["target_passes"] for each in (answer, plain)]
        assert passes[0] < passes[1]  # what the schema forces is drafted
    silent = ask(client, tool_choice="none", max_tokens=20)
    assert silent.choices[0].message.tool_calls is None
    without = ask(client, tools=openai.NOT_GIVEN, max_tokens=20)
    assert silent.choices[0].message.content == without.choices[0].message.content


@pytest.mark.one_in(3, 2)
@every_form
def test_auto_calls_where_the_model_does(client: OpenAI, llm: LLM, form: CallForm) -> None:
    use(llm, form)
    answer = ask(client, logit_bias=bias_to_call(llm, form), parallel_tool_calls=False, temperature=0)
    assert len(calls_of(answer)) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    text = ask(client, max_tokens=12, temperature=0)
    assert text.choices[0].message.tool_calls is None
    assert text.choices[0].message.content
    assert text.choices[0].finish_reason == "length"


def gather(chunks: Any) -> tuple[str, list[list[str]], str | None]:
    """The text, the calls and the finish reason of a stream."""
    text, calls, finish = "", list[list[str]](), None
    for chunk in chunks:
        (choice,) = chunk.choices
        text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
        for part in choice.delta.tool_calls or ():
            if part.id:
                assert part.index == len(calls)
                calls.append([part.function.name, ""])
            calls[part.index][1] += part.function.arguments
    return text, calls, finish


@pytest.mark.one_in(3, 1)
@every_form
def test_a_stream_has_the_same_calls(client: OpenAI, llm: LLM, form: CallForm) -> None:
    use(llm, form)
    for choice, tokens in (("required", 80), ("auto", 16)):
        body = {"tool_choice": choice, "max_tokens": tokens}
        whole = ask(client, **body).choices[0]
        text, calls, finish = gather(ask(client, **body, stream=True))
        assert (text, finish) == (whole.message.content or "", whole.finish_reason)
        assert calls == [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or ()]


@pytest.mark.one_in(3, 1)
@pytest.mark.parametrize("form", [form for form in FORMS if form.several], ids=lambda form: form.name)
def test_two_calls_in_one_answer(client: OpenAI, llm: LLM, form: CallForm) -> None:
    use(llm, form)
    more = llm.tokenizer.encode(form.between + form.before_name, special=True)[0]
    answer = ask(client, tool_choice="required", logit_bias={str(more): 60.0}, max_tokens=160)
    calls = answer.choices[0].message.tool_calls
    for call in calls[:2]:
        jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))
    assert len({call.id for call in calls}) == len(calls) >= 2
    assert answer.choices[0].finish_reason == "length"  # and the last one may be incomplete


def test_two_calls_and_an_end(client: OpenAI, llm: LLM) -> None:
    use(llm, HERMES)
    ends = {"logit_bias": {str(llm.tokenizer.eos_id): 100}, "extra_body": {"min_tokens": 80}}
    answer = ask(client, tool_choice="required", **ends)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert len(calls_of(answer)) == 2


def test_one_call_where_the_model_knows_no_more(client: OpenAI, llm: LLM) -> None:
    use(llm, LLAMA)
    assert all(len(calls_of(ask(client, tool_choice="required", seed=seed))) == 1 for seed in range(2))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("form", [*FORMS, None], ids=lambda form: form.name if form else "none")
def test_a_conversation_with_results(client: OpenAI, llm: LLM, form: CallForm | None) -> None:
    use(llm, form)
    first = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "very sunny"}
    turns = [*HELLO, first.model_dump(exclude_none=True), result]
    answer = ask(client, messages=turns, max_tokens=10, extra_body={"return_token_ids": True})
    prompt = llm.tokenizer.decode(answer.choices[0].model_extra["prompt_token_ids"], skip_special=False)
    call = first.tool_calls[0].function
    assert (form or HERMES).spell([(call.name, json.loads(call.arguments))]) in prompt
    assert "very sunny" in prompt
    ask(client, messages=turns, tools=openai.NOT_GIVEN, max_tokens=2)  # the tools are not needed again


def test_the_clients_own_stream_and_a_function_without_arguments(client: OpenAI, llm: LLM) -> None:
    use(llm, MISTRAL)
    body = {"model": llm.name, "messages": HELLO, "tools": [tool("now")], "tool_choice": "required"}
    with client.chat.completions.stream(**body, max_tokens=60, parallel_tool_calls=False) as stream:
        message = stream.get_final_completion().choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [("now", "{}")]
    assert len(message.tool_calls[0].id) == 9


def test_n_answers_and_logprobs(client: OpenAI, llm: LLM) -> None:
    use(llm, HERMES)
    answer = ask(client, n=3, tool_choice=NAMED, logprobs=True, extra_body={"return_token_ids": True})
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3
    for choice in answer.choices:
        assert len(choice.logprobs.content) == len(choice.model_extra["token_ids"])


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=lambda form: form.name)
def test_a_call_or_an_object_in_the_requested_form(client: OpenAI, llm: LLM, form: CallForm) -> None:
    use(llm, form)
    schema = arguments(sky={"enum": ["blue", "grey"]})
    wanted = {"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}}
    call = ask(client, response_format=wanted, logit_bias=bias_to_call(llm, form), parallel_tool_calls=False)
    assert len(calls_of(call)) == 1
    text = ask(client, response_format=wanted, logit_bias={str(llm.tokenizer.encode("{")[0]): 60})
    jsonschema_rs.validate(schema, json.loads(text.choices[0].message.content))
    assert (text.choices[0].message.tool_calls, text.choices[0].finish_reason) == (None, "stop")
    assert calls_of(ask(client, response_format=wanted, tool_choice=NAMED))
    use(llm, LLAMA)
    with pytest.raises(openai.BadRequestError, match="cannot be combined with tools"):
        ask(client, response_format=wanted)


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: int


def test_tools_made_of_models(client: OpenAI, llm: LLM) -> None:
    """The client's own: a strict schema of a pydantic model, and arguments parsed by it."""
    use(llm, HERMES)
    answer = client.chat.completions.parse(
        model="any", messages=HELLO, tools=[openai.pydantic_function_tool(Trip)], tool_choice="required", seed=5,
        max_tokens=200, parallel_tool_calls=False,
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.tool_calls[0].function.parsed_arguments, Trip)


def test_a_stop_string_that_cuts_a_call_off_is_no_call(client: OpenAI, llm: LLM) -> None:
    use(llm, HERMES)
    for stop, finish in (('"city"', "stop"), ("</tool_call>", "tool_calls")):
        choice = ask(client, tool_choice=NAMED, stop=stop).choices[0]
        assert choice.finish_reason == finish
        assert choice.message.tool_calls[0].function.arguments.startswith("{")


# ---------------------------------------------------------------- refusals

CALLED = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]}  # fmt: skip


def called(arguments_: str) -> dict[str, Any]:
    call = {"id": "a", "type": "function", "function": {"name": "clock", "arguments": arguments_}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = arguments(a=schema)
    return schema


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, "tools.0.function", "tools.0.function is missing; it must be given."),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function'"),
    ({"tools": "clock"}, "tools", "tools is a text, but it must be a list."),
    ({"tools": [tool("two words")]}, "tools.0.function.name", "does not match"),
    ({"tools": [tool("x" * 65)]}, "tools.0.function.name", "does not match"),
    ({"tools": [tool("x", {"type": "string"})]}, "tools.0.function.parameters", "a schema of type object"),
    ({"tools": [tool("x", parameters=[1])]}, "tools.0.function.parameters", "is a list, but it must be an object"),
    ({"tools": [CLOCK, CLOCK]}, "tools", "Two tools have the same name"),
    ({"tools": [tool(f"t{i}") for i in range(129)]}, "tools", "at most 128 entries"),
    ({"tools": [tool("x", deep(13))]}, "tools.0.function.parameters", "nested deeper than 24 levels"),
    ({"tools": [tool("x", arguments(a={"enum": list(range(5000))}))]}, "tools.0.function.parameters", "4096 parts"),
    ({"tools": [tool("x", arguments(a={"const": "x" * 70_000}))]}, "tools.0.function.parameters", "65536 characters"),
    ({"tools": [tool(f"t{i}", arguments(a={"const": "x" * 9000})) for i in range(9)]}, "tools", "65536 characters"),
    ({"tools": [tool("x", arguments(a={"pattern": "(a|b"}))]}, "tools.0.function.parameters", "unclosed group"),
    ({"tools": [tool("x", arguments(a={"pattern": "((a{99}){99}){99}"}))]}, "tools.0.function.parameters", "10000"),
    ({"tools": [tool("x", arguments(a={"$ref": "http://a/b"}))]}, "tools.0.function.parameters", "not present"),
    ({"tools": [tool("x", arguments(a=False))]}, "tools.0.function.parameters", "nsatisfiable"),
    ({"tools": [tool("x", arguments(a={"not": {}}), strict=True)]}, "tools.0.function.parameters", "Unimplemented"),
    ({"tool_choice": "always"}, "tool_choice", "must be 'none', 'auto' or 'required'"),
    ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice", "is not one of tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "tool_choice needs tools."),
    ({"extra_body": {"guided_regex": "a"}}, "None", "Only one of tools, guided_regex and guided_grammar"),
    ({"response_format": {"type": "poem"}}, "response_format", "There is no response format"),
    ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id", "is not the id of a call"),
    ({"messages": [*HELLO, CALLED, {"role": "tool", "content": "x", "tool_call_id": "b"}]}, "messages.2.tool_call_id",
     "is not the id of a call"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": CALLED["tool_calls"]}]}, "messages.0.tool_calls",
     "only the assistant calls tools"),
    ({"messages": [*HELLO, called("{")]}, "messages.1.tool_calls.0.function.arguments", "the text of a JSON object"),
    ({"messages": [*HELLO, called("[1]")]}, "messages.1.tool_calls.0.function.arguments", "the text of a JSON object"),
    ({"messages": [*HELLO, called('{"a":' * 980 + "1" + "}" * 980)]}, "None", "plain JSON values"),
    ({"tools": [tool(f"t{i}", arguments(a={"enum": [f"{i}.{j}" for j in range(3000)]})) for i in range(60)]}, "tools",
     "65536 characters"),
    ({"messages": [*HELLO, called("[" * 100_000)]}, "messages.1.tool_calls.0.function.arguments", "JSON object"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "'assistant' or 'tool'"),
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("body", "param", "sentence"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_gets_a_sentence_at_once(
    client: OpenAI, llm: LLM, body: dict[str, Any], param: str, sentence: str
) -> None:
    use(llm, HERMES)
    began = time.monotonic()
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **body)
    assert time.monotonic() - began < 2.0
    error = refused.value.body
    assert str(error["param"]) == param
    assert sentence in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 600


def test_a_template_in_an_unknown_form_is_refused(client: OpenAI, llm: LLM) -> None:
    llm.tokenizer.chat_template, llm.tokenizer._template = "{{ tools }} in runes", None
    with pytest.raises(openai.BadRequestError, match="a form that Outrider does not know"):
        ask(client)


def test_a_template_may_refuse_a_conversation(client: OpenAI, llm: LLM) -> None:
    use(llm, LLAMA)
    two = CALLED | {"tool_calls": [CALLED["tool_calls"][0] | {"id": id} for id in "ab"]}
    with pytest.raises(openai.BadRequestError, match="one call at a time"):
        ask(client, messages=[*HELLO, two])


def test_a_schema_that_never_ends_ends_with_the_limit(client: OpenAI, llm: LLM) -> None:
    use(llm, MISTRAL_NAMED)
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    answer = ask(client, tools=[tool("dig", endless)], tool_choice="required", max_tokens=24)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.tool_calls[0].function.arguments.startswith('{"a": {"a": {"a": ')


def test_many_tools_are_bounded_in_time(llm: LLM) -> None:
    use(llm, HERMES)
    rng, began = random.Random(1), time.monotonic()
    tools = tool_use([tool(f"f{i}", object_schema(rng)) for i in range(100)], "auto", True, llm.tokenizer)
    assert tools is not None
    assert llm.guide_for(tools.guide) is not None
    assert time.monotonic() - began < 2.0


# ---------------------------------------------------------------- generated schemas


@pytest.mark.parametrize("count", [3, pytest.param(1000, marks=pytest.mark.slow)])
def test_generated_schemas_are_kept_under_speculation(llm: LLM, count: int) -> None:
    """Arguments match every schema, texts equal plain ones, and forced tokens save passes."""
    from outrider import SamplingParams
    from outrider.models.tool_calls import CallReader

    rng, passes, ended = random.Random(24), {True: 0, False: 0}, 0
    for i in range(count):
        form = FORMS[i % len(FORMS)]
        use(llm, form)
        schema = object_schema(rng)
        tools = tool_use([tool("f", schema)], "required", False, llm.tokenizer)
        assert tools is not None
        params = SamplingParams(temperature=0.7, seed=i, max_tokens=120, guide=tools.guide)
        both = {on: llm.generate("the quick brown fox", params, speculate=on)[0] for on in (True, False)}
        assert both[True].token_ids == both[False].token_ids, schema
        for on, result in both.items():
            passes[on] += result.stats.passes
        if both[True].finish_reason == "stop":
            ended += 1
            ids = both[True].token_ids[:-1]
            stream = llm.tokenizer.stream(shown=tools.shown)
            (call,) = CallReader(form).push(stream.push(ids) + stream.flush()).calls
            jsonschema_rs.validate(schema, json.loads(call.arguments))
    assert ended > 0.9 * count
    assert passes[True] < 0.75 * passes[False]
    print(f"{count} schemas, {ended} ended: {passes[False]} passes plain, {passes[True]} with drafts")
