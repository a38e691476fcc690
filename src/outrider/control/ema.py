"""A moving average that outliers barely move."""

from __future__ import annotations


class Ema:
    """An exponential moving average of positive samples, such as seconds. The first sample is taken as it is.

    A sample counts as at most `clip` times the average, so that one outlier (a descheduled thread, a cold cache) moves
    it little.
    """

    def __init__(self, rate: float, clip: float = 3.0) -> None:
        self.rate, self.clip = rate, clip
        self.value: float | None = None  # None: no sample yet

    def add(self, x: float) -> float:
        """Returns the new average."""
        old = x if self.value is None else self.value
        self.value = old + self.rate * (min(x, self.clip * old) - old)
        return self.value
