"""How much to draft: the cost of a pass, the acceptance of drafts, and the decision between them.

Promise: nothing is drafted where plain decoding is expected to be faster, and the reason is given in words. It sees
counts, seconds and probabilities, never tokens or text.
"""

from __future__ import annotations

from typing import Protocol

from ..engine.drafter import Prices, Traits
from ..types import Draft, Sequence, Step, Turn


class Controller(Protocol):
    why: str  # the reason for the last step's draft, in words

    @property
    def steady(self) -> bool:
        """Nothing will be drafted in the next step either, as far as can be told."""
        ...

    @property
    def stop_below(self) -> float:
        """A drafter that knows its chances may stop where they are below this."""
        ...

    @property
    def prices(self) -> Prices | None:
        """Prices of the step at hand; None: K is fixed."""
        ...

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        """How many nodes may be drafted for each sequence, by a drafter with these traits."""
        ...

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        """Those of the drafted nodes that are worth their rows."""
        ...

    def dry_turns(self, turns: list[Turn]) -> list[Turn]:
        """Sequences to draft for without verifying it, because this step's pass has been started already."""
        ...

    def observe_dry(self, turns: list[Turn], draft: Draft) -> None:
        """What was drafted for them."""
        ...

    def observe(self, step: Step) -> None: ...

    def end(self, seq: Sequence) -> None:
        """The sequence is finished or cancelled: nothing about it need be remembered."""
        ...
