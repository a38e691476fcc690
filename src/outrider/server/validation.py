"""Sentences for what the request schema refuses: the field, what it got, and what it takes.

A text that a client sent is never repeated, and none of the schema library's own words are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ApiError, bad_request

Error = Mapping[str, Any]
_TAKES = {
    "string": "a text", "int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list",
    "dict": "an object", "model": "an object", "model_attributes": "an object",
}  # fmt: skip  # by the beginning of an error's type
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than"),
}  # fmt: skip
_ENTRIES, _CHARACTERS = ("entry", "entries"), ("character", "characters")
_LENGTHS = {
    "too_long": _ENTRIES, "too_short": _ENTRIES, "string_too_long": _CHARACTERS, "string_too_short": _CHARACTERS,
}  # fmt: skip
# A union adds the name of a branch to the path of a field: str, list[int], constrained-str, TextPart.
_BRANCH = re.compile(r"str|int|float|bool|none|dict|list|[A-Z]\w*|.*[\[\]-].*", re.DOTALL)


def validation_error(errors: Sequence[Error], fields: Sequence[str] = ()) -> ApiError:
    """From the list of what is wrong. `fields` are names that may have been meant."""
    if not errors or errors[0]["type"] in ("json_invalid", "model_attributes_type"):
        message = "The body is not a JSON object; send one with content-type application/json."
        return bad_request(message, None, "not_json")
    path, group = _most_specific(errors)
    name, error = ".".join(map(str, path)) or "The body", group[0]
    code = "unknown_parameter" if error["type"] == "extra_forbidden" else "invalid_value"
    return bad_request(_sentence(name, group, fields), name if path else None, code)


def _most_specific(errors: Sequence[Error]) -> tuple[list[str | int], list[Error]]:
    """Of the first wrong field: the deepest path, and what is wrong there, by branch of its union.

    Where one branch got the right kind of value with something else wrong, only that branch is reported.
    """
    paths = [_path(error) for error in errors]
    first = paths[0][:1]
    deepest = max((path for path in paths if path[:1] == first), key=len)
    group = [error for error, path in zip(errors, paths, strict=True) if path == deepest]
    return deepest, [error for error in group if not _is_type_error(error)] or group


def _path(error: Error) -> list[str | int]:
    *parts, last = error["loc"]
    named = error["type"] in ("extra_forbidden", "missing")  # then the last part is a name, whatever it looks like
    kept = [part for part in parts[1:] if isinstance(part, int) or not _BRANCH.fullmatch(part)]
    if last == "body" or not (named or isinstance(last, int) or not _BRANCH.fullmatch(last)):
        return kept
    return [*kept, last if isinstance(last, int) else last[:64]]


def _is_type_error(error: Error) -> bool:
    return str(error["type"]).endswith(("_type", "_parsing", "none_required"))


def _sentence(name: str, group: list[Error], fields: Sequence[str]) -> str:
    error = group[0]
    kind, context, got = str(error["type"]), error.get("ctx") or {}, _shown(error.get("input"))
    if kind == "missing":
        return f"{name} is missing; it must be given."
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(name, fields, 1)
        return f"There is no parameter {name}." + (f" Did you mean {close[0]}?" if close else "")
    if kind == "none_required" or (kind == "too_long" and context.get("max_length") == 0):
        return f"{name} is not supported: leave it out."
    if kind == "literal_error":
        expected = str(context["expected"]).replace("False", "false").replace("True", "true")
        return f"{name} is {got}, but it must be {expected}."
    if kind == "string_pattern_mismatch":
        return f"{name} is {got} that does not match {context['pattern']}."
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{name} is {got}, but it must be {words} {_shown(context[key])}."
    if kind in _LENGTHS:
        bound, limit = ("most", context.get("max_length")) if "long" in kind else ("least", context.get("min_length"))
        one, several = _LENGTHS[kind]
        return f"{name} must have at {bound} {limit} {one if limit == 1 else several}."
    if kind in ("int_from_float", "int_parsing_size"):
        return f"{name} is {got}, but it must be a whole number of at most 64 bits."
    if kind == "finite_number":
        return f"{name} must be a finite number."
    takes = list(dict.fromkeys(_takes(error) for error in group))
    return f"{name} is {got}, but it must be {' or '.join(takes)}."


def _takes(error: Error) -> str:
    kind = str(error["type"])
    return next((words for start, words in _TAKES.items() if kind.startswith(f"{start}_")), "something else")


def _shown(value: Any) -> str:
    """A number, or what kind of value it is."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"{value:.6g}" if isinstance(value, float) else str(value)[:24]
    return "a text" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"
