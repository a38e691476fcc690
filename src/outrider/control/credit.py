"""How much drafting may lose, in tokens of plain decoding. Arithmetic on gains; it knows no drafts."""

from __future__ import annotations

from collections import deque
from statistics import median_low


class Credit:
    """The credit of the sequences that run: `first` of each, SHARE of each emitted token, and what drafts gained.

    A step that risks no more than this if every node is rejected cannot make an answer of n tokens more than
    `first` + SHARE · n tokens slower, whatever a drafter claims. After an answer that lost its first credit the next
    one gets half as much, else RISE times as much, up to `first`: who is always wrong lives on SHARE.
    """

    FIRST = 0.5  # tokens: two drafts of one token on a CPU, any draft on a GPU; 1 % of an answer of 50 tokens
    KNOWN = 1.0  # instead, with a drafter whose acceptance and costs are known before its first call
    SHARE = 0.01  # of the tokens: what may be lost in a long answer
    SAVED = 2.0  # tokens of each sequence kept beyond the price of full drafts: gains pay for some fifty empty drafts
    RISE = 1.25  # a dozen answers without a loss make up for four with one
    LEAST = 1 / 16  # of `first`, after many answers that lost it: a few rows on a GPU
    ANSWERS = 4  # the last ones, most of which must have gained before the next one may risk more than FIRST

    def __init__(self) -> None:
        self.tokens, self.first = 0.0, self.FIRST
        self.trust = 1.0  # share of `first` that the next answer gets
        self.running: set[int] = set()  # sequences
        self.left: deque[float] = deque(maxlen=self.ANSWERS)  # what the last answers had left

    def admit(self, seq_id: int) -> None:
        if seq_id not in self.running:
            self.running.add(seq_id)
            proven = median_low(self.left) if len(self.left) == self.ANSWERS else 0.0
            self.tokens += max(proven, self.trust * self.first)

    def add(self, gain: float, full: float) -> None:
        """A step gained so many tokens, or lost them. `full`: the price of full drafts; no more is saved."""
        most = full + self.SAVED * len(self.running)
        self.tokens = min(self.tokens + gain, max(most, self.tokens))

    def forgo(self, gain: float) -> None:
        """What drafts would have gained that were not verified. Up to `first` that counts as if they had been: bad luck
        with the first drafts must not end the matter."""
        least, most = min(self.tokens, 0.0), max(self.tokens, self.first * len(self.running))
        self.tokens = max(least, min(self.tokens + gain, most))

    def read(self, tokens: float) -> None:
        """A drafter read prompts, once for many steps: that may take half of the first credit, but no more."""
        self.tokens = max(self.tokens - tokens, min(self.tokens, self.first / 2 * len(self.running)))

    def end(self, seq_id: int) -> None:
        """A sequence takes its share of the credit with it; debts stay with those that still run."""
        if seq_id in self.running:
            share = self.tokens / len(self.running)
            self.left.append(share)
            lost = share < self.trust * self.first
            self.trust = max(self.trust / 2, self.LEAST) if lost else min(self.RISE * self.trust, 1.0)
            self.running.remove(seq_id)
            self.tokens = self.tokens - max(share, 0.0) if self.running else 0.0
