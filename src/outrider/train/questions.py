"""Prompts from files in the forms that instruction data comes in, and which of them are held out.

Promise: the same files and seed give the same questions in the same order, each text once, kinds mixed; held-out ones
are never trained on. It knows files and texts; ids are the tokenizer's business, answers the target's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OutriderError
from ..models.prompts import Prompt

_MBPP_TEST = range(11, 511)  # task ids that MBPP's authors keep for testing
_MOST_HELD, _HELD_SHARE = 128, 20


@dataclass(frozen=True)
class Question:
    """One conversation's first turn."""

    text: str
    kind: str
    held: bool  # only for evaluation


def read_questions(files: Iterable[Path], exclude: Iterable[Path] = (), seed: int = 0) -> list[Question]:
    """All prompts of the files, without those that occur in `exclude`, shuffled; a twentieth of them is held out."""
    banned = {_key(p.text) for path in exclude for p in read_file(path)}
    found: dict[str, Prompt] = {}
    for path in files:
        for prompt in read_file(path):
            key = _key(prompt.text)
            if key and key not in banned:
                found.setdefault(key, prompt)
    prompts = list(found.values())
    if len(prompts) < 2:
        raise OutriderError("There are fewer than two prompts to train on; give more with --prompts.")
    random.Random(seed).shuffle(prompts)
    held = max(1, min(_MOST_HELD, len(prompts) // _HELD_SHARE))
    return [Question(p.text, p.category, i < held) for i, p in enumerate(prompts)]


def read_file(path: Path) -> list[Prompt]:
    """One JSON object per line, or one JSON list of them: Spec-Bench, GSM8K, MBPP, Alpaca, messages and their like."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"The prompts in {path} cannot be read: {error}.") from error
    try:
        listed = text.lstrip().startswith("[")
        whole = json.loads(text) if listed else [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise OutriderError(f"{path} is neither a JSON list nor one JSON object per line ({error}).") from error
    prompts = [prompt for record in whole if (prompt := _prompt(record, Path(path))) is not None]
    if not prompts:
        raise OutriderError(f"{path} has no prompts in it.")
    return prompts


def _prompt(record: Any, path: Path) -> Prompt | None:
    """One record; None where its data set keeps it for testing."""
    try:
        if "test_list" in record and record.get("task_id") in _MBPP_TEST:
            return None
        return Prompt(_text(record), str(record.get("category") or path.stem))
    except (KeyError, IndexError, TypeError, AttributeError, StopIteration) as error:
        raise OutriderError(
            f"A record of {path} is not a prompt: it needs 'turns', 'messages', 'instruction', 'question', 'prompt' or "
            "'text'."
        ) from error


def _text(record: dict[str, Any]) -> str:
    if "turns" in record:
        return str(record["turns"][0])
    if "messages" in record:
        return str(next(m["content"] for m in record["messages"] if m["role"] == "user"))
    if "instruction" in record:
        given = record.get("input") or next((i.get("input") for i in record.get("instances") or []), "")
        return f"{record['instruction']}\n\n{given}" if given else str(record["instruction"])
    return str(next(record[name] for name in ("question", "prompt", "text") if record.get(name)))


def _key(text: str) -> str:
    """Two texts that differ only in spaces and case are one."""
    return " ".join(text.lower().split())
