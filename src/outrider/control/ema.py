"""A moving average that outliers barely move.

A sample counts as at most `clip` times the average, so that one outlier (a descheduled thread, a cold cache) moves it
little. Samples are positive, such as seconds.
"""

from __future__ import annotations


def moved(mean: float, sample: float, rate: float, clip: float = 3.0) -> float:
    """The average after one more sample."""
    return mean + rate * (min(sample, clip * mean) - mean)


class Ema:
    """Such an average. The first sample is taken as it is."""

    def __init__(self, rate: float, clip: float = 3.0) -> None:
        self.rate, self.clip = rate, clip
        self.value: float | None = None  # None: no sample yet

    def add(self, x: float) -> float:
        """Returns the new average."""
        self.value = moved(x if self.value is None else self.value, x, self.rate, self.clip)
        return self.value
