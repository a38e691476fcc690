"""The API's reference as a page: endpoints and fields out of the OpenAPI schema, without scripts or other servers.

It shows what `/openapi.json` says and nothing else, so that it cannot be wrong about a field.
"""

from __future__ import annotations

from html import escape
from typing import Any

Json = dict[str, Any]
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Outrider: the API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="web/page.css">
</head>
<body>
<header class="top"><p class="wordmark">Outrider</p><nav class="tabs" aria-label="Pages"><a href="web/">The page</a>
<a href="openapi.json">openapi.json</a></nav></header>
<main>
<div class="intro"><h1>The API</h1><p>Errors are {error}.</p></div>
{endpoints}
</main>
</body>
</html>
"""
HUGE = 10**6  # a bound that nobody meets is not shown
_ERROR = '<code>{"error": {"message", "type", "param", "code"}}</code>'


def reference(schema: Json) -> str:
    """The page for an OpenAPI schema."""
    models = schema.get("components", {}).get("schemas", {})
    endpoints = [
        _endpoint(method.upper(), path, operation, models)
        for path, methods in schema["paths"].items()
        for method, operation in methods.items()
    ]
    return _PAGE.replace("{error}", _ERROR).replace("{endpoints}", "\n".join(endpoints))


def _endpoint(method: str, path: str, operation: Json, models: Json) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    fields = _fields(body, models) if body else ""
    summary = escape(operation.get("summary", ""))
    return f'<section class="panel"><h2><code>{method} {escape(path)}</code></h2><p>{summary}</p>{fields}</section>'


def _fields(body: Json, models: Json) -> str:
    """A table of a body's fields, those of its inner objects below it."""
    tables, waiting, seen = [], [("", body)], set[str]()
    while waiting:
        title, schema = waiting.pop(0)
        name = schema.get("$ref", "").rpartition("/")[2]
        if name in seen or name not in models:
            continue
        seen.add(name)
        model = models[name]
        needed = model.get("required", ())
        fields = sorted(model["properties"].items(), key=lambda field: field[0] not in needed)
        rows = [_row(field, inner, field in needed) for field, inner in fields]
        about = f"<p class='note'>{escape(model['description'])}</p>" if "description" in model else ""
        head = "<thead><tr><th scope='col'>field</th><th scope='col'>type</th><th scope='col'>meaning</th></tr></thead>"
        table = f"<table class='reference'>{head}<tbody>{''.join(rows)}</tbody></table>"
        tables.append((f"<h3>{escape(title)}</h3>" if title else "") + about + table)
        waiting += [(inner.rpartition("/")[2], {"$ref": inner}) for inner in _references(model["properties"])]
    return "".join(tables)


def _row(name: str, schema: Json, required: bool) -> str:
    about = escape(schema.get("description", ""))
    bold = f"<strong>{escape(name)}</strong>" if required else escape(name)
    return f"<tr><td><code>{bold}</code></td><td>{escape(_type(schema))}</td><td>{about}</td></tr>"


def _type(schema: Json) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "const" in schema or "enum" in schema:
        return " or ".join(repr(value) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        kinds = (_type(each) for each in schema["anyOf"] if each.get("type") != "null")
        return " or ".join(dict.fromkeys(kinds)) or "null"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxLength": "length ≤"}
    limits = [f"{sign} {schema[key]:g}" for key, sign in bounds.items() if abs(schema.get(key, HUGE)) < HUGE]
    return " ".join([str(schema.get("type", "any")), *limits])


def _references(value: Any) -> list[str]:
    """Every model that these schemas name, in order."""
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [name for inner in value.values() for name in _references(inner)]
    if isinstance(value, list):
        return [name for inner in value for name in _references(inner)]
    return []
