"""What a draft costs in the step at hand, in tokens that would be made meanwhile.

It knows the step's rows and what passes cost; who drafts, and how well, is the controller's business.
"""

from __future__ import annotations

from ..types import Turn
from .costs import Costs

MARGIN = 0.03  # tokens that a draft must bring each sequence, beyond its rows: less is lost in small costs
# Worth of a token in a batch where every row costs: who is ahead of the others ends early, and what that saves is one
# row of later passes, not a share of all they cost. On a device that pads its passes, rows are either free or dear.
EARLY = 0.95


class Pass:
    """What more rows cost in the pass at hand, in tokens that are made meanwhile.

    λ, the speed they are made at, is plain decoding's with so many sequences, times the lead over it.
    """

    def __init__(self, turns: list[Turn], costs: Costs, lead: float, most: int) -> None:
        self.sequences, self.most = len(turns), most
        self.deciding = sum(turn.whole for turn in turns)  # those that get a verdict
        self.rows = sum(turn.feed for turn in turns)
        self.costs = costs
        self._table: list[float] | None = None  # made when a price is asked for: most steps ask for none
        self.plain = costs(self.rows, self.sequences)
        several = max(self.deciding, 1)
        worth = EARLY if several > 1 and not costs.padded else 1.0
        self.speed = lead * several / costs(several, several) / worth  # λ

    def price(self, more: int) -> float:
        """λ · (t(rows + more) − t(rows)), for up to `most` more rows."""
        if self._table is None:
            self._table = self.costs.stairs(self.rows + self.most, self.sequences)
        return self.speed * (self._table[self.rows + more] - self.plain)

    def worthy(self, hopes: list[float], needed: float) -> int:
        """How many of these nodes, the likeliest first, bring most beyond what their rows cost; 0: not what is needed.

        Costs may be stairs, so that one more node loses and three more win: all numbers are looked at.
        """
        best, gain, tokens = 0, needed, 0.0
        for n, hope in enumerate(hopes, start=1):
            tokens += hope
            value = tokens - self.price(n)
            if value > gain:
                best, gain = n, value
        return best

    def break_even(self, each: int, deeper: float = 0.0) -> float:
        """How likely one more row for each of so many must be, when the drafter takes `deeper` tokens for them."""
        return max((self.price(each) + deeper) / each, 0.0)

    @property
    def margin(self) -> float:
        """Expected tokens that a draft must bring all sequences together to be better than none."""
        return MARGIN * self.deciding

    @property
    def hopeless(self) -> bool:
        """Would even a draft that is sure and costs nothing lose? Lines and stairs have their best at their ends."""
        last = self.rows + self.most
        ends = [(row, cost) for row, cost in zip(*self.costs.points(self.sequences), strict=True) if row < last]
        ends.append((last, self.costs(last, self.sequences)))
        return all(
            row - self.rows - self.speed * (cost - self.plain) <= self.margin for row, cost in ends if row > self.rows
        )
