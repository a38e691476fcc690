"""Which of a batch's rows is which text: vLLM hands a proposer rows of tokens, and neither names nor ends.

Rows move when others leave, and a row says nothing of its past. But a text only grows, so a row is known by its
beginning: where two are equal so far, it does not matter which is which, because a drafter looks at nothing else.
What is no longer in the batch has ended (or waits, and is then read anew when it comes back).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..prediction import Prediction
from ..types import Sequence

Tokens = npt.NDArray[np.integer]
KEPT = 256  # predictions that wait for their request


@dataclass
class Followed:
    """A text under way: as the drafter knows it, and as an array that is compared in one go."""

    seq: Sequence
    known: Tokens  # [n] a copy


class Rows:
    """Follows the texts of a batch from step to step."""

    def __init__(self, ends: frozenset[int], begun: Callable[[Sequence], None], ended: Callable[[Sequence], None]):
        self._ends, self._begun, self._ended = ends, begun, ended
        self._rows: list[Followed | None] = []
        self._next = 0
        self.expected = Expected()

    def follow(self, texts: list[Tokens], fresh: list[int]) -> list[Sequence | None]:
        """The sequence of each row, up to date; None for a row that has not said anything yet.

        texts[i] is all that row i holds, prompt first; fresh[i] of its tokens were said in this step.
        """
        left = [row for row in self._rows if row is not None]
        now = [self._claim(left, i, text) for i, text in enumerate(texts)]
        for gone in left:
            self._ended(gone.seq)
        for i, text in enumerate(texts):
            found = now[i]
            if found is not None:
                _grow(found, text)
            elif fresh[i]:
                now[i] = self._new(text, fresh[i])
        self._rows = now
        return [None if row is None else row.seq for row in now]

    def _claim(self, left: list[Followed], i: int, text: Tokens) -> Followed | None:
        """The text under way that this row goes on with: most often the one that was in its place."""
        before = self._rows[i] if i < len(self._rows) else None
        for row in [before, *left] if before in left else left:
            if row is not None and _continues(row.known, text):
                left.remove(row)
                return row
        return None

    def _new(self, text: Tokens, fresh: int) -> Followed:
        prompt = text[: len(text) - fresh]
        seq = Sequence(self._next, prompt.tolist(), ends=self._ends)
        self._next += 1
        seq.prediction = self.expected.take(prompt)
        self._begun(seq)
        followed = Followed(seq, prompt.copy())
        _grow(followed, text)
        return followed


def _continues(known: Tokens, text: Tokens) -> bool:
    return len(known) <= len(text) and bool(np.array_equal(known, text[: len(known)]))


def _grow(row: Followed, text: Tokens) -> None:
    said = text[len(row.known) :].tolist()
    row.seq.tokens.extend(said)
    row.known = text.copy()
    if row.seq.prediction is not None:
        row.seq.prediction.hear(said)


class Expected:
    """Predictions that came before their request, under the prompt they belong to; the oldest are dropped."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._waiting: OrderedDict[str, list[int]] = OrderedDict()

    def put(self, key: str, tokens: list[int]) -> None:
        self._waiting[key] = tokens
        self._waiting.move_to_end(key)
        while len(self._waiting) > self._most:
            self._waiting.popitem(last=False)

    def take(self, prompt: Tokens) -> Prediction | None:
        if not self._waiting:
            return None
        tokens = self._waiting.pop(key_of(prompt.tolist()), None)
        return None if tokens is None else Prediction(tokens)


def key_of(prompt: list[int]) -> str:
    """A prompt's name, the same in every process."""
    return hashlib.sha256(np.asarray(prompt, dtype=np.int64).tobytes()).hexdigest()
