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
    ENOUGH, CLEAR = 6, 1.25  # steps that tell, where one way is faster by so much
    OFTEN = 0.5  # ahead is no way of its own where less is prepared: nobody asks for drafts at its price
    RARER, MUCH_RARER = 2, 4  # how much longer it is until the next trial: after one, and after one that was clear

    def __init__(self, always: bool = False, first: bool = True) -> None:
        """first: begin with drafting ahead."""
        self.always = always
        self.seconds: dict[tuple[int, bool], float] = defaultdict(float)  # (batch in powers of two, ahead?)
        self.tokens: dict[tuple[int, bool], float] = defaultdict(float)
        self.steps: dict[tuple[int, bool], int] = defaultdict(int)
        self.prepared = 1.0  # share of the steps ahead in which anything was prepared, of late
        self.batch = 0
        self.ahead = first
        self.left, self.patience = self.TRIAL, self.FIRST  # steps until we look again

    def took(self, batch: int, ahead: bool, tokens: int, seconds: float, prepared: bool = True) -> None:
        """A step of so many sequences brought so many tokens; `prepared`: for the next one somebody did prepare."""
        if batch.bit_length() != self.batch:
            self.batch = batch.bit_length()
            self.left, self.patience = self.TRIAL, self.FIRST
        key = (self.batch, ahead)
        self.steps[key] += 1
        if self.steps[key] > 2:  # a first step has prompts to read and pages to touch
            self.seconds[key] = self.FADE * self.seconds[key] + seconds
            self.tokens[key] = self.FADE * self.tokens[key] + tokens
            self.prepared += 0.1 * (prepared - self.prepared) if ahead else 0.0
        self.left -= 1
        if self._lost:
            self.left, self.patience = 0, min(self.MUCH_RARER // self.RARER * self.patience, self.LONGEST)
        if not self.always and self.left <= 0:
            self._look()

    @property
    def _lost(self) -> bool:
        """Whether a trial need not go on."""
        mine, other = self.speed(self.ahead), self.speed(not self.ahead)
        enough = self.left > 0 and self.steps[self.batch, self.ahead] >= 2 + self.ENOUGH
        return enough and mine is not None and other is not None and mine * self.CLEAR < other

    def speed(self, ahead: bool) -> float | None:
        """Tokens per second of late, with as many sequences as now."""
        key = (self.batch, ahead)
        if not self.seconds[key]:
            return None
        return 0.0 if ahead and self.prepared < self.OFTEN else self.tokens[key] / self.seconds[key]

    def _look(self) -> None:
        mine, other = self.speed(self.ahead), self.speed(not self.ahead)
        if mine is None or other is None:  # only one way was tried so far
            self._try()
        elif self.left > -self.patience and mine * self.MARGIN >= other:
            pass  # the better one, and its time is not over
        elif other > mine * self.MARGIN:
            self.ahead, self.left = not self.ahead, 0
        else:  # a short trial of the other, rarer each time
            self._try()
            self.patience = min(self.RARER * self.patience, self.LONGEST)

    def _try(self) -> None:
        """The other way for a while; what it was like long ago is forgotten."""
        self.ahead, self.left, key = not self.ahead, self.TRIAL, (self.batch, not self.ahead)
        for memory in (self.seconds, self.tokens, self.steps):
            memory.pop(key, None)
        self.prepared = 1.0

    @property
    def why(self) -> str:
        """In words."""
        ahead, now = self.speed(True), self.speed(False)
        if self.always:
            return "drafting ahead always, as asked"
        if ahead is None or now is None:
            return "drafting ahead is being tried"
        if not ahead:
            return f"{now:.0f} tokens/s just in time, and nothing is asked for at the price of drafting ahead"
        chosen = "ahead" if ahead >= now else "just in time"
        return f"{ahead:.0f} tokens/s drafting ahead, {now:.0f} just in time: {chosen} is kept"
