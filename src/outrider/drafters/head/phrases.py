"""What usually follows the last tokens: a memory beside a trained head, from the prompt and from what was emitted.

    the last 4, 3 or 2 tokens -> the token that followed most often

A head that meets new text is wrong where the text repeats itself: names, phrases, the form of an answer. A lookup knows
these after one reading. For each token of a chain the memory may put its own in the place of the head's. It does so
only where, in like cases (how long the context was, how often it was confirmed, how sure the head is), its token was
emitted more often than the head's; both are compared whenever they differ, whichever was drafted.

Promise: where nothing is known the head's choice stands; contexts are kept as hashes, the oldest are dropped; what a
prompt says is used for its own request only. A request with `learn=False` leaves no trace. It knows tokens, not text,
and nothing of the head but its choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence as Listing
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...types import Sequence

LONGEST, SHORTEST = 4, 2  # tokens of a context
CONTEXTS = 1 << 16  # of one kind of text, in each of two generations
_PROMPT = 2048  # last tokens of a prompt that are read
_WEIGHT = 8  # the most that confirmations count
_SURE = 4  # steps of the head's confidence that are told apart
_MARGIN = 0.5  # standard deviations by which the memory must have been better
_FADE = 0.995  # weight of the past, per comparison
_CONFIRMED = 2  # confirmations that a context needs to be written to disk
_PRIME, _MASK = 0x9E3779B97F4A7C15, (1 << 63) - 1


class Guess(NamedTuple):
    """What a memory expects."""

    token: int
    case: int  # how long its context was, and how often it was confirmed


class Contexts:
    """The token after each context: the majority of those seen, recent ones first."""

    def __init__(self, most: int = CONTEXTS) -> None:
        self.most = most
        self.recent: dict[int, int] = {}  # context -> token * (_WEIGHT + 1) + weight
        self.older: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.recent.keys() | self.older.keys())

    def learn(self, tokens: Listing[int], at: int) -> None:
        """Token `at` has followed those before it. A majority vote: others lower the weight before they replace it."""
        for key in _keys(tokens, at):
            token, weight = divmod(self._entry(key), _WEIGHT + 1)
            if token == tokens[at]:
                weight = min(weight + 1, _WEIGHT)
            elif weight > 1:
                weight -= 1
            else:
                token, weight = tokens[at], 1
            self.recent[key] = token * (_WEIGHT + 1) + weight
        if len(self.recent) > self.most:
            self.older, self.recent = self.recent, {}

    def guess(self, tokens: Listing[int]) -> Guess | None:
        """The token that follows these, by the longest context that is known."""
        for shorter, key in enumerate(_keys(tokens, len(tokens))):
            entry = self._entry(key)
            if entry:
                token, weight = divmod(entry, _WEIGHT + 1)
                return Guess(token, shorter * (_WEIGHT + 1) + weight)
        return None

    def _entry(self, key: int) -> int:
        return self.recent.get(key) or self.older.get(key, 0)

    def as_tensor(self) -> Tensor:
        """[n, 2] the confirmed contexts with their tokens and weights."""
        kept = [(k, v) for k, v in (self.older | self.recent).items() if v % (_WEIGHT + 1) >= _CONFIRMED]
        return torch.tensor(kept, dtype=torch.long).view(-1, 2)

    @staticmethod
    def of(entries: Tensor) -> Contexts:
        made = Contexts()
        made.older = dict(entries.tolist())
        return made


def _keys(tokens: Listing[int], end: int) -> list[int]:
    """Hashes of the contexts before position `end`, the longest first; there are fewer at the start of a text."""
    keys, key = list[int](), 0
    for back in range(1, min(LONGEST, end) + 1):
        key = (key * _PRIME + tokens[end - back] + 1) & _MASK
        if back >= SHORTEST:
            keys.append(key)
    return keys[::-1]


@dataclass
class Record:
    """How often each was right in like cases, the past fading."""

    memory: float = 0.0
    head: float = 1.0  # the head is trusted first
    cases: float = 1.0

    def add(self, memory: bool, head: bool) -> None:
        self.memory = _FADE * self.memory + memory
        self.head = _FADE * self.head + head
        self.cases = _FADE * self.cases + 1

    @property
    def trusted(self) -> bool:
        """Whether the memory is to be preferred: a sign test on the cases in which one of them was right."""
        return self.memory - self.head > _MARGIN * math.sqrt(self.memory + self.head)

    @property
    def rate(self) -> float:
        return self.memory / self.cases


@dataclass
class Phrases:
    """What one kind of text has taught."""

    contexts: Contexts = field(default_factory=Contexts)
    records: dict[int, Record] = field(default_factory=dict)  # by case
    proposed: int = 0  # verified tokens of the memory that the head would not have proposed
    right: int = 0

    def as_tensors(self) -> dict[str, Tensor]:
        rows = [(case, r.memory, r.head, r.cases) for case, r in self.records.items()]
        return {
            "contexts": self.contexts.as_tensor(),
            "records": torch.tensor(rows, dtype=torch.float64).view(-1, 4),
        }

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> Phrases:
        records = {int(case): Record(*numbers) for case, *numbers in tensors["records"].tolist()}
        return Phrases(Contexts.of(tensors["contexts"]), records)


class Node(NamedTuple):
    """One token of a chain, as it was chosen."""

    head: int  # the head's choice
    chosen: int
    guesses: tuple[Guess, ...]  # with the cases that they belong to


@dataclass
class Reading:
    """A sequence that is being served."""

    own: Contexts  # of its prompt and its answer
    seen: int  # tokens of it that were learnt from
    start: int = 0  # its length when the chain began
    nodes: list[Node] = field(default_factory=list)  # of the latest chain


class PhraseMemory:
    """The memory beside one head, by kind of text."""

    def __init__(self, kind: Callable[[Sequence], str]) -> None:
        self.kind_of = kind
        self.kinds: dict[str, Phrases] = {}
        self.readings: dict[int, Reading] = {}

    def choose(self, seq: Sequence, drafted: list[int], token: int, confidence: float) -> tuple[int, float]:
        """The next token of a chain, given the head's choice after these drafted tokens, and its confidence."""
        reading, phrases = self._reading(seq), self.kinds.get(self.kind_of(seq))
        if not drafted:
            reading.start, reading.nodes = len(seq.tokens), []
        context = [*seq.tokens[-LONGEST:], *drafted][-LONGEST:]
        best, share, guesses = token, confidence, list[Guess]()
        for source, contexts in enumerate((reading.own, None if phrases is None else phrases.contexts)):
            guess = None if contexts is None else contexts.guess(context)
            if guess is None:
                continue
            case = _case(guess.case, source, guess.token == token, confidence)
            guesses.append(Guess(guess.token, case))
            record = None if phrases is None else phrases.records.get(case)
            if record is None or (guess.token != token and not record.trusted):
                continue
            if guess.token == token:
                share = max(share, record.rate) if best == token else share
            elif best == token or record.rate > share:
                best, share = guess.token, record.rate
        if len(drafted) == len(reading.nodes):
            reading.nodes.append(Node(token, best, tuple(guesses)))
        return best, share

    def observe(self, seq: Sequence, learns: bool) -> None:
        """The target has emitted tokens; a sequence that does not teach is only read for itself."""
        reading = self._reading(seq)
        if learns:
            phrases = self.kinds.setdefault(self.kind_of(seq), Phrases())
            self._compare(seq, reading, phrases)
            for at in range(max(reading.seen, 1), len(seq.tokens)):
                phrases.contexts.learn(seq.tokens, at)
        self._read(seq, reading)
        reading.nodes = []

    def end(self, seq: Sequence) -> None:
        self.readings.pop(seq.id, None)

    def as_json(self, kind: str) -> dict[str, int]:
        phrases = self.kinds.get(kind, Phrases())
        return {
            "phrases": len(phrases.contexts),
            "phrases_proposed": phrases.proposed,
            "phrases_accepted": phrases.right,
        }

    def _reading(self, seq: Sequence) -> Reading:
        if seq.id not in self.readings:
            self.readings[seq.id] = Reading(Contexts(), max(seq.prompt_len - _PROMPT, 0))
            self._read(seq, self.readings[seq.id], seq.prompt_len)
        return self.readings[seq.id]

    def _read(self, seq: Sequence, reading: Reading, stop: int | None = None) -> None:
        stop = len(seq.tokens) if stop is None else stop
        for at in range(max(reading.seen, 1), stop):
            reading.own.learn(seq.tokens, at)
        reading.seen = stop

    def _compare(self, seq: Sequence, reading: Reading, phrases: Phrases) -> None:
        """Which of them was right, as far as the chain agrees with what was emitted."""
        for node, token in zip(reading.nodes, seq.tokens[reading.start :], strict=False):
            for guess in node.guesses:
                phrases.records.setdefault(guess.case, Record()).add(guess.token == token, node.head == token)
            if node.chosen != node.head:
                phrases.proposed += 1
                phrases.right += node.chosen == token
            if node.chosen != token:
                break


def _case(kind: int, source: int, agrees: bool, confidence: float) -> int:
    """A number for like cases."""
    sure = min(int(confidence * _SURE), _SURE - 1)
    return ((kind * 2 + source) * 2 + agrees) * _SURE + sure
