"""Metrics: every reason that is given for a step without a draft has a label."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType

from outrider.control import adaptive
from outrider.engine import step
from outrider.server import host, telemetry

TELLING = {"_pause", "_explain", "_expect"}  # methods that are given a part of a reason
EXPECTED = ast.Constant(" tokens expected")  # what `_expect` adds


def reasons(module: ModuleType) -> Iterator[str]:
    """The fixed words of all sentences that a module gives as reasons."""
    functions = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.FunctionDef)]
    for function in (each for each in functions if each.name not in TELLING):
        for node in ast.walk(function):
            for value in sentences(node, function.name):
                text = getattr(module, value.id, "") if isinstance(value, ast.Name) else words(value)
                if text.strip():
                    yield text


def sentences(node: ast.AST, function: str) -> list[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TELLING:
        return [ast.Tuple([node.args[0], EXPECTED])] if node.func.attr == "_expect" else [node.args[0]]
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("self.why", "why", "odds"):
        return [node.value.body, node.value.orelse] if isinstance(node.value, ast.IfExp) else [node.value]
    if isinstance(node, ast.Return) and node.value is not None and function in ("_reason", "_unplanned"):
        return [node.value]
    return []


def words(node: ast.AST) -> str:
    parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return " ".join(part for part in parts if isinstance(part, str))


def test_every_reason_has_a_label() -> None:
    found = {text: telemetry.reason_of(text) for module in (adaptive, step, host) for text in reasons(module)}
    assert [text for text, label in found.items() if label == "other"] == ["no step yet"]
    assert {label for _, label in telemetry.REASONS} == set(found.values()) - {"other"}
