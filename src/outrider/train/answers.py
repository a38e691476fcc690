"""The target's own answers, which a drafter learns to predict: which are wanted, and the file they are kept in.

An answer depends only on the target, the prompt, the temperature and the seed of its number. A killed run can therefore
be resumed and ends with the same answers. This module knows token ids and files; it runs no model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import OutriderError
from ..models.tokenizer import Tokenizer, encode_message

FORMAT = 1
_LINE_START = '{"number":'
_FSYNC_SECONDS = 1.0  # at most one fsync in this time: a disk may take longer than a pass


@dataclass(frozen=True)
class TrainingPrompt:
    """The first user turn of a conversation."""

    text: str
    kind: str
    held: bool  # only for evaluation


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's answer to it, as token ids. The fields are the keys of a line in the file."""

    number: int
    kind: str
    held: bool
    prompt: list[int]
    answer: list[int]
    temperature: float
    seed: int
    source: list[int] = field(default_factory=list)  # what an encoder reads; the prompt is how the decoder starts

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.answer)


class AnswerRequest(NamedTuple):
    """One answer to generate."""

    number: int
    prompt: TrainingPrompt
    temperature: float


@dataclass(frozen=True)
class GenerationOptions:
    """How many answers are generated, and how."""

    count: int  # 0: one for each prompt
    max_tokens: int
    seed: int = 0
    batch: int = 8
    sampled: float = 0.5  # share of training answers that are sampled, at temperatures from 0.7 to 1
    top_p: float = 1.0

    def prompt_ids(self, tokenizer: Tokenizer, prompt: TrainingPrompt) -> list[int]:
        """The prompt under the target's chat template, or as plain text where there is none."""
        return encode_message(tokenizer, prompt.text)

    def temperature(self, number: int, held: bool, repeated: bool) -> float:
        """0 for held-out answers. A repeated prompt is always sampled: a greedy answer would be a copy."""
        uniform = int.from_bytes(hashlib.sha256(f"{self.seed}:{number}".encode()).digest()[:6]) / 2**48  # in [0, 1)
        if held or (not repeated and uniform >= self.sampled):
            return 0.0
        return round(0.7 + 0.3 * (uniform / self.sampled if not repeated and self.sampled else uniform), 3)


def answer_requests(prompts: list[TrainingPrompt], options: GenerationOptions) -> list[AnswerRequest]:
    """All prompts once, then those for training repeatedly, up to `count`."""
    trained = [p for p in prompts if not p.held]
    rounds: Iterator[tuple[TrainingPrompt, bool]] = itertools.chain(
        ((p, False) for p in prompts), ((p, True) for p in itertools.cycle(trained))
    )
    count = max(options.count or len(prompts), len(prompts) - len(trained) + 1)
    numbered = enumerate(itertools.islice(rounds, count))
    return [AnswerRequest(n, p, options.temperature(n, p.held, repeated)) for n, (p, repeated) in numbered]


def prompts_digest(prompts: list[TrainingPrompt]) -> str:
    """16 hex digits that identify the prompts in a store's header."""
    text = json.dumps([(p.text, p.kind, p.held) for p in prompts], ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


class AnswerStore:
    """answers.jsonl: a header, then one line for each answer, appended as it is finished.

    A line that was cut off by a kill is removed when the file is opened. The header must match the one on disk.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.header = path, {"format": FORMAT} | header
        self._last_fsync = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            with open(path, "rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        if not path.exists() or not path.stat().st_size:
            path.write_text(json.dumps(self.header) + "\n", encoding="utf-8")
        with open(path, encoding="utf-8") as text:
            stored = json.loads(text.readline())
        differing = [name for name, value in self.header.items() if stored.get(name) != value]
        if differing:
            raise OutriderError(
                f"{path} holds the answers of another run: {' and '.join(differing)} differ. Use the options that it "
                "was made with, or another file."
            )

    def read(self) -> list[Answer]:
        """All finished answers, in the order of their numbers."""
        with open(self.path, encoding="utf-8") as file:
            next(file)
            return sorted((Answer(**json.loads(line)) for line in file), key=lambda a: a.number)

    def numbers(self) -> set[int]:
        """The numbers of finished answers, without parsing their tokens: there may be millions."""
        with open(self.path, encoding="utf-8") as file:
            next(file)
            return {_number(line) for line in file}

    def append(self, answers: list[Answer]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(a), separators=(",", ":")) + "\n" for a in answers))
            file.flush()
            if time.monotonic() - self._last_fsync > _FSYNC_SECONDS:
                os.fsync(file.fileno())
                self._last_fsync = time.monotonic()

    def part(self, worker: int) -> AnswerStore:
        """The file of one process of a generation pool."""
        return AnswerStore(self.path.with_name(f"{self.path.name}.part{worker}"), self.header)

    def absorb_parts(self) -> None:
        """Take over what the processes of a generation pool have written, and remove their files."""
        for path in sorted(self.path.parent.glob(f"{self.path.name}.part*")):
            AnswerStore(path, self.header)  # same run, no partial line
            known = self.numbers()
            with open(path, encoding="utf-8") as part, open(self.path, "a", encoding="utf-8") as whole:
                next(part)
                whole.writelines(line for line in part if _number(line) not in known)
                whole.flush()
                os.fsync(whole.fileno())
            path.unlink()


def _number(line: str) -> int:
    return int(line[len(_LINE_START) : line.index(",")])
