"""Training prompts: read from files in the forms that instruction data has, or written by the target itself.

The same files and seed give the same prompts in the same order, each text once, kinds mixed; held-out prompts are never
trained on. A generated prompt n depends only on the target, the seed and n, so a stopped run can be resumed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OutriderError
from ..models.checkpoint import open_checkpoint
from ..models.prompts import Prompt
from ..models.speculators import target_hash
from ..models.tokenizer import Tokenizer
from .answers import AnswerRequest, AnswerStore, GenerationOptions, TrainingPrompt
from .generation import GenerationJob, Progress, Stop, generate_missing

_MBPP_TEST = range(11, 511)  # task ids that MBPP's authors keep for testing
_MOST_HELD, _HELD_SHARE = 128, 20
_INVENTED = "invented"
_LEAST_TOKENS = 3  # of an invented prompt
_PLACEHOLDER = "outrider"  # user text that marks where a user's turn begins in a chat template


def read_prompts(files: Iterable[Path], exclude: Iterable[Path] = (), seed: int = 0) -> list[TrainingPrompt]:
    """All prompts of the files, without those that occur in `exclude`, shuffled; a twentieth of them is held out."""
    excluded = {_normalised(p.text) for path in exclude for p in read_file(path)}
    unique: dict[str, Prompt] = {}
    for path in files:
        for prompt in read_file(path):
            key = _normalised(prompt.text)
            if key and key not in excluded:
                unique.setdefault(key, prompt)
    prompts = list(unique.values())
    if len(prompts) < 2:
        raise OutriderError("There are fewer than two prompts to train on; give more with --prompts.")
    random.Random(seed).shuffle(prompts)
    held = max(1, min(_MOST_HELD, len(prompts) // _HELD_SHARE))
    return [TrainingPrompt(p.text, p.category, i < held) for i, p in enumerate(prompts)]


def read_file(path: Path) -> list[Prompt]:
    """One JSON object per line, or one JSON list: Spec-Bench, GSM8K, MBPP, Alpaca, chat messages and similar."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"The prompts in {path} cannot be read: {error}.") from error
    try:
        is_list = text.lstrip().startswith("[")
        records = json.loads(text) if is_list else [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise OutriderError(f"{path} is neither a JSON list nor one JSON object per line ({error}).") from error
    prompts = [prompt for record in records if (prompt := _prompt(record, Path(path))) is not None]
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
        context = record.get("input") or next((i.get("input") for i in record.get("instances") or []), "")
        return f"{record['instruction']}\n\n{context}" if context else str(record["instruction"])
    return str(next(record[name] for name in ("question", "prompt", "text") if record.get(name)))


def _normalised(text: str) -> str:
    """Texts that differ only in spaces and case are the same prompt."""
    return " ".join(text.lower().split())


# ---------------------------------------------------------------- prompts written by the target


@dataclass(frozen=True)
class Invention:
    """Options of `outrider invent`."""

    out: Path
    count: int
    target: str | None = None
    device: str = "cpu"
    dtype: str = "auto"
    max_tokens: int = 160
    batch: int = 8
    workers: int = 1
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 0.95


class _UserTurns(GenerationOptions):
    """Every answer continues a chat template at the point where a user's turn begins."""

    def prompt_ids(self, tokenizer: Tokenizer, prompt: TrainingPrompt) -> list[int]:
        return user_turn_prefix(tokenizer)


def user_turn_prefix(tokenizer: Tokenizer) -> list[int]:
    """The ids of the chat template up to where the user's text begins."""
    if tokenizer.chat_template is None:
        raise OutriderError("This model has no chat template, so it cannot write the turns of a user.")
    ids = tokenizer.encode_chat([{"role": "user", "content": _PLACEHOLDER}])
    start = tokenizer.decode(ids, skip_special=False).find(_PLACEHOLDER)
    lengths = [len(tokenizer.decode(ids[:n], skip_special=False)) for n in range(len(ids))]
    prefix = ids[: max((n for n, length in enumerate(lengths) if length <= start), default=0)]
    if not prefix:
        raise OutriderError("This model's chat template has nothing before a user's text, so it cannot write prompts.")
    return prefix


def invent(options: Invention, progress: Progress | None = None, stop: Stop = lambda: False) -> int:
    """Write prompts that the target generates; returns their number. Unfinished and repeated ones are left out."""
    checkpoint = open_checkpoint(options.target)
    user_turn_prefix(checkpoint.tokenizer)  # refuse before anything is written
    header = {"target": target_hash(checkpoint.config, checkpoint.weights), "seed": options.seed}
    header |= {"top_p": options.top_p, "temperature": options.temperature}
    store = AnswerStore(options.out.with_name(f"{options.out.name}.unfinished"), header)
    prompt = TrainingPrompt("", _INVENTED, False)
    requests = [AnswerRequest(n, prompt, options.temperature) for n in range(options.count)]
    generation = _UserTurns(options.count, options.max_tokens, options.seed, options.batch, top_p=options.top_p)
    job = GenerationJob(options.target, options.dtype, options.device, generation, requests, options.workers)
    answers = [a.answer for a in generate_missing(job, store, progress, stop) if a.answer]
    end_ids = checkpoint.tokenizer.eos_ids | checkpoint.config.eos_ids
    finished = [ids for ids in answers if ids[-1] in end_ids and len(ids) > _LEAST_TOKENS]
    texts = [checkpoint.tokenizer.decode(ids[:-1]).strip() for ids in finished]
    prompts = [text for text in dict.fromkeys(texts) if text]
    with open(options.out, "w", encoding="utf-8") as file:
        for text in prompts:
            file.write(json.dumps({"category": _INVENTED, "turns": [text]}, ensure_ascii=False) + "\n")
    store.path.unlink()
    return len(prompts)
