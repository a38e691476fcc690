"""When a chain of a drafter's own passes is long enough.

One more token takes one more pass of the drafter and one more row of the target's; it is worth that when it survives
often enough. Prices are the controller's; what a pass takes is read off the step's own clock. Stopping early changes
how much is drafted, never what: the shorter chain is the beginning of the longer one.
"""

from __future__ import annotations

from ...types import Step, Tree
from .. import Prices

UNKNOWN = 0.3  # the floor before anything is known: a first chain that is too long would look like a dear drafter
ROWS = 4  # what one more row costs is measured over so many: the first ones may be free


class Pace:
    """What a drafter knows about its own passes."""

    def __init__(self, given: float | None = None) -> None:
        self.given = given  # a floor that somebody has set by hand
        self.seconds: float | None = None  # of one pass
        self.confidence = 0.6  # of a token after the first, in its own words

    def floor(self, prices: Prices | None) -> float:
        """The survival that the last token must have for the next one to be worth its pass."""
        if self.given is not None:
            return self.given
        if prices is None:
            return 0.0
        if self.seconds is None:
            return UNKNOWN
        cost = prices.speed * self.seconds + prices.price(ROWS) / ROWS
        return min(cost / max(self.confidence, 0.05), 1.0)

    def observe(self, step: Step, passes: int) -> None:
        """So many passes were made for this step's draft."""
        if not passes or any(turn.feed > 1 for turn in step.turns):  # it has read a prompt as well
            return
        each = step.clock["draft"] / passes
        known = each if self.seconds is None else self.seconds
        self.seconds = known + 0.1 * (min(each, 2 * known) - known)  # a hiccup is not a price

    def heard(self, tree: Tree) -> None:
        """How sure the drafter was of each token after the first."""
        for before, after in zip(tree.survival or (), (tree.survival or ())[1:], strict=False):
            if before > 0:
                self.confidence += 0.02 * (after / before - self.confidence)
