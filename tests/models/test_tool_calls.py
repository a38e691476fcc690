"""Forms of tool calls: the template decides, the grammar allows what the reader understands, splits do not matter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from outrider import ModelError
from outrider.engine.guides import guide_for, schema_term
from outrider.models.tokenizer import Tokenizer
from outrider.models.tool_calls import (
    FORMS,
    HERMES,
    LLAMA,
    MISTRAL,
    PHI,
    AnswerPart,
    CallForm,
    CallGrammar,
    CallReader,
    call_form,
    for_template,
)

from support import tiny
from support.examples import examples
from support.tools import ADDED, CLOCK, CONTROLS, TEMPLATES, WEATHER

ROME = ("weather", {"city": "Rome", "days": 3})
OSLO = ("clock", {"city": "Oslo"})
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


def read(form: CallForm, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls of an answer that arrives in pieces."""
    reader, text, calls = CallReader(form), "", dict[int, list[str]]()
    parts = [*map(reader.push, pieces), reader.finish()]
    for part in parts:
        text += part.content
        for call in part.calls:
            whole = calls.setdefault(call.index, ["", ""])
            assert not (call.name and whole[0])
            calls[call.index] = [whole[0] + call.name, whole[1] + call.arguments]
    assert list(calls) == list(range(reader.count))
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@every_form
def test_the_template_decides(form: CallForm) -> None:
    assert call_form(TEMPLATES[form]) == form


def test_templates_without_tools_and_with_unknown_ones() -> None:
    assert call_form(None) == call_form(tiny.TEMPLATE) == HERMES
    for template in ("{{ tools }} in runes", "{{ tools }} <tool_call><function=x>"):
        with pytest.raises(ModelError, match="a form that Outrider does not know"):
            call_form(template)


# ---------------------------------------------------------------- reading

NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True)
STRINGS = st.text(max_size=8) | st.sampled_from(
    ['}"', "\\", '{"name": "', "</tool_call>", "[TOOL_CALLS]", "\n", "é\\u"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(STRINGS, VALUES, max_size=3)), min_size=1, max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> tuple[CallForm, str, list[tuple[str, Any]], list[str]]:
    """An answer in a form: its text before the calls, the calls, and all of it in pieces."""
    form, calls = draw(st.sampled_from(FORMS)), draw(st.just([]) | CALLS)
    calls = calls if form.several else calls[:1]
    text = draw(
        st.text(max_size=12) | st.sampled_from(["Let me see: ", "<tool", "[TOOL_CALLS", '{"nam', "a <tool_call"])
    )
    if form.marker in text if form.marker else calls or text[:1].isspace() or text[:1] == "{":
        text = ""
    whole = text + (form.spell(calls) if calls else "")
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    return form, text.rstrip() if calls else text, calls, pieces


@examples(200)
@given(answers())
def test_an_answer_is_read_however_it_is_split(answer: tuple[CallForm, str, list[tuple[str, Any]], list[str]]) -> None:
    form, text, calls, pieces = answer
    assert read(form, pieces) == (text, calls)
    assert read(form, list("".join(pieces))) == (text, calls)


@every_form
def test_arguments_stream_as_they_come(form: CallForm) -> None:
    reader, text = CallReader(form), form.spell([ROME])
    held = 0
    for i, character in enumerate(text):
        part = reader.push(character)
        held = 0 if part.content or part.calls else held + 1
        assert part.content == ""
        if '"city": "R' in text[:i] and '"Rome"' not in text[:i]:
            assert held == 0  # nothing of the arguments waits
    assert reader.finish() == AnswerPart()


def test_text_is_held_back_no_longer_than_it_may_begin_a_call() -> None:
    reader = CallReader(HERMES)
    assert [reader.push(text).content for text in ("Hello", " ", "<b>", " <tool", "s> x")] == ["Hello", "", " <b>", "",
                                                                                              " <tools> x"]  # fmt: skip
    assert CallReader(LLAMA).push("Hi {").content == "Hi {"
    unfinished = CallReader(HERMES)
    assert unfinished.push("ok <tool_c").content == "ok"
    assert unfinished.finish().content == " <tool_c"


def test_ids_have_the_length_that_a_template_wants() -> None:
    assert len(MISTRAL.new_id()) == 9
    assert MISTRAL.new_id().isalnum()
    assert HERMES.new_id() != HERMES.new_id()


# ---------------------------------------------------------------- grammar


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(tiny.save(tmp_path_factory.mktemp("tiny"), controls=CONTROLS, added=ADDED))


def complete(form: CallForm, tokenizer: Tokenizer, answer: str, **options: Any) -> bool:
    """Whether the grammar allows this answer, control tokens as one token each."""
    functions = {one["function"]["name"]: schema_term(one["function"]["parameters"]) for one in (WEATHER, CLOCK)}
    ids = {name: tokenizer.token_to_id(name) for name in form.controls}
    controls = {name: i for name, i in ids.items() if i is not None and tokenizer.is_special(i)}
    guide = guide_for({"grammar": str(CallGrammar(form, functions, controls, **options))}, tokenizer)
    assert guide is not None
    return guide.matcher().complete(tokenizer.encode(answer, special=True))


@every_form
def test_the_grammar_allows_what_the_reader_understands(form: CallForm, tokenizer: Tokenizer) -> None:
    def allows(answer: str, **options: Any) -> bool:
        return complete(form, tokenizer, answer, **options)

    one, two = form.spell([ROME]), form.spell([ROME, OSLO])
    for text in (True, False):
        assert allows(one, text=text)
        assert allows(two, text=text) == form.several
        assert not allows(two, text=text, several=False)
        assert allows("Just text.", text=text) == allows("", text=text) == text
        assert allows("See: " + one, text=text) == text
    assert not allows(one[:-1] if form.end + form.closing else one[:-2])
    assert not allows(form.spell([("weather", {"city": "Bern", "days": 3})]))
    assert not allows(form.spell([("weather", {"city": "Rome"})]))
    assert not allows(form.spell([("nobody", {})]))
    assert not allows(one + " and more")


def test_a_spelled_marker_binds_as_its_token_does(tokenizer: Tokenizer) -> None:
    """The letters of a control token cannot smuggle a call past its schema."""
    functions = {"clock": schema_term(CLOCK["function"]["parameters"])}
    controls = {name: i for name in MISTRAL.controls if (i := tokenizer.token_to_id(name)) is not None}
    guide = guide_for({"grammar": str(CallGrammar(MISTRAL, functions, controls))}, tokenizer)
    assert guide is not None
    good, bad = (MISTRAL.spell([("clock", {"city": city})]) for city in ("Rome", "Bern"))
    matcher = guide.matcher()
    assert matcher.complete(tokenizer.encode("x " + good))  # not special: letters
    assert not matcher.complete(tokenizer.encode("x " + bad))


# ---------------------------------------------------------------- templates

CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": {"city": "Rome"}}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "How late is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "noon", "tool_call_id": "abcdefghi"},
]


@every_form
def test_a_conversation_is_written_in_the_models_own_form(form: CallForm, tokenizer: Tokenizer) -> None:
    tokenizer.chat_template, tokenizer._template = TEMPLATES[form], None
    messages, tools = for_template(TURNS, [CLOCK], TEMPLATES[form])
    text = tokenizer.render_chat(messages, tools=tools)
    assert form.spell([("clock", {"city": "Rome"})]) in text
    assert "noon" in text
    assert '"does clock"' in text


def test_a_template_without_tools_gets_a_system_message(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template, tokenizer._template = tiny.TEMPLATE, None
    two = [*TURNS, {"role": "tool", "content": "five", "tool_call_id": "abcdefghi"}]
    messages, tools = for_template(two, [CLOCK], tiny.TEMPLATE)
    assert tools is None
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    text = tokenizer.render_chat(messages, tools=tools)
    assert HERMES.spell([("clock", {"city": "Rome"})]) in text
    assert "<tool_response>\nnoon\n</tool_response>\n<tool_response>\nfive\n</tool_response>" in text
    assert '"does clock"' in text
    own = [{"role": "system", "content": "Be brief."}, *TURNS]
    assert for_template(own, [CLOCK], tiny.TEMPLATE)[0][0]["content"].startswith("Be brief.\n\nYou can call")
    assert for_template(TURNS[:1], [], tiny.TEMPLATE) == (TURNS[:1], None)


def test_phis_template_gets_its_functions_in_the_system_message() -> None:
    (system, *rest), tools = for_template(TURNS[:1], [CLOCK], TEMPLATES[PHI])
    assert (json.loads(system["tools"]), rest, tools) == ([CLOCK["function"]], TURNS[:1], None)


def test_control_tokens_of_a_call_belong_to_the_text(tokenizer: Tokenizer) -> None:
    """With our tokenizer, and with one that only transformers runs."""
    transformers = pytest.importorskip("transformers")
    from outrider.models.foreign import SlowTokenizer

    hf = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._core, bos_token="<s>", eos_token="</s>")
    hf.add_special_tokens({"additional_special_tokens": list(CONTROLS)})
    marker, other = (tokenizer.token_to_id(text) for text in ("[TOOL_CALLS]", "<|tool_call|>"))
    assert marker is not None
    assert other is not None
    for each in (tokenizer, SlowTokenizer(hf)):
        ids = [*tokenizer.encode("a fox"), marker, other, *tokenizer.encode("{}")]
        assert each.stream(shown=frozenset({marker})).push(ids) == "a fox[TOOL_CALLS]{}"
        assert each.stream().push(ids) == "a fox{}"
