"""Benchmarks import names that exist, inside functions too: many of them run on machines that tests never see."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
DEVICE_ONLY = "outrider.backends.cuda"  # imports triton


def imported(path: Path) -> set[tuple[str, str]]:
    """(module, name) of every `from outrider… import name`."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("outrider")]
    return {(node.module or "", name.name) for node in found for name in node.names}


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.py")), ids=lambda path: path.stem)
def test_every_imported_name_exists(path: Path) -> None:
    for module, name in imported(path):
        if module.startswith(DEVICE_ONLY):
            importlib.import_module("support.kernels")  # before triton; skips without it
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"
