"""Prompts for `verify` and the benchmarks: seven kinds of text of our own, or a file in Spec-Bench's form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..errors import OutriderError


@dataclass(frozen=True)
class Prompt:
    text: str
    category: str


def bundled() -> list[Prompt]:
    """The prompts that come with Outrider, kinds alternating so that any number of them is mixed."""
    text = (files("outrider.models") / "prompts.jsonl").read_text(encoding="utf-8")
    every = [_prompt(line, "the bundled prompts") for line in text.splitlines()]
    kinds = list(dict.fromkeys(p.category for p in every))
    by_kind = [[p for p in every if p.category == kind] for kind in kinds]
    return [p for group in zip(*by_kind, strict=True) for p in group]


def from_file(path: Path | str) -> list[Prompt]:
    """One JSON object per line with `turns` (Spec-Bench), `prompt` or `text`, and perhaps `category`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"The prompts in {path} cannot be read: {error}.") from error
    prompts = [_prompt(line, str(path)) for line in lines if line.strip()]
    if not prompts:
        raise OutriderError(f"{path} has no prompts in it.")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
        text = record["turns"][0] if "turns" in record else record.get("prompt") or record["text"]
        return Prompt(str(text), str(record.get("category", "all")))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise OutriderError(
            f"A line of {where} is not a prompt: it needs a JSON object with 'turns', 'prompt' or 'text'."
        ) from error
