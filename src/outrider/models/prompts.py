"""Prompts for `verify` and the benchmarks: bundled ones of seven categories, or a file in Spec-Bench's format."""

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
    """The prompts that come with Outrider; categories alternate, so that any number of leading prompts is mixed."""
    text = (files("outrider.models") / "prompts.jsonl").read_text(encoding="utf-8")
    prompts = [_prompt(line, "the bundled prompts") for line in text.splitlines()]
    categories = dict.fromkeys(p.category for p in prompts)
    by_category = [[p for p in prompts if p.category == category] for category in categories]
    return [p for group in zip(*by_category, strict=True) for p in group]


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


def _prompt(line: str, file: str) -> Prompt:
    try:
        record = json.loads(line)
        text = record["turns"][0] if "turns" in record else record.get("prompt") or record["text"]
        return Prompt(str(text), str(record.get("category", "all")))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise OutriderError(
            f"A line of {file} is not a prompt: it needs a JSON object with 'turns', 'prompt' or 'text'."
        ) from error
