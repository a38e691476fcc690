"""The target's own answers: what a drafter has to predict, kept on disk as they come.

Promise: every answer depends only on the target, the prompt, the temperature and the seed of its number, so a run that
was killed goes on where it was and ends with the same answers; a line that was cut off is written again. It runs
Outrider's own batched engine and knows ids, not what is trained with them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OutriderError
from ..types import SamplingParams, Sequence
from .questions import Question

if TYPE_CHECKING:
    from ..llm import LLM
    from ..models.tokenizer import Tokenizer

Progress = Callable[[str, float], None]
Counted = Callable[[int, int], None]  # is told how many answers, and how many tokens, a run has made so far
FORMAT = 1
_NUMBER = '{"number":'  # how every line begins
_SAFE = 1.0  # seconds between two moments at which everything is surely on the disk
_AHEAD = 2  # batches of sequences that wait in the engine, so that no line of it stays empty


@dataclass(frozen=True)
class Answer:
    """One prompt and what the target said to it."""

    number: int
    kind: str
    held: bool
    prompt: list[int]
    answer: list[int]
    temperature: float
    seed: int

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.answer

    @property
    def length(self) -> int:
        """How many tokens that are."""
        return len(self.prompt) + len(self.answer)


@dataclass(frozen=True)
class Order:
    """Which answers are wanted."""

    count: int  # 0: one for each question
    max_tokens: int
    seed: int = 0
    batch: int = 8
    sampled: float = 0.5  # share of training answers that are drawn, at temperatures from 0.7 to 1
    top_p: float = 1.0

    def prompt(self, tokenizer: Tokenizer, question: Question) -> list[int]:
        """What the target goes on from: the question under its chat template, if it has one."""
        if tokenizer.chat_template is None:
            return tokenizer.encode_prompt(question.text)
        return tokenizer.encode_chat([{"role": "user", "content": question.text}])

    def temperature(self, number: int, question: Question, again: bool) -> float:
        """Held-out answers are greedy; a prompt that comes again is always drawn, a greedy one would be a copy."""
        spin = int.from_bytes(hashlib.sha256(f"{self.seed}:{number}".encode()).digest()[:6]) / 2**48  # in [0, 1)
        if question.held or (not again and spin >= self.sampled):
            return 0.0
        return round(0.7 + 0.3 * (spin / self.sampled if not again and self.sampled else spin), 3)


Asked = tuple[int, Question, float]  # number, what, temperature


class Store:
    """answers.jsonl: a header, then one line for each answer, appended as it is finished."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.header = path, {"format": FORMAT} | header
        self._safe = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            self._mend()
        if not path.exists() or not path.stat().st_size:
            path.write_text(json.dumps(self.header) + "\n", encoding="utf-8")
        self._insist()

    def _mend(self) -> None:
        """A killed run may have left half a line: cut it off."""
        with open(self.path, "rb+") as file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)

    def _insist(self) -> None:
        with open(self.path, encoding="utf-8") as file:
            found = json.loads(file.readline())
        other = [name for name, value in self.header.items() if found.get(name) != value]
        if other:
            raise OutriderError(
                f"{self.path} holds answers of another run: its {' and '.join(other)} differ. Give the options it was "
                "made with, or another file."
            )

    def read(self) -> list[Answer]:
        """All finished answers, in the order of their numbers."""
        with open(self.path, encoding="utf-8") as file:
            next(file)
            return sorted((Answer(**json.loads(line)) for line in file), key=lambda a: a.number)

    def numbers(self) -> set[int]:
        """Which answers are finished, without reading what they say: there may be millions of tokens."""
        with open(self.path, encoding="utf-8") as file:
            next(file)
            return {_number(line) for line in file}

    def append(self, answers: list[Answer]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(asdict(a), separators=(",", ":")) + "\n" for a in answers))
            file.flush()
            if time.monotonic() - self._safe > _SAFE:  # a disk may take longer than a pass
                os.fsync(file.fileno())
                self._safe = time.monotonic()

    def absorb(self, other: Store) -> None:
        """Take over what another store of the same run has, and remove it."""
        known = self.numbers()
        with open(other.path, encoding="utf-8") as theirs, open(self.path, "a", encoding="utf-8") as mine:
            next(theirs)
            mine.writelines(line for line in theirs if _number(line) not in known)
            mine.flush()
            os.fsync(mine.fileno())
        other.path.unlink()


def _number(line: str) -> int:
    return int(line[len(_NUMBER) : line.index(",")])


def digest(questions: list[Question]) -> str:
    """What a store's header says about the prompts."""
    text = json.dumps([(q.text, q.kind, q.held) for q in questions], ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def generate(
    llm: LLM,
    wanted: Iterable[Asked],
    order: Order,
    store: Store,
    counted: Counted = lambda answers, tokens: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Add these answers to the store. `stop` ends it between two steps; nothing is lost."""
    _Run(llm, order, store, counted).go(wanted, stop)


def spoken(progress: Progress | None, known: int, total: int) -> Counted:
    """Counts as a line for people: how far, how fast, how long still."""
    begin = time.perf_counter()

    def say(answers: int, tokens: int) -> None:
        seconds, done = max(time.perf_counter() - begin, 1e-9), known + answers
        left = seconds / max(answers, 1) * (total - done)
        speed = f"{tokens / seconds:,.0f} tok/s, {left:,.0f} s left"
        if progress is not None:
            progress(f"answers {done:,}/{total:,}, {speed}", done / max(total, 1))

    return say


def missing(questions: list[Question], order: Order, known: set[int]) -> list[Asked]:
    """What is still to be asked, when the answers with these numbers are known."""
    return [each for each in _numbered(questions, order) if each[0] not in known]


def _numbered(questions: list[Question], order: Order) -> list[Asked]:
    """Numbers, questions and temperatures: all questions once, then those for training again until there are enough."""
    trained = [q for q in questions if not q.held]
    first, count = list(questions), order.count or len(questions)
    rounds: Iterator[tuple[Question, bool]] = itertools.chain(
        ((q, False) for q in first), ((q, True) for q in itertools.cycle(trained))
    )
    asked = list(itertools.islice(rounds, max(count, len(questions) - len(trained) + 1)))
    return [(n, q, order.temperature(n, q, again)) for n, (q, again) in enumerate(asked)]


class _Run:
    """Keeps the engine full, writes what is finished, says how far it is."""

    def __init__(self, llm: LLM, order: Order, store: Store, counted: Counted) -> None:
        self.llm, self.order, self.store, self.counted = llm, order, store, counted
        self.answers, self.tokens = 0, 0
        self.running: dict[int, tuple[Sequence, Asked]] = {}
        self.ends = llm.tokenizer.eos_ids | llm.target.config.eos_ids

    def go(self, wanted: Iterable[Asked], stop: Callable[[], bool]) -> None:
        engine, queue = self.llm.engine, iter(wanted)
        try:
            while not stop():
                for each in itertools.islice(queue, _AHEAD * self.order.batch - len(self.running)):
                    self._ask(each)
                if not self.running:
                    return
                engine.step()
                self._collect()
        finally:
            for seq, _ in self.running.values():
                engine.cancel(seq)

    def _ask(self, each: Asked) -> None:
        number, question, temperature = each
        ids = self.order.prompt(self.llm.tokenizer, question)
        room = self.llm.engine.cache.length - len(ids)
        if room < 2:  # no place for an answer: an empty one keeps its number
            self._write([Answer(number, question.kind, question.held, ids[:1], [], temperature, 0)])
            return
        seed = self.order.seed * 1_000_003 + number
        longest = min(self.order.max_tokens, room)
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=longest, top_p=self.order.top_p)
        seq = Sequence(number, ids, params, seed, self.ends, rule=self.llm.config.rule)
        self.running[number] = (seq, each)
        self.llm.engine.add(seq)

    def _collect(self) -> None:
        ready = [(seq, each) for seq, each in self.running.values() if seq.done]
        if not ready:
            return
        for seq, _ in ready:
            del self.running[seq.id]
            self.tokens += len(seq.generated)
        self._write(
            [
                Answer(n, q.kind, q.held, seq.tokens[: seq.prompt_len], seq.generated, t, seq.seed)
                for seq, (n, q, t) in ready
            ]
        )

    def _write(self, answers: list[Answer]) -> None:
        self.store.append(answers)
        self.answers += len(answers)
        self.counted(self.answers, self.tokens)
