"""Incremental detokenisation of one answer: text per token, stop strings, the pieces of a stream.

Stop strings belong to the text, so they are found here; the engine only learns that the text ends with this token. Text
that may be the beginning of a stop string is held back until it is certain that it is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..params import SamplingParams


@dataclass(frozen=True)
class Piece:
    """What one step added to a text."""

    text: str
    token_ids: list[int]
    origins: str  # one letter per token: a (accepted from the draft) or b (the target's own bonus)
    texts: list[str]  # the text that each token released; joined, they are `text`
    rejected: list[int]  # drafted tokens that were rejected, in drafting order


@dataclass
class Detokenizer:
    """Called once with each emitted token, in order; returns True when the text ends with it.

    Without stop strings, tokens are decoded only when `texts` is read, so that no device waits for it.
    """

    stream: Any  # the tokenizer's incremental decoder: push(ids) -> text, flush() -> text
    params: SamplingParams
    ends: frozenset[int]  # end tokens, which have no text
    pending: list[int] = field(default_factory=list)  # tokens that are not decoded yet
    decoded: list[str] = field(default_factory=list)  # one per token
    held: str = ""  # text that may begin a stop string
    stopped: bool = False

    def __call__(self, token: int) -> bool:
        self.pending.append(token)
        if self.params.stop:
            self._decode()
        return self.stopped

    def extend(self, tokens: list[int]) -> int:
        """As if called with each token until the text ends; returns how many belong to it."""
        if not self.params.stop:
            self.pending += tokens
            return len(tokens)
        return next((i for i, token in enumerate(tokens, start=1) if self(token)), len(tokens))

    @property
    def texts(self) -> list[str]:
        """The text that each token released."""
        if self.pending:
            self._decode()
        return self.decoded

    def finish(self) -> None:
        """The text has ended for another reason: release what is held back."""
        if self.texts and not self.stopped:
            self.texts[-1] += self.held + self.stream.flush()
        self.held = ""

    def _decode(self) -> None:
        if not self.params.stop:  # nothing is held back
            push, ends = self.stream.push, self.ends
            self.decoded += ["" if token in ends else push((token,)) for token in self.pending]
            self.pending = []
            return
        for token in self.pending:
            self.held += "" if token in self.ends else self.stream.push((token,))
            if len(self.decoded) + 1 > self.params.min_tokens:
                self.stopped = self._cut_at_stop()
            end = len(self.held) if self.stopped else len(self.held) - self._may_begin_stop()
            self.decoded.append(self.held[:end])
            self.held = self.held[end:]
        self.pending = []

    def _cut_at_stop(self) -> bool:
        starts = [start for start in map(self.held.find, self.params.stop) if start >= 0]
        if starts:
            self.held = self.held[: min(starts)]
        return bool(starts)

    def _may_begin_stop(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = max(map(len, self.params.stop), default=1) - 1
        for n in range(min(longest, len(self.held)), 0, -1):
            if any(stop.startswith(self.held[-n:]) for stop in self.params.stop):
                return n
        return 0
