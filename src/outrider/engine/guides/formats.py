"""What form a text is asked to have, in everybody's spelling, checked before anything is compiled.

    {"type": "json_object"}                                                        OpenAI's response_format
    {"type": "json_schema", "json_schema": {"schema": {…}, "strict": true}}
    {"regex": "…"}   {"grammar": "…"} (Lark)   {"json": {…}}   {"choice": ["a", "b"]}
    the same four as guided_regex, guided_grammar, guided_json, guided_choice      vLLM's names

A schema or a pattern may come from a stranger: everything has a limit, and what exceeds one is refused with a sentence.
This file knows JSON and lengths; it knows neither tokens nor grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...errors import ConfigError

MOST_CHARACTERS = 64 * 1024  # of a schema or a grammar
MOST_DEPTH = 24  # of a schema's nesting
MOST_PARTS = 4096  # values in a schema, all told
MOST_PATTERN = 1024  # characters of a regular expression
MOST_REPEATS = 10_000  # of counted repetitions in one, nested ones multiplied
MOST_CHOICES = 1024

JSON_SCHEMA, REGEX, GRAMMAR = "json schema", "regex", "grammar"
_SPELLINGS = ("regex", "grammar", "json", "choice")
_PARTS = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+),?(\d*)\}|.)", re.DOTALL)  # an escape, a class, a count


class Format(NamedTuple):
    """A form, in one spelling: equal contents are equal."""

    kind: str  # JSON_SCHEMA, REGEX or GRAMMAR
    text: str
    lenient: bool = False  # keywords of a schema that are not understood are passed over


def format_of(asked: Mapping[str, Any] | Format | None) -> Format | None:
    """The form that is asked for; None where any text will do."""
    if asked is None or isinstance(asked, Format):
        return asked
    if not isinstance(asked, Mapping):
        raise ConfigError('A guide must be an object, such as {"type": "json_object"} or {"regex": "[a-z]+"}.')
    named = {name: asked[key] for name in _SPELLINGS for key in (name, f"guided_{name}") if asked.get(key) is not None}
    if len(named) + ("type" in asked) != 1:
        raise ConfigError(
            f"A guide must say one thing: either a 'type' (text, json_object, json_schema) or one of "
            f"{', '.join(_SPELLINGS)}."
        )
    if "type" in asked:
        return _response_format(asked)
    ((name, value),) = named.items()
    if name == "json":
        return _schema(value, lenient=False)
    if name == "choice":
        return _choice(value)
    return _regex(value) if name == "regex" else _grammar(value)


def _response_format(asked: Mapping[str, Any]) -> Format | None:
    kind = asked["type"]
    if kind == "text":
        return None
    if kind == "json_object":
        return _schema({"type": "object"}, lenient=False)
    if kind != "json_schema":
        raise ConfigError(f"There is no response format '{kind}'. Choose one of: text, json_object, json_schema.")
    inner = asked.get("json_schema")
    if not isinstance(inner, Mapping) or "schema" not in inner:
        raise ConfigError('A response format of type json_schema needs {"json_schema": {"schema": {…}}}.')
    return _schema(inner["schema"], lenient=not inner.get("strict"))


def _schema(asked: Any, lenient: bool) -> Format:
    """A JSON schema, as an object or as its text."""
    try:
        if isinstance(asked, str):
            _insist(len(asked) <= MOST_CHARACTERS, f"The JSON schema is longer than {MOST_CHARACTERS} characters")
            asked = json.loads(asked)
        _insist(isinstance(asked, Mapping), "The JSON schema is not an object", "give one such as {'type': 'object'}")
        _check_parts(asked)  # before it is written out: nobody nests deeper than Python can write
        known = {name: value for name, value in asked.items() if name != "x-guidance"}  # no settings from strangers
        text = json.dumps(known, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"The JSON schema is not JSON: {error}.") from error
    _insist(len(text) <= MOST_CHARACTERS, f"The JSON schema is longer than {MOST_CHARACTERS} characters")
    return Format(JSON_SCHEMA, text, lenient)


def _check_parts(schema: Any) -> None:
    for count, (depth, key, value) in enumerate(_parts(schema), start=1):
        _insist(depth <= MOST_DEPTH, f"The JSON schema is nested deeper than {MOST_DEPTH} levels", "flatten it")
        _insist(count <= MOST_PARTS, f"The JSON schema has more than {MOST_PARTS} parts")
        if key == "pattern" and isinstance(value, str):
            _check_pattern(value)
        elif key == "patternProperties" and isinstance(value, Mapping):
            for pattern in value:
                _check_pattern(str(pattern))


def _parts(schema: Any) -> Iterator[tuple[int, str, Any]]:
    """Every value in a schema, with its depth and its key, outermost first."""
    open_: list[tuple[int, str, Any]] = [(1, "", schema)]
    while open_:
        depth, key, value = open_.pop()
        yield depth, key, value
        if isinstance(value, Mapping):
            open_ += [(depth + 1, str(name), inner) for name, inner in value.items()]
        elif isinstance(value, list | tuple):
            open_ += [(depth + 1, "", inner) for inner in value]


def _regex(pattern: Any) -> Format:
    _insist(isinstance(pattern, str) and pattern, "The regular expression is not a text of at least one character")
    _check_pattern(pattern)
    return Format(REGEX, pattern)


def _check_pattern(pattern: str) -> None:
    _insist(len(pattern) <= MOST_PATTERN, f"A regular expression is longer than {MOST_PATTERN} characters")
    _insist(
        _repeats(pattern) <= MOST_REPEATS,
        f"A regular expression counts up to more than {MOST_REPEATS} repetitions",
        "use + or *",
    )


def _repeats(pattern: str) -> int:
    """How large a pattern is when its counted repetitions are written out; nested ones multiply."""
    sizes, last = [0], 0  # of each open group so far; of the latest part in the innermost
    for part, low, high in _PARTS.findall(pattern):
        if part == "(":
            sizes, last = [*sizes, 0], 0
            continue
        if part == ")" and len(sizes) > 1:
            last = sizes.pop()
        elif low or high:  # the latest part so often, once of which is counted already
            more = last * (max(int(low[:9] or 0), int(high[:9] or 0), 1) - 1)
            sizes[-1], last = sizes[-1] + more, last + more
            continue
        else:
            last = 1
        sizes[-1] += last
    return sum(sizes)


def _grammar(text: Any) -> Format:
    _insist(isinstance(text, str) and text.strip(), "The grammar is not a text of at least one rule")
    _insist(len(text) <= MOST_CHARACTERS, f"The grammar is longer than {MOST_CHARACTERS} characters")
    return Format(GRAMMAR, text)


def _choice(choices: Any) -> Format:
    several = isinstance(choices, list | tuple) and choices and all(isinstance(c, str) and c for c in choices)
    _insist(several, "The choices are not a list of texts", 'give one such as ["yes", "no"]')
    _insist(len(choices) <= MOST_CHOICES, f"There are more than {MOST_CHOICES} choices")
    spelled = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices))
    return _grammar(f"start: {spelled}")


def _insist(condition: Any, complaint: str, repair: str = "make it smaller") -> None:
    if not condition:
        raise ConfigError(f"{complaint}; {repair}.")
