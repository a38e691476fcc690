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
_UNIT = _WEIGHT + 1  # of a token in an entry
_CERTAIN = 0.95  # confidence from which on the head is not questioned, while it is right as often
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
        self.recent: dict[int, int] = {}  # context -> token * _UNIT + weight
        self.older: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.recent.keys() | self.older.keys())

    def learn(self, contexts: list[int], token: int) -> None:
        """A token has followed these. A majority vote: others lower the weight before they replace it."""
        recent, older, first = self.recent, self.older, token * _UNIT + 1
        for key in contexts:
            entry = recent.get(key) or older.get(key) or first - 1
            weight = entry % _UNIT
            if entry - weight + 1 == first:
                recent[key] = entry + (weight < _WEIGHT)
            else:
                recent[key] = entry - 1 if weight > 1 else first
        if len(recent) > self.most:
            self.older, self.recent = recent, {}

    def guess(self, contexts: list[int]) -> Guess | None:
        """The token that follows, by the longest context that is known."""
        for shorter, key in enumerate(contexts):
            entry = self.recent.get(key) or self.older.get(key)
            if entry:
                token, weight = divmod(entry, _UNIT)
                return Guess(token, shorter * _UNIT + weight)
        return None

    def as_tensor(self) -> Tensor:
        """[n, 2] the confirmed contexts with their tokens and weights."""
        kept = [(k, v) for k, v in (self.older | self.recent).items() if v % _UNIT >= _CONFIRMED]
        return torch.tensor(kept, dtype=torch.long).view(-1, 2)

    @staticmethod
    def of(entries: Tensor) -> Contexts:
        made = Contexts()
        made.older = dict(entries.tolist())
        return made


def contexts_of(tokens: Listing[int], end: int) -> list[int]:
    """Hashes of the contexts before position `end`, the longest first; there are fewer at the start of a text."""
    keys, key = list[int](), 0
    for back in range(1, min(LONGEST, end) + 1):
        key = (key * _PRIME + tokens[end - back] + 1) & _MASK
        if back >= SHORTEST:
            keys.append(key)
    return keys[::-1]


@dataclass
class Record:
    """How often the head and the memory were right in similar cases, with decay."""

    memory: float = 0.0
    head: float = 1.0  # the head is trusted first
    cases: float = 1.0

    def add(self, memory: bool, head: bool) -> None:
        self.memory = _FADE * self.memory + memory
        self.head = _FADE * self.head + head
        self.cases = _FADE * self.cases + 1

    @property
    def trusted(self) -> bool:
        """Whether to prefer the memory: a sign test on the cases in which exactly one of them was right."""
        return self.memory - self.head > _MARGIN * math.sqrt(self.memory + self.head)

    @property
    def rate(self) -> float:
        return self.memory / self.cases


@dataclass
class Phrases:
    """What one kind of text has taught."""

    contexts: Contexts = field(default_factory=Contexts)
    records: dict[int, Record] = field(default_factory=dict)  # by case
    certain: float = 1.0  # how often the head was right where it was nearly certain
    proposed: int = 0  # verified tokens of the memory that the head would not have proposed
    right: int = 0

    def as_tensors(self) -> dict[str, Tensor]:
        rows = [(case, r.memory, r.head, r.cases) for case, r in self.records.items()]
        return {
            "contexts": self.contexts.as_tensor(),
            "records": torch.tensor(rows, dtype=torch.float64).view(-1, 4),
            "certain": torch.tensor(self.certain, dtype=torch.float64),
        }

    @staticmethod
    def of(tensors: dict[str, Tensor]) -> Phrases:
        records = {int(case): Record(*numbers) for case, *numbers in tensors["records"].tolist()}
        return Phrases(Contexts.of(tensors["contexts"]), records, float(tensors["certain"]))


class Node(NamedTuple):
    """One token of a chain, as it was chosen."""

    head: int  # the head's choice
    chosen: int
    certain: bool  # the head was nearly certain
    guesses: tuple[Guess, ...]  # other tokens, with the cases that they belong to


@dataclass
class Reading:
    """A sequence that is being served."""

    phrases: Phrases  # of its kind
    learns: bool
    own: Contexts  # of its prompt and its answer
    seen: int  # tokens of it that were learnt from
    start: int = 0  # its length when the chain began
    nodes: list[Node] = field(default_factory=list)  # of the latest chain

    def read(self, tokens: list[int], stop: int, shared: Contexts | None = None) -> None:
        """Learn the sequence's new tokens: for itself, and for all sequences where `shared` is given."""
        for at in range(max(self.seen, 1), stop):
            contexts, token = contexts_of(tokens, at), tokens[at]
            self.own.learn(contexts, token)
            if shared is not None:
                shared.learn(contexts, token)
        self.seen = stop

    def compare(self, tokens: list[int]) -> None:
        """Count whether the head or the memory was right, as far as the chain agrees with the emitted tokens."""
        phrases = self.phrases
        for (head, chosen, certain, guesses), token in zip(self.nodes, tokens[self.start :], strict=False):
            if certain:
                phrases.certain += (1 - _FADE) * ((head == token) - phrases.certain)
            for guess in guesses:
                phrases.records.setdefault(guess.case, Record()).add(guess.token == token, head == token)
            if chosen != head:
                phrases.proposed += 1
                phrases.right += chosen == token
            if chosen != token:
                break


class PhraseMemory:
    """The memory beside one head, by kind of text."""

    def __init__(self, kind: Callable[[Sequence], str], learns: Callable[[Sequence], bool]) -> None:
        self.kind_of, self.learns = kind, learns
        self.kinds: dict[str, Phrases] = {}
        self.readings: dict[int, Reading] = {}

    def choose(self, seq: Sequence, drafted: list[int], token: int, confidence: float) -> tuple[int, float]:
        """The next token of a chain, given the head's choice after these drafted tokens, and its confidence."""
        reading = self.readings.get(seq.id) or self._begin(seq)
        phrases = reading.phrases
        if not drafted:
            reading.start, reading.nodes = len(seq.tokens), []
        certain = confidence >= _CERTAIN
        if certain and phrases.certain >= _CERTAIN:
            reading.nodes.append(Node(token, token, True, ()))
            return token, confidence
        last = [*seq.tokens[-LONGEST:], *drafted]
        contexts, best, share, guesses = contexts_of(last, len(last)), token, confidence, tuple[Guess, ...]()
        for source, known in enumerate((reading.own, phrases.contexts)):
            guess = known.guess(contexts)
            if guess is not None and guess.token != token:
                case = _case(guess.case, source, confidence)
                guesses += (Guess(guess.token, case),)
                record = phrases.records.get(case)
                if record is not None and record.trusted and (best == token or record.rate > share):
                    best, share = guess.token, record.rate
        reading.nodes.append(Node(token, best, certain, guesses))
        return best, share

    def agrees(self, seq: Sequence, tokens: list[int], survival: list[float]) -> bool:
        """Whether the memory would change no token of the head's chain; survival: of each of its tokens."""
        before = 1.0
        for depth, (token, alive) in enumerate(zip(tokens, survival, strict=True)):
            if self.choose(seq, tokens[:depth], token, alive / before if before > 0 else 0.0)[0] != token:
                return False
            before = alive
        return True

    def observe(self, seq: Sequence) -> None:
        """The target has emitted tokens. A sequence that must not be learnt from is used for itself only."""
        reading = self.readings.get(seq.id) or self._begin(seq)
        if reading.learns:
            reading.compare(seq.tokens)
        reading.read(seq.tokens, len(seq.tokens), reading.phrases.contexts if reading.learns else None)
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

    def _begin(self, seq: Sequence) -> Reading:
        """Read a sequence's prompt, for itself only."""
        learns, kind = self.learns(seq), self.kind_of(seq)
        phrases = self.kinds.setdefault(kind, Phrases()) if learns else self.kinds.get(kind) or Phrases()
        self.readings[seq.id] = made = Reading(phrases, learns, Contexts(), max(seq.prompt_len - _PROMPT, 0))
        made.read(seq.tokens, seq.prompt_len)
        return made


def _case(context: int, source: int, confidence: float) -> int:
    """A number for like cases."""
    return (context * 2 + source) * _SURE + min(int(confidence * _SURE), _SURE - 1)
