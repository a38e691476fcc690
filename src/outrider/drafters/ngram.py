"""Prompt lookup: the last time the text stood like this, what came next?

This is the smallest real drafter and the one to read first. It promises a chain: the tokens that followed the
latest earlier occurrence of the longest n-gram at the end of the text, or else in the text that the answer is made
from. It knows nothing but the ids in `seq.tokens` and `seq.source`: no model, no probabilities, no other request.
Answers that repeat their prompt (code edits, summaries, quotations) are drafted in a few microseconds; on fresh prose
it mostly stays silent, which is right.

Like every drafter it takes `seq.tokens` for the truth and its own notes for a cache: any call may be skipped,
repeated or come late, and a sequence id may come back with another text. Notes that do not fit are made anew.
"""

from __future__ import annotations

from itertools import accumulate, cycle, islice
from operator import mul

from ..errors import ConfigError
from ..types import Draft, Sequence, Tree, chain
from . import Drafter, DraftRequest, Traits, Workspace, register

DOUBT = 1.25  # measured on SmolLM2: after m equal tokens the next one is equal too about m / (m + DOUBT) of the time
KEPT = 4096  # sequences remembered at once; only a caller that forgets `end` ever meets this bound


@register("ngram")
class NGram(Drafter):
    """Options: `ngram_max` (4) and `ngram_min` (2), the n-gram sizes; vLLM's `prompt_lookup_max` / `_min` work too."""

    traits = Traits(
        options=("ngram_max", "ngram_min", "prompt_lookup_max", "prompt_lookup_min"),
        dry=True,
        auto=lambda workspace: True,
    )

    def __init__(self, space: Workspace) -> None:
        high = int(space.option("ngram_max", "prompt_lookup_max", default=4))
        low = int(space.option("ngram_min", "prompt_lookup_min", default=min(2, high)))
        if not 1 <= low <= high:
            raise ConfigError(f"ngram_min is {low} and ngram_max is {high}; choose 1 <= ngram_min <= ngram_max.")
        self._sizes = range(high, low - 1, -1)  # longest first: it is more often right
        self._notes: dict[int, Notes] = {}

    def draft(self, request: DraftRequest) -> Draft:
        pairs = zip(request.seqs, request.budgets, strict=True)
        return Draft.pack(self._look_up(seq, budget) for seq, budget in pairs)

    def end(self, seq: Sequence) -> None:
        self._notes.pop(seq.id, None)

    def _look_up(self, seq: Sequence, room: int) -> Tree:
        if room <= 0:
            return chain([])
        notes = self._read(seq)
        for n in self._sizes:
            last = tuple(seq.tokens[-n:])
            copy: list[int] = []
            if (start := notes.next_after.get(last)) is not None:
                # Where the text ends the copy goes on into itself: after "abab" comes "abab".
                copy = list(islice(cycle(seq.tokens[start : start + room]), room))
            elif (start := notes.in_source.get(last)) is not None:
                copy = seq.source[start : start + room]
            if copy:
                # Each accepted token makes the match one longer, and so the next one likelier.
                survival = accumulate((m / (m + DOUBT) for m in range(n, n + len(copy))), mul)
                return chain(copy, list(survival), source=self.name)
        return chain([])

    def _read(self, seq: Sequence) -> Notes:
        notes = self._notes.get(seq.id)
        if notes is None or not notes.fit(seq.tokens, seq.source):
            notes = self._notes[seq.id] = Notes(seq.tokens, seq.source)
            notes.in_source = following(seq.source, 0, self._sizes)
            if len(self._notes) > KEPT:
                del self._notes[next(iter(self._notes))]
        notes.read(self._sizes)
        return notes


class Notes:
    """Of one text: for each n-gram that something followed, the position of what followed it last."""

    def __init__(self, tokens: list[int], source: list[int]) -> None:
        self.tokens, self.source = tokens, source  # the sequence's own lists; only the first one grows
        self.in_source: dict[tuple[int, ...], int] = {}
        self.next_after: dict[tuple[int, ...], int] = {}
        self.done = 0  # how many tokens were read
        self.last: list[int] = []  # and which ones were the last

    def fit(self, tokens: list[int], source: list[int]) -> bool:
        """Were they made from this text? A list that only grows is known by itself and by where reading stopped."""
        mine = tokens is self.tokens and source is self.source
        return mine and tokens[max(self.done - 8, 0) : self.done] == self.last

    def read(self, sizes: range) -> None:
        """Note what is new. The n-gram at the very end waits until something follows: it must not find itself."""
        self.next_after |= following(self.tokens, self.done, sizes)
        self.done, self.last = len(self.tokens), self.tokens[-8:]


def following(tokens: list[int], start: int, sizes: range) -> dict[tuple[int, ...], int]:
    """For each n-gram that something from `start` on follows, the position of what followed it last."""
    places = range(start, len(tokens))
    return {tuple(tokens[here - n : here]): here for here in places for n in sizes if n <= here}
