"""Seconds of a draft call, learnt from the step's clock. It does not know what a drafter does in them."""

from __future__ import annotations

from collections import defaultdict


class Line:
    """a + b · k by least squares over recent samples; through the origin while they are all at one k."""

    FADE = 0.95  # the last twenty samples count
    CLIP = 3.0  # a sample counts as at most so many times its estimate: a descheduled thread says nothing

    def __init__(self) -> None:
        self.n = self.k = self.y = self.kk = self.ky = 0.0  # sums

    def add(self, k: int, seconds: float) -> None:
        if self.n:
            seconds = min(seconds, self.CLIP * self(k))
        new = (1.0, k, seconds, k * k, k * seconds)
        old = (self.n, self.k, self.y, self.kk, self.ky)
        self.n, self.k, self.y, self.kk, self.ky = (self.FADE * a + b for a, b in zip(old, new, strict=True))

    def __call__(self, k: float) -> float:
        return self.y / self.n + self.slope * (k - self.k / self.n)

    @property
    def slope(self) -> float:
        mean, seconds = self.k / self.n, self.y / self.n
        variance, most = self.kk / self.n - mean * mean, seconds / mean
        return most if variance < 0.01 else min(max((self.ky / self.n - mean * seconds) / variance, 0.0), most)


class DraftCosts:
    """Seconds of a call by the nodes that it may draft for each sequence, for each size of batch in powers of two."""

    def __init__(self) -> None:
        self.lines: dict[int, Line] = defaultdict(Line)  # by the bit length of the number of sequences
        self.count = 0  # calls

    def add(self, sequences: int, k: int, seconds: float) -> None:
        self.count += 1
        self.foresee(sequences, k, seconds)

    def foresee(self, sequences: int, k: int, seconds: float) -> None:
        """A call that was timed before anybody asked for a draft."""
        self.lines[sequences.bit_length()].add(k, seconds)

    def line(self, sequences: int) -> Line:
        """That of the nearest known batch, if anything is known."""
        size = sequences.bit_length()
        return self.lines[min(self.lines, key=lambda known: abs(known - size))]
