"""How much to draft: the cost of a pass, the cost of drafting, the acceptance of drafts, and the decision.

Promise: nothing is drafted where plain decoding is expected to be faster, what trials may cost is bounded, and the
reason is given in words. It sees counts, seconds and probabilities; of tokens only whether two are equal.
"""

from __future__ import annotations

from ..engine.drafter import Prices, Traits
from ..types import Draft, Sequence, Step, Turn


class Controller:
    """Steps are observed in order, but `budget` may be called for a later step before `observe` for an earlier one."""

    why = ""  # the reason for this step's draft, in words
    prices: Prices | None = None  # of this step; None: K is fixed
    stop_below = 0.0  # drafters that know the survival of a node stop below this

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        """Limits the nodes that a drafter with these traits may draft for each sequence."""
        return turns

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        """The drafted nodes that are worth their rows."""
        return draft

    def observe(self, step: Step) -> None:
        """The target has verified."""

    def end(self, seq: Sequence) -> None:
        """The sequence is finished or cancelled: what is stored about it can go."""
