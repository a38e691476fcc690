"""Pauses, in steps, between trials of a drafter that does not pay. Each failed trial lengthens the next pause."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median_low

FIRST_PAUSE, LONGEST_PAUSE = 24, 384  # steps


class Backoff:
    """A trial is due after `pause` idle steps. Each trial multiplies the pause by `factor`, up to `longest` steps."""

    def __init__(self, first: int = FIRST_PAUSE, longest: int = LONGEST_PAUSE, factor: int = 2) -> None:
        self.first, self.longest, self.factor = first, longest, factor
        self.idle, self.pause = 0, first

    @property
    def due(self) -> bool:
        return self.idle >= self.pause

    def tried(self) -> None:
        """A trial starts."""
        self.idle, self.pause = 0, min(self.factor * self.pause, self.longest)

    def reset(self) -> None:
        """A trial succeeded."""
        self.pause = self.first


class HostBackoff:
    """Pauses drafting where it gains less than the host time that it exposes.

    While nothing is drafted, a device may start the next pass before the host has read the last one (passes are
    *pipelined*), which hides host work. A draft request exposes it. Its seconds and the recent gain of drafts are
    learnt. Without pipelining, this serves a batch whose drafts are cheap for one sequence but not for all together.
    """

    FADE = 0.9
    MARGIN = 0.02  # tokens for each sequence that drafts must gain beyond their cost
    FIRST, LONGEST, FACTOR = 4, 256, 4  # pauses in steps
    SHARE = 0.015  # share of a sequence's tokens that trials may cost; in a batch a trial costs all sequences
    EMPTY, EMPTY_PAUSE = 3, 16  # empty drafts before a pause and its steps, if parts of a drafter make no dry drafts
    SAMPLES = 9  # recent steps; their median is the host's time, so that an outlier does not count

    def __init__(self) -> None:
        self.pipelined = False
        self.batched = False  # not pipelined, and several sequences share a step
        # (log2 of the batch, hidden) -> host seconds of recent steps that no pass covered
        self.host: dict[tuple[int, bool], deque[float]] = defaultdict(lambda: deque(maxlen=self.SAMPLES))
        self.gain = 0.0  # recent tokens per step with a draft request, less the cost of their rows
        self.trials = 0  # steps with a draft request since the last pause or `reset`
        self.several = False  # the last of them had several sequences
        self.failed = 0  # the last of them in a row without a gain
        self.lost = 0.0  # tokens that each sequence lost by them
        self.backoff = Backoff(self.FIRST, self.LONGEST, self.FACTOR)
        self.left = 0  # steps of the current pause
        self.paused = False  # in this step
        self.empty = 0  # draft requests in a row that returned no node

    def next_step(self) -> bool:
        """Counts one step; whether drafts may be requested in it."""
        self.paused = self.left > 0
        self.left -= self.paused
        return not self.paused

    def add_host_time(self, batch: int, hidden: bool, seconds: float) -> None:
        """Host time of a step that no pass covered; `hidden`: its pass had been started ahead."""
        self.host[batch.bit_length(), hidden].append(seconds)

    def add_gain(self, batch: int, gain: float, speed: float) -> None:
        """Tokens that drafts gained in a step, less their cost on the device; `speed` is in tokens per second."""
        self.trials += 1
        self.gain += max(1 - self.FADE, 1 / self.trials) * (gain - self.gain)
        needed = self.needed(batch, speed)
        self.lost += (needed - gain) / batch
        self.several = batch > 1
        self.failed = self.failed + 1 if gain <= 0 else 0
        if gain > needed:
            self.backoff.reset()
        # Evidence is counted in sequences times steps.
        enough = 12 if self.backoff.pause == self.FIRST and self.failed < self.trials else 5
        if self.trials * batch >= enough and self.gain < needed:
            self.pause()

    def needed(self, batch: int, speed: float) -> float:
        """Tokens that drafts must gain in a step."""
        return speed * self.exposed(batch) + self.MARGIN * batch if self.pipelined else 0.0

    def exposed(self, batch: int) -> float:
        """Seconds of host work that a draft request exposes, because the next pass cannot be started ahead."""
        visible, hidden = (median_low(self.host[batch.bit_length(), state] or [0.0]) for state in (False, True))
        return max(visible - hidden, 0.0)

    def pause(self) -> None:
        """A longer pause than the last one, but no longer than it takes to make up for the trials: texts change."""
        if self.pipelined or self.batched:
            measured = self.pipelined and self.trials > 0 and not self.several
            limit = max(int(self.lost / self.SHARE), self.FIRST) if measured else self.LONGEST
            self.left = min(self.backoff.pause, limit)
            self.backoff.tried()
            self.trials, self.failed, self.lost = 0, 0, 0.0

    def add_empty(self, partly: bool) -> bool:
        """A draft was empty, which is no failed trial, and dry drafts go on during a pause (partly: not of all parts of
        the drafter). Returns whether a pause starts."""
        self.empty += 1
        if self.empty >= (self.EMPTY if partly else 1):
            self.left = self.EMPTY_PAUSE if partly else self.LONGEST
        return self.left > 0

    def reset(self) -> None:
        """New sequences arrived: what was learnt about pauses may not hold for them."""
        self.backoff.reset()
        self.left, self.trials, self.failed, self.lost = 0, 0, 0, 0.0
