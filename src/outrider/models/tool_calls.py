"""How tools are put into a prompt and how a model writes calls of them: the form, its grammar, the reader of its text.

A chat template decides the form: Hermes and Qwen, Llama 3, Mistral (three versions) and Phi. A model whose template
knows no tools gets them in a system message, and the model answers in the Hermes form.

Promise: `CallGrammar` allows exactly the texts that `CallReader` understands, so that a guided answer is text, then
calls, and nothing else. The reader gives the same parts however the text is split, and holds back only what may still
become the beginning of a call. It knows text and templates; it knows neither HTTP nor tokens' probabilities.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ModelError

Json = dict[str, Any]
Call = tuple[str, Mapping[str, Any]]  # a function's name and its arguments
_JSON_PART = re.compile(r'[{}"\\]')


@dataclass(frozen=True)
class CallForm:
    """A spelling of calls: `opening`, `before_name` NAME `before_arguments` ARGUMENTS `end` for each, `closing`."""

    name: str
    marker: str = ""  # begins calls after other text; empty: an answer is text, or calls from its first character on
    opening: str = ""
    before_name: str = '{"name": "'
    before_arguments: str = '", "arguments": '
    end: str = "}"
    between: str = ", "
    closing: str = ""
    several: bool = True  # whether one answer may have several calls
    controls: tuple[str, ...] = ()  # parts that a vocabulary may have as control tokens
    id_length: int = 0  # the length that the template wants a call's id to have; 0: any

    @property
    def start(self) -> str:
        """What is before the name of the first call."""
        return self.opening + self.before_name

    def spell(self, calls: Iterable[Call]) -> str:
        """Calls as the model would write them."""
        each = [
            self.before_name + name + self.before_arguments + json.dumps(arguments, ensure_ascii=False) + self.end
            for name, arguments in calls
        ]
        return self.opening + self.between.join(each) + self.closing

    def new_id(self) -> str:
        return secrets.token_hex(8)[: self.id_length] if self.id_length else f"call_{secrets.token_hex(12)}"


HERMES = CallForm(
    "hermes", "<tool_call>", before_name='<tool_call>\n{"name": "', end="}\n</tool_call>", between="\n",
    controls=("<tool_call>", "</tool_call>"),
)  # fmt: skip
LLAMA = CallForm("llama3", before_arguments='", "parameters": ', several=False)
_MISTRAL: Json = {"marker": "[TOOL_CALLS]", "controls": ("[TOOL_CALLS]", "[ARGS]"), "id_length": 9}
MISTRAL_SPACED = CallForm("mistral spaced", opening="[TOOL_CALLS] [", closing="]", **_MISTRAL)
MISTRAL = CallForm("mistral", opening="[TOOL_CALLS][", closing="]", **_MISTRAL)
MISTRAL_NAMED = CallForm(
    "mistral named", before_name="[TOOL_CALLS]", before_arguments="[ARGS]", end="", between="", **_MISTRAL
)
PHI = CallForm(
    "phi", "<|tool_call|>", opening="<|tool_call|>[", closing="]<|/tool_call|>",
    controls=("<|tool_call|>", "<|/tool_call|>"),
)  # fmt: skip
_BY_TEMPLATE = (  # the first whose text is in the template
    ("<function=", None),  # a form of XML, of which Outrider has no grammar
    ("[ARGS]", MISTRAL_NAMED),
    ("[TOOL_CALLS] [", MISTRAL_SPACED),
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|tool|>", PHI),
    ('"parameters": ', LLAMA),
)
FORMS = (HERMES, LLAMA, MISTRAL_SPACED, MISTRAL, MISTRAL_NAMED, PHI)


def call_form(template: str | None) -> CallForm:
    """The form in which a model with this chat template writes calls."""
    template = template or ""
    if "tools" not in template:
        return HERMES
    form = next((form for text, form in _BY_TEMPLATE if text in template), None)
    if form is None:
        raise ModelError(
            "The model's chat template writes tool calls in a form that Outrider does not know; "
            "it knows those of Hermes and Qwen, Llama 3, Mistral and Phi. Leave out tools."
        )
    return form


# ------------------------------------------------------------ what the template gets

_INSTRUCTIONS = """You can call functions. To call one, answer with its name and its arguments in this form:
{example}

These are the functions, with JSON schemas of their arguments:
{functions}"""


def for_template(messages: list[Json], tools: list[Json], template: str | None) -> tuple[list[Json], list[Json] | None]:
    """Messages and tools, both as OpenAI has them with arguments as objects, as this template takes them."""
    template, form = template or "", call_form(template)
    if "tool_calls" not in template:
        messages = [_with_calls_in_text(message, form) for message in messages]
    if "tools" not in template:
        return _introduced(_results_as_users(messages), tools, form), None
    if tools and re.search(r"message(\['tools'\]|\.tools)", template):  # Phi's: functions in the system message
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        head, rest = _system(messages)
        return [head | {"tools": functions}, *rest], None
    return messages, tools or None


def _with_calls_in_text(message: Json, form: CallForm) -> Json:
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    content = "\n".join(filter(None, (message["content"], form.spell(calls))))
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}


def _results_as_users(messages: list[Json]) -> list[Json]:
    """Results of calls as messages of the user; adjacent ones become one message."""
    converted: list[Json] = []
    for before, message in zip([{}, *messages], messages, strict=False):
        if message["role"] != "tool":
            converted.append(message)
            continue
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        if before.get("role") == "tool":
            converted[-1] = converted[-1] | {"content": f"{converted[-1]['content']}\n{text}"}
        else:
            converted.append({"role": "user", "content": text})
    return converted


def _introduced(messages: list[Json], tools: list[Json], form: CallForm) -> list[Json]:
    if not tools:
        return messages
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(example=form.spell([("NAME", {"ARGUMENT": "VALUE"})]), functions=functions)
    head, rest = _system(messages)
    return [head | {"content": "\n\n".join(filter(None, (head["content"], text)))}, *rest]


def _system(messages: list[Json]) -> tuple[Json, list[Json]]:
    """The system message, an empty one where there is none, and the others."""
    if messages and messages[0]["role"] == "system":
        return messages[0], messages[1:]
    return {"role": "system", "content": ""}, messages


# ------------------------------------------------------------ grammar


@dataclass(frozen=True)
class CallGrammar:
    """A Lark grammar of answers in a form. `functions`: name -> a grammar's term for its arguments."""

    form: CallForm
    functions: Mapping[str, str]
    controls: Mapping[str, int]  # those of the form's controls that are control tokens of the vocabulary
    text: bool = True  # the answer may be, or begin with, text
    several: bool = True
    whole_text: str = ""  # a term for an answer without calls, which then has this form and no text before calls

    def __str__(self) -> str:
        form, marker = self.form, self.form.marker
        after = [self._literal(form.start.removeprefix(marker)), "call"]
        if self.several and form.several:
            after.append(f"({self._literal(form.between + form.before_name)} call)*")
        rules = [f"after: {' '.join([*after, self._literal(form.closing)])}"]
        rules += [f"start: {self._begin()}", f"call: {' | '.join(f'call{i}' for i in range(len(self.functions)))}"]
        for i, (name, arguments) in enumerate(self.functions.items()):
            head, end = self._literal(name + form.before_arguments), self._literal(form.end)
            rules.append(f"call{i}: {head} {arguments} {end}")
        return "\n".join([*rules, *self._text_rules()])

    def _begin(self) -> str:
        calls = f"{self._literal(self.form.marker)} after"
        if not self.text:
            return calls
        if self.whole_text:
            return f"{self.whole_text} | {calls}"
        return "TEXT | head after" if self.form.marker else "TEXT? | after"

    def _text_rules(self) -> Iterator[str]:
        """Text ends at the first marker, spelled by a control token or by others."""
        marker = self.form.marker
        if not self.text or self.whole_text:
            return
        if not marker:
            yield r"TEXT: /[^{\s](.|\n)*/"
            return
        yield r"TEXT: /(.|\n)*/"
        yield f"head: spelled | TEXT <[{self.controls[marker]}]>" if marker in self.controls else "head: spelled"
        yield f"spelled[lazy]: TEXT {json.dumps(marker)}"

    def _literal(self, text: str) -> str:
        """Terms for this text; control tokens in it by their ids."""
        parts = re.split("(" + "|".join(map(re.escape, self.controls)) + ")", text) if self.controls else [text]
        terms = (f"<[{self.controls[part]}]>" if part in self.controls else json.dumps(part) for part in parts if part)
        return " ".join(terms)


# ------------------------------------------------------------ reading


@dataclass
class CallPart:
    """What was added to one call: its id and name once, then its arguments in pieces."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class AnswerPart:
    """What a text has added to an answer."""

    content: str = ""
    calls: list[CallPart] = field(default_factory=list)


class CallReader:
    """Splits an answer in one form, as it arrives, into text and calls."""

    def __init__(self, form: CallForm) -> None:
        self.form, self.count = form, 0  # calls so far
        self._state, self._held = self._read_text, ""
        self._depth, self._quoted = 0, False  # in the arguments

    def push(self, text: str) -> AnswerPart:
        self._held += text
        part = AnswerPart()
        while self._state(part):
            pass
        return part

    def finish(self) -> AnswerPart:
        """The answer has ended: release text that was held back."""
        part = AnswerPart(self._held if self._state in (self._read_text, self._read_rest) else "")
        self._held = ""
        return part

    @property
    def unfinished(self) -> bool:
        """Whether the text has ended, so far, in the middle of a call."""
        return self._state in (self._read_name, self._read_arguments)

    # Each state takes what it can from the held text, and returns whether another state may go on.

    def _read_text(self, part: AnswerPart) -> bool:
        """Text, up to the beginning of the first call; spaces before that belong to neither."""
        start, held = self.form.start, self._held
        at = held.find(start) if self.form.marker else (0 if held.startswith(start) else -1)
        if at >= 0:
            part.content += held[:at].rstrip()
            self._held, self._state = held[at + len(start) :], self._read_name
            return True
        if not self.form.marker and held and not start.startswith(held):
            self._state = self._read_rest
            return True
        certain = len(held) - _overlap(held, start)
        certain = len(held[:certain].rstrip()) if self.form.marker else 0
        part.content, self._held = part.content + held[:certain], held[certain:]
        return False

    def _read_rest(self, part: AnswerPart) -> bool:
        part.content, self._held = part.content + self._held, ""
        return False

    def _read_name(self, part: AnswerPart) -> bool:
        name, found, rest = self._held.partition(self.form.before_arguments)
        if not found:
            return False
        part.calls.append(CallPart(self.count, self.form.new_id(), name))
        self.count += 1
        self._held, self._state, self._depth, self._quoted = rest, self._read_arguments, 0, False
        return True

    def _read_arguments(self, part: AnswerPart) -> bool:
        """A JSON object, up to its closing brace."""
        end = self._object_end()
        taken = self._held[:end]
        if taken and (not part.calls or part.calls[-1].index != self.count - 1):
            part.calls.append(CallPart(self.count - 1))
        if taken:
            part.calls[-1].arguments += taken
        self._held = self._held[len(taken) :]
        if self._depth or not taken:
            return False
        self._state = self._read_gap
        return True

    def _object_end(self) -> int:
        """How much of the held text belongs to the object; an escape whose character is missing waits."""
        at, held = 0, self._held
        while found := _JSON_PART.search(held, at):
            at, mark = found.end(), found.group()
            if mark == "\\":
                if at == len(held):
                    return at - 1
                at += 1
            elif mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if mark == "{" else -1
                if not self._depth:
                    return at
        return len(held)

    def _read_gap(self, part: AnswerPart) -> bool:
        """What is between two calls, or after the last one."""
        _, found, rest = self._held.partition(self.form.before_name)
        if found:
            self._held, self._state = rest, self._read_name
        return bool(found)


def _overlap(text: str, start: str) -> int:
    """Length of the longest end of the text that begins `start`."""
    lengths = range(min(len(text), len(start) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(start[:n])), 0)
