"""Tools, templates that write calls in each form, and schemas of arguments, at random."""

from __future__ import annotations

import json
import random
from typing import Any

from outrider.models.tool_calls import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, MISTRAL_SPACED, PHI, CallForm

Json = dict[str, Any]
CONTROLS = ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>")
ADDED = ("<tool_call>", "</tool_call>")  # tokens of ordinary text, as in Qwen's vocabulary


def tool(name: str, parameters: Json | None = None, **more: Any) -> Json:
    function = {"name": name, "description": f"does {name}"} | ({"parameters": parameters} if parameters else {})
    return {"type": "function", "function": function | more}


def arguments(**properties: Any) -> Json:
    """A schema of an object with all of these and nothing else."""
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


WEATHER = tool("weather", arguments(city={"enum": ["Rome", "Oslo"]}, days={"type": "integer", "maximum": 9}))
CLOCK = tool("clock", arguments(city={"enum": ["Rome", "Oslo"]}))

_HEAD = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_TAIL = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _template(calls: str, head: str = _HEAD) -> str:
    message = "<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}" + calls + "{% endif %}<|im_end|>\n"
    return head + "{% for m in messages %}" + message + "{% endfor %}" + _TAIL


def _each(form: CallForm) -> str:
    """The calls of a message, each in this form."""
    one = form.before_name + "{{ c.function.name }}" + form.before_arguments + "{{ c.function.arguments | tojson }}"
    between = "{% if not loop.last %}{{ " + json.dumps(form.between) + " }}{% endif %}"
    listed = "{% for c in m.tool_calls %}" + one + form.end + between + "{% endfor %}"
    return form.opening + listed + form.closing


_ONE_CALL = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
TEMPLATES = {
    HERMES: _template(_each(HERMES)),
    LLAMA: _template(_ONE_CALL + _each(LLAMA)),
    MISTRAL_SPACED: _template(_each(MISTRAL_SPACED)),
    MISTRAL: _template(_each(MISTRAL)),
    MISTRAL_NAMED: _template(_each(MISTRAL_NAMED)),
    PHI: "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message['content'] }}"
    "{% if 'tools' in message %}<|tool|>{{ message['tools'] }}<|/tool|>{% endif %}<|im_end|>\n{% endfor %}" + _TAIL,
}


def schema(rng: random.Random, depth: int = 0) -> Json:
    """A JSON schema whose values are short."""
    kinds = ["enum", "integer", "boolean", "string", "const", "pattern", "null"]
    if depth < 2:
        kinds += ["array", "object", "anyOf"]
    kind = rng.choice(kinds)
    if kind == "enum":
        return {"enum": rng.sample(["red", "green", 1, 2.5, None, True, "blue and green", "é"], rng.randint(1, 4))}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 8)}
    if kind == "const":
        return {"const": rng.choice(["a constant", 7, ["x", 1], {"k": False}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-f0-9]{8}$", "^(on|off)$", r"^v[0-9]{1,2}\.x$"])}
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth + 1), "minItems": rng.randint(0, 1), "maxItems": 2}
    if kind == "object":
        return object_schema(rng, depth + 1)
    if kind == "anyOf":
        return {"anyOf": [schema(rng, depth + 1), schema(rng, depth + 1)]}
    return {"type": kind}


def object_schema(rng: random.Random, depth: int = 0) -> Json:
    names = rng.sample(["city", "days", "unit", "a b", "id", "größe", "note", "x"], rng.randint(0, 4))
    form = arguments(**{name: schema(rng, depth) for name in names})
    return form | {"required": [name for name in names if rng.random() < 0.8]}
