"""Predicted outputs: a text that the answer is expected to follow, and where the answer stands in it.

An answer that edits a known text follows it for long stretches. While it does, what comes next is known; when it leaves
the text, the place is lost and looked for again with every token: further on, where the last few tokens said stand too.
The fewer they are, the nearer they have to be.

It knows ids only. Where it thinks the answer stands decides what is drafted, never what is said.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate, islice
from operator import mul

from ..types import Sequence, Tree, chain

SURE = 3  # so many equal tokens are looked for in the whole of what lies ahead
NEAR = {2: 64, 1: 8}  # fewer of them only so far ahead
LOOKED_AT = 8  # of the places that so many equal tokens are found at, on either side
DOUBT = 0.5  # after m equal tokens the next one is taken to be equal (m + 1) / (m + 1 + DOUBT) of the time
SOURCE = "prediction"  # of drafts that are a request's prediction
LONG = 6  # so many equal tokens are a place even further back: the answer repeats or reorders


class Prediction:
    """The predicted tokens, how many of them came true, and which one is next."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.place: int | None = 0  # of the next predicted token; None: the answer has left the prediction
        self.run = 0  # how many tokens before it are what was said
        self._floor = 0  # where the answer left it
        self._said: list[int] = []  # the last few
        self._true = bytearray(len(tokens))  # [n] 1: the answer has this token here
        self.came_true = 0  # how many predicted tokens the answer has where they stand
        self._places: dict[tuple[int, ...], list[int]] | None = None

    def hear(self, tokens: list[int]) -> Prediction:
        """These were said next."""
        for token in tokens:
            self._said = [*self._said[1 - LONG :], token]
            if self.place is not None and self.place < len(self.tokens) and self.tokens[self.place] == token:
                self._stand(self.place + 1, self.run + 1)
                continue
            if self.place is not None:
                self._floor, self.run = self.place, 0
                self.place = None
            self._look_ahead()
        return self

    def ahead(self, most: int) -> list[int]:
        """What is expected next."""
        return [] if self.place is None else self.tokens[self.place : self.place + most]

    def _stand(self, place: int, run: int) -> None:
        self.place, self.run = place, run
        start = place - min(run, LONG)
        self.came_true += self._true.count(0, start, place)
        self._true[start:place] = b"\1" * (place - start)

    def _look_ahead(self) -> None:
        """Stand where the longest end of what was said stands, ahead of where the prediction was left."""
        best = max(
            ((self._equal(end), -end) for end in self._ends() if end < len(self.tokens)),
            default=(0, 0),
        )
        if best[0]:
            self._stand(-best[1], best[0])

    def _ends(self) -> list[int]:
        """Places that the last few tokens lead to."""
        if self._places is None:
            self._places = defaultdict(list)
            for end in range(SURE, len(self.tokens) + 1):
                self._places[tuple(self.tokens[end - SURE : end])].append(end)
        found = self._places.get(tuple(self._said[-SURE:]), [])
        left = bisect_right(found, self._floor)
        ends = found[left : left + LOOKED_AT]
        ends += [end for end in found[max(left - LOOKED_AT, 0) : left] if self._equal(end) >= LONG]
        for n, reach in NEAR.items():
            said = self._said[-n:]
            window = range(max(self._floor + 1, n), min(self._floor + reach, len(self.tokens)) + 1)
            near = (end for end in window if len(said) == n and self.tokens[end - n : end] == said)
            ends += islice(near, 1)
        return ends

    def _equal(self, end: int) -> int:
        """How many tokens before this place are the last ones said."""
        n = 0
        while n < min(end, len(self._said)) and self.tokens[end - 1 - n] == self._said[-1 - n]:
            n += 1
        return n


def predicted_draft(seq: Sequence, budget: int) -> Tree:
    """What a sequence's prediction expects next; the longer it has been right, the higher the survival."""
    if seq.prediction is None or budget <= 0:
        return chain([])
    tokens, run = seq.prediction.ahead(budget), seq.prediction.run
    survival = accumulate((m / (m + DOUBT) for m in range(run + 1, run + 1 + len(tokens))), mul)
    return chain(tokens, list(survival), source=SOURCE)
