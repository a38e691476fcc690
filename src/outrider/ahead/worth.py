"""Whether drafting ahead pays: tokens per second with it and without it, each tried now and then.

Ahead, a round's drafting is hidden behind the target's pass, but it may take cores or a part of the device from that
very pass. What that costs cannot be computed; it is measured. Both ways are tried for a while, the faster one is kept,
and the other is tried again after longer and longer whiles.
"""

from __future__ import annotations

from collections import defaultdict


class Worth:
    """Ahead or not? One answer for each step."""

    TRIAL, FIRST, LONGEST = 24, 96, 3072  # steps of a trial, and between two of them
    FADE = 0.97
    MARGIN = 1.01  # the other way must be faster by so much to be changed to

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self.seconds: dict[tuple[int, bool], float] = defaultdict(float)  # (batch in powers of two, ahead?)
        self.tokens: dict[tuple[int, bool], float] = defaultdict(float)
        self.steps: dict[tuple[int, bool], int] = defaultdict(int)
        self.batch = 0
        self.ahead = True
        self.left, self.patience = self.TRIAL, self.FIRST  # steps until we look again

    def took(self, batch: int, ahead: bool, tokens: int, seconds: float) -> None:
        """A step of so many sequences brought so many tokens."""
        if batch.bit_length() != self.batch:
            self.batch = batch.bit_length()
            self.left, self.patience = self.TRIAL, self.FIRST
        key = (self.batch, ahead)
        self.steps[key] += 1
        if self.steps[key] > 2:  # a first step has prompts to read and pages to touch
            self.seconds[key] = self.FADE * self.seconds[key] + seconds
            self.tokens[key] = self.FADE * self.tokens[key] + tokens
        self.left -= 1
        if not self.always and self.left <= 0:
            self._look()

    def speed(self, ahead: bool) -> float | None:
        """Tokens per second of late, with as many sequences as now."""
        key = (self.batch, ahead)
        return self.tokens[key] / self.seconds[key] if self.seconds[key] else None

    def _look(self) -> None:
        mine, other = self.speed(self.ahead), self.speed(not self.ahead)
        if mine is None or other is None:  # only one way was tried so far
            self.ahead, self.left = not self.ahead, self.TRIAL
        elif self.left > -self.patience and mine * self.MARGIN >= other:
            pass  # the better one, and its time is not over
        elif other > mine * self.MARGIN:
            self.ahead, self.left = not self.ahead, 0
        else:  # a short trial of the other, rarer each time
            self.ahead, self.left, self.patience = not self.ahead, self.TRIAL, min(2 * self.patience, self.LONGEST)

    @property
    def why(self) -> str:
        """In words."""
        ahead, now = self.speed(True), self.speed(False)
        if self.always:
            return "drafting ahead always, as asked"
        if ahead is None or now is None:
            return "drafting ahead is being tried"
        chosen = "ahead" if ahead >= now else "just in time"
        return f"{ahead:.0f} tokens/s drafting ahead, {now:.0f} just in time: {chosen} is kept"
