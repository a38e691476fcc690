"""Chat templates: a model's own jinja2 program, run in a sandbox over plain data.

Promise: a template sees the messages as JSON values and can reach nothing else, and whatever it does wrong becomes a
sentence. The environment is the one `transformers` gives to templates. This file knows text, not tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import ModelError


class _Refusal(TemplateError):
    """The template's own `raise_exception`: it does not accept these messages."""


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Names(Namespace):
    """Templates keep variables in namespaces; names that Python gives a meaning to are not for them."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # jinja2's own trick: `self` may be a variable
        Namespace.__init__(args[0], {_Names._plain(k): v for k, v in dict(*args[1:], **kwargs).items()})

    def __setitem__(self, name: str, value: Any) -> None:
        Namespace.__setitem__(self, _Names._plain(name), value)

    @staticmethod
    def _plain(name: str) -> str:
        if name.startswith("_"):
            raise SecurityError(f"the name {name!r} is not allowed in a namespace")
        return name


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """jinja2's own filter escapes HTML; a model was not trained on that."""
    known = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **known)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2 renders a forbidden attribute as nothing when it is only printed; here reaching for it is an error."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["namespace"] = _Names
    return environment


class ChatTemplate:
    """A compiled template: `render` turns messages into the text the model was trained on."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)  # bos_token, eos_token
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ModelError(f"The model's chat template is broken: {error.message} (line {error.lineno}).") from error

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **extra: Any) -> str:
        values: dict[str, Any] = {"tools": None, "documents": None, **self._tokens, **_plain(extra)}
        values |= {"messages": _plain(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values)
        except _Refusal as error:
            raise ModelError(f"The model's chat template does not accept these messages: {error.message}.") from error
        except SecurityError as error:
            raise ModelError(f"The model's chat template tried something that is not allowed: {error}.") from error
        except Exception as error:  # a template is a program: it can fail in any way a program can
            raise ModelError(f"The model's chat template failed on these messages: {error}.") from error


def _plain(value: Any) -> Any:
    """Rebuilt from JSON, so that a template meets no object with methods of its own."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise ModelError(f"Chat messages must be plain JSON values: {error}.") from error
