"""How much to draft: the cost of a pass, the acceptance of drafts, and the decision between them.

Promise: nothing is drafted where plain decoding is expected to be faster, and the reason is given in words. It sees
counts, seconds and probabilities, never tokens or text.
"""

from __future__ import annotations

from ..engine.drafter import Prices, Traits
from ..types import Draft, Sequence, Step, Turn


class Controller:
    why = ""  # the reason for this step's draft, in words
    steady = False  # nothing is expected to be drafted in the next step either
    stop_below = 0.0  # drafters that know the survival of a node stop below this

    @property
    def prices(self) -> Prices | None:
        """Prices of this step; None: K is fixed."""
        return None

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        """Limits the nodes that a drafter with these traits may draft for each sequence."""
        return turns

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        """The drafted nodes that are worth their rows."""
        return draft

    def dry_turns(self, turns: list[Turn]) -> list[Turn]:
        """Sequences to make dry drafts for, because this step's pass has been started already."""
        return []

    def observe_dry(self, turns: list[Turn], draft: Draft) -> None:
        """The dry drafts of these sequences."""

    def observe(self, step: Step) -> None:
        """The target has verified."""

    def end(self, seq: Sequence) -> None:
        """The sequence is finished or cancelled: what is stored about it can go."""
