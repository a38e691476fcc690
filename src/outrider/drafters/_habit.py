"""What is known of a drafter that costs passes: what it usually claims, what asking it takes, when to try it again.

A call takes what it takes for so many sequences, and reading: tokens that the drafter has not looked at yet, a whole
prompt when it is asked for the first time. That is an investment, which has to come back while the answer lasts.
Nothing here knows a drafter; it sees chances, counts and seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..control.acceptance import AcceptanceStats
from ..control.backoff import FIRST_PAUSE, LONGEST_PAUSE

CLAIM = 0.5  # the survival of a node whose drafter says nothing about it, for each depth
FORGET = 0.99  # how much of a price is believed a step later, when nobody was asked
PATIENCE, LONGEST = FIRST_PAUSE, LONGEST_PAUSE  # steps before a drafter that was not worth asking is tried again
LATELY = 4  # tokens that it has not read, of each sequence, at an ordinary call: those of the last steps
STAYS = 32  # steps that an answer is expected to go on for, if it may
FIRST = 4  # tokens of a first draft, where the drafter does not leave off by itself
TRIALS = 0.02  # part of the tokens made since the last trial that the next one may cost


@dataclass
class Habit:
    """What a costly drafter usually claims, and what asking it takes: a call, or each token of a blind one's."""

    claims: list[float] = field(default_factory=lambda: [CLAIM**i for i in range(1, 5)])  # by depth, over all chains
    prices: dict[int, float] = field(default_factory=dict)  # by sequences in powers of two: seconds
    reading: float | None = None  # seconds for each token that it has to catch up with
    drafts: int = 0  # heard, ever
    told: AcceptanceStats = field(default_factory=AcceptanceStats)  # what became of drafts that claimed nothing
    longest: int = 0  # tokens of such a draft, ever
    made: float = 0.0  # tokens since the last trial

    def heard(self, chances: list[float]) -> None:
        """These were the claims of its latest draft, likeliest first; what it did not draft counts as nothing."""
        self.drafts += 1
        quick = max(0.05, 1 / (self.drafts + 2))  # the first ones tell most
        self.claims += [0.0] * (len(chances) - len(self.claims))
        for depth, known in enumerate(self.claims):
            claim = chances[depth] if depth < len(chances) else 0.0
            self.claims[depth] = known + quick * (claim - known)

    def usual(self, room: int) -> list[float]:
        """The survival to expect at each depth: what it claims, or what became of it where it claims nothing."""
        return self.told.chain_survival(room) if self.told.added else self.claims[:room]

    def took(self, seconds: float, sequences: int, unread: int) -> None:
        """A call for so many sequences, which had so many tokens in all to read first."""
        size, late = sequences.bit_length(), unread - LATELY * sequences
        if late > 0:
            each = max(seconds - self.price(sequences), 0.0) / (late if self.prices else unread)
            known = each if self.reading is None else self.reading
            self.reading = known + 0.3 * (min(each, 3 * known) - known)
        else:
            known = self.prices.get(size, seconds)
            self.prices[size] = known + 0.1 * (min(seconds, 3 * known) - known)  # a hiccup is not a price

    def rested(self) -> None:
        """It was not asked: a price from a busy moment should not keep it silent for ever."""
        for size in self.prices:
            self.prices[size] *= FORGET

    def price(self, sequences: int) -> float:
        """Seconds of a call for so many; where that is not known yet, of one for the nearest number. 0: never asked."""
        size = sequences.bit_length()
        if size not in self.prices and self.prices:
            size = min(self.prices, key=lambda known: (abs(known - size), known))
        return self.prices.get(size, 0.0)

    def reading_price(self, unread: int, room: int) -> float:
        """Seconds in each step, for as long as an answer with so much room is expected to go on."""
        late = max(unread - LATELY, 0)
        return (self.reading or 0.0) * late / max(min(room, STAYS), 1)

    def may_try(self, cost: float, tokens: int) -> bool:
        """So many tokens are made in this step: has enough been made since the last trial to afford one?"""
        self.made += tokens
        return cost <= TRIALS * self.made


@dataclass
class Wait:
    """How long a costly drafter has been left alone by a sequence, and how long it may be."""

    idle: int = 0
    patience: int = PATIENCE

    @property
    def over(self) -> bool:
        return self.idle >= self.patience

    def again(self) -> None:
        """It is tried now: the next wait is twice as long."""
        self.idle, self.patience = 0, min(2 * self.patience, LONGEST)
