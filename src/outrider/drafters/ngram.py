"""Prompt lookup: drafts the tokens that followed the latest earlier occurrence of the last few tokens.

This is the smallest complete drafter, and the one to read first. It looks for the longest n-gram at the end of
`seq.tokens` that also occurs earlier in them or, failing that, in `seq.source`, the text that the answer is made from.
What followed there becomes the draft, a chain. Answers that repeat their prompt (code edits, summaries, quotations)
are drafted in a few microseconds; new prose mostly gets an empty draft. It uses no model and sees no other request.

Like every drafter it takes `seq.tokens` for the truth and its own index for a cache: any call may be skipped, repeated
or late, and a sequence id may return with other tokens. An index that does not match its sequence is built anew.
"""

from __future__ import annotations

from itertools import accumulate, cycle, islice
from operator import mul
from typing import Any

from ..errors import ConfigError
from ..types import Draft, Sequence, Tree, chain
from . import Drafter, DraftRequest, Traits, Workspace, register

DOUBT = 1.9  # after m matching tokens the next one matches with probability m / (m + DOUBT), as measured
CHECKED = 8  # tokens compared to see whether an index still matches its sequence
MAX_SEQUENCES = 4096  # indexes kept; only a caller that never calls `end` reaches this bound


@register("ngram")
class NGram(Drafter):
    """Options: `ngram_max` (4) and `ngram_min` (2), the n-gram sizes; vLLM's `prompt_lookup_max` / `_min` work too."""

    traits = Traits(
        options=("ngram_max", "ngram_min", "prompt_lookup_max", "prompt_lookup_min"), dry=True, late=True,
        watches=False, auto=lambda workspace: True,
    )  # fmt: skip

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        high = int(space.option("ngram_max", "prompt_lookup_max", default=4))
        low = int(space.option("ngram_min", "prompt_lookup_min", default=min(2, high)))
        if not 1 <= low <= high:
            raise ConfigError(f"ngram_min is {low} and ngram_max is {high}; choose 1 <= ngram_min <= ngram_max.")
        self._sizes = range(high, low - 1, -1)  # longest first: a longer match is right more often
        self._indexes: dict[int, NGramIndex] = {}  # by sequence id

    def record(self, rounds: Any) -> None:
        from ..backends.cuda.rounds import Lookup  # needs triton

        rounds.lookup = Lookup(self._sizes[-1], self._sizes[0], survival, self.name)

    def draft(self, request: DraftRequest) -> Draft:
        pairs = zip(request.seqs, request.budgets, strict=True)
        return Draft.pack(self._chain(seq, budget) for seq, budget in pairs)

    def end(self, seq: Sequence) -> None:
        self._indexes.pop(seq.id, None)

    def _chain(self, seq: Sequence, budget: int) -> Tree:
        if budget <= 0:
            return chain([])
        index = self._index(seq)
        for n in self._sizes:
            tokens = index.continuation(tuple(seq.tokens[-n:]), budget)
            if tokens:
                return chain(tokens, survival(n, len(tokens)), source=self.name)
        return chain([])

    def _index(self, seq: Sequence) -> NGramIndex:
        """The sequence's index, up to date with its tokens."""
        index = self._indexes.get(seq.id)
        if index is None or not index.matches(seq):
            index = self._indexes[seq.id] = NGramIndex(seq, self._sizes)
            if len(self._indexes) > MAX_SEQUENCES:
                del self._indexes[next(iter(self._indexes))]
        index.update()
        return index


class NGramIndex:
    """For each n-gram of one sequence, the position of the token that followed its latest occurrence."""

    def __init__(self, seq: Sequence, sizes: range) -> None:
        self.tokens, self.source, self.sizes = seq.tokens, seq.source, sizes  # the sequence's own lists; tokens grow
        self.in_tokens: dict[tuple[int, ...], int] = {}
        self.in_source = positions_after(seq.source, 0, sizes)
        self.indexed = 0  # how many tokens are indexed
        self.last: list[int] = []  # the last CHECKED of them

    def matches(self, seq: Sequence) -> bool:
        """Whether it was built from these very lists, and the last indexed tokens have not been rewritten."""
        same = seq.tokens is self.tokens and seq.source is self.source
        return same and seq.tokens[max(self.indexed - CHECKED, 0) : self.indexed] == self.last

    def update(self) -> None:
        """Index new tokens. An n-gram is indexed once a token follows it, so the end of the text never finds itself."""
        self.in_tokens |= positions_after(self.tokens, self.indexed, self.sizes)
        self.indexed, self.last = len(self.tokens), self.tokens[-CHECKED:]

    def continuation(self, ngram: tuple[int, ...], budget: int) -> list[int]:
        """The tokens that followed this n-gram, at most `budget`; empty if it has not occurred."""
        if (start := self.in_tokens.get(ngram)) is not None:
            # At the end of the text the copy continues into itself: after "abab" comes "abab".
            return list(islice(cycle(self.tokens[start : start + budget]), budget))
        if (start := self.in_source.get(ngram)) is not None:
            return self.source[start : start + budget]
        return []


def survival(match: int, tokens: int) -> list[float]:
    """Of so many tokens after a match of this length: each one that is right makes the match longer, and the next one
    likelier."""
    return list(accumulate((m / (m + DOUBT) for m in range(match, match + tokens)), mul))


def positions_after(tokens: list[int], start: int, sizes: range) -> dict[tuple[int, ...], int]:
    """For each n-gram followed by a token at `start` or later, the position of its latest such token."""
    return {tuple(tokens[i - n : i]): i for i in range(start, len(tokens)) for n in sizes if n <= i}
