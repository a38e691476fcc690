"""What drafting costs, learnt apart for each way of doing it.

One drafter may have several ways (ahead of the verdict, or just in time), and what is learnt of one says nothing about
another. It sees seconds and counts, never tokens; what is done about them is the controller's business.
"""

from __future__ import annotations

from typing import Any

from .costs import Asking, Threshold

LEARNT = ("draft_node", "draft_call", "draft_most", "clocked", "lead", "threshold", "asking")


class Ways:
    """Prices of the way at hand; those of the others are put by."""

    def __init__(self) -> None:
        self._last, self._others = "", dict[str, dict[str, Any]]()
        self._price_unknown()

    def _price_unknown(self) -> None:
        """All that is learnt of one way of drafting, and says nothing about another."""
        # Seconds, once the drafter has been asked. A drafting model makes one pass for the k-th node of every tree:
        # its price is that of one node deeper, whatever the batch.
        self.draft_node: float | None = None
        self.draft_call = 0.0
        self.draft_most: float | None = None  # a call for k_max nodes
        self.clocked = False  # by a device, which has no busy moments?
        self.lead = 1.0  # how many times faster than plain decoding things go of late
        self.threshold, self.asking = Threshold(), Asking()

    def _switch_mode(self, mode: str) -> None:
        if mode == self._last:
            return
        self._others[self._last] = {name: getattr(self, name) for name in LEARNT}
        self._last = mode
        self._price_unknown()
        vars(self).update(self._others.pop(mode, {}))

    def _took(self, seconds: float, nodes: int, all_there_may_be: bool) -> None:
        """A draft took so long; its largest tree had so many nodes, and perhaps as many as anybody may ask for."""
        each = seconds / max(nodes, 1)
        if self.draft_node is None:  # the first time tells most
            self.draft_node, self.draft_call = each, seconds
        self.draft_node += 0.2 * (min(each, 3 * self.draft_node) - self.draft_node)  # a hiccup is not a price
        self.draft_call += 0.2 * (min(seconds, 3 * self.draft_call) - self.draft_call)
        if all_there_may_be:
            known = seconds if self.draft_most is None else self.draft_most
            self.draft_most = known + 0.2 * (min(seconds, 3 * known) - known)
