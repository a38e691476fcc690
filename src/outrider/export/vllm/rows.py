"""Which of a batch's rows is which text: vLLM hands a proposer rows of tokens, and neither names nor ends.

Rows move when others leave, and a row says nothing of its past. But a text only grows, so a row is known by its
beginning: where two are equal so far, it does not matter which is which, because a drafter looks at nothing else.
What is no longer in the batch has ended (or waits, and is then read anew when it comes back).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ...engine.prediction import Prediction
from ...types import Sequence

Tokens = npt.NDArray[np.integer]
KEPT = 256  # predictions that wait for their request
BEGINNING, END = 16, 48  # tokens that are looked at


class Rows:
    """Follows the texts of a batch from step to step."""

    def __init__(self, ends: frozenset[int], begun: Callable[[Sequence], None], ended: Callable[[Sequence], None]):
        self._ends, self._begun, self._ended = ends, begun, ended
        self._rows: list[Sequence | None] = []
        self._next = 0
        self.expected = Expected()

    def follow(self, texts: list[Tokens], fresh: list[int]) -> list[Sequence | None]:
        """The sequence of each row, up to date; None for a row that has not said anything yet.

        texts[i] is all that row i holds, prompt first; fresh[i] of its tokens were said in this step.
        """
        left = {seq.id: seq for seq in self._rows if seq is not None}
        now = [self._claim(left, i, text[: len(text) - fresh[i]]) for i, text in enumerate(texts)]
        for gone in left.values():
            self._ended(gone)
        for i, text in enumerate(texts):
            seq = now[i]
            if seq is not None:
                _grow(seq, text)
            elif fresh[i]:
                now[i] = self._new(text, fresh[i])
        self._rows = now
        return list(now)

    def _claim(self, left: dict[int, Sequence], i: int, past: Tokens) -> Sequence | None:
        """The text under way whose past this is: most often the one that was in this place.

        All of its past: a new request may begin with all that an old one has said.
        """
        before = self._rows[i] if i < len(self._rows) else None
        if before is not None and before.id in left and _seems(before.tokens, past):
            return left.pop(before.id)
        for seq in left.values():
            if _seems(seq.tokens, past) and np.array_equal(seq.tokens, past):
                return left.pop(seq.id)
        return None

    def _new(self, text: Tokens, fresh: int) -> Sequence:
        prompt = text[: len(text) - fresh]
        seq = Sequence(self._next, prompt.tolist(), ends=self._ends)
        self._next += 1
        seq.prediction = self.expected.take(prompt)
        self._begun(seq)
        _grow(seq, text)
        return seq


def _seems(known: list[int], past: Tokens) -> bool:
    """Whether they are the same by a look at both ends, because prompts are long."""
    n = len(known)
    if n != len(past):
        return False
    first, last = past[:BEGINNING].tolist(), past[max(n - END, 0) :].tolist()
    return bool(known[:BEGINNING] == first and known[-END:] == last)


def _grow(seq: Sequence, text: Tokens) -> None:
    said = text[len(seq.tokens) :].tolist()
    seq.tokens.extend(said)
    if seq.prediction is not None:
        seq.prediction.hear(said)


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
