"""From tokens to text, as they are emitted: incremental decoding, stop strings, pieces for streams.

Stop strings belong to the text, so they are found here; the engine only hears "the text ends with this token". Text
that may be the beginning of a stop string is held back until it is clear that it is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..types import SamplingParams


@dataclass(frozen=True)
class Piece:
    """What one step added to a text."""

    text: str
    token_ids: list[int]
    origins: str  # one letter per token: a (accepted from the draft) or b (the target's own bonus)
    texts: list[str]  # the text that each token released; joined, they are `text`
    rejected: list[int]  # drafted tokens that were not kept, in drafting order


@dataclass
class Reader:
    """Hears each emitted token once, in order; says True when the text ends with it.

    Without stop strings nobody needs the text before somebody asks for it, and a device should not wait for it.
    """

    stream: Any  # the tokenizer's incremental decoder: push(ids) -> text, flush() -> text
    params: SamplingParams
    ends: frozenset[int]
    heard: list[int] = field(default_factory=list)  # and not yet decoded
    decoded: list[str] = field(default_factory=list)  # one per token
    held: str = ""  # text that may begin a stop string
    stopped: bool = False

    def __call__(self, token: int) -> bool:
        self.heard.append(token)
        if self.params.stop:
            self._decode()
        return self.stopped

    @property
    def texts(self) -> list[str]:
        """What each token released."""
        self._decode()
        return self.decoded

    def finish(self) -> None:
        """The text has ended for another reason: nothing needs to be held back any more."""
        if self.texts and not self.stopped:
            self.texts[-1] += self.held + self.stream.flush()
        self.held = ""

    def _decode(self) -> None:
        for token in self.heard:
            self.held += "" if token in self.ends else self.stream.push([token])
            if len(self.decoded) + 1 > self.params.min_tokens:
                self.stopped = self._cut_at_stop()
            released = "" if self.stopped else self.held[len(self.held) - self._may_begin_stop() :]
            self.decoded.append(self.held[: len(self.held) - len(released)])
            self.held = released
        self.heard = []

    def _cut_at_stop(self) -> bool:
        places = [at for at in map(self.held.find, self.params.stop) if at >= 0]
        if places:
            self.held = self.held[: min(places)]
        return bool(places)

    def _may_begin_stop(self) -> int:
        """Length of the longest end of the held text that is the beginning of a stop string."""
        longest = max(map(len, self.params.stop), default=1) - 1
        for n in range(min(longest, len(self.held)), 0, -1):
            if any(stop.startswith(self.held[-n:]) for stop in self.params.stop):
                return n
        return 0
