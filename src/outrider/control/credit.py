"""How much drafting may lose, in tokens of plain decoding. Arithmetic on gains; it knows no drafts."""

from __future__ import annotations

import math


class Credit:
    """One account: a first credit for each sequence of the largest batch, SHARE of each token, and what drafts gained.

    A step that risks no more than this if every node is rejected cannot make n tokens more than the first credit +
    SHARE · n tokens slower than plain decoding, whatever a drafter claims: who is always wrong lives on SHARE.
    """

    FIRST = 0.5  # tokens: two drafts of one token on a CPU, any draft on a GPU; 1 % of an answer of 50 tokens
    KNOWN = 1.0  # instead, with a drafter whose acceptance and costs are known before its first call
    SHARE = 0.0095  # of the tokens: one in a hundred may be lost; a little less, for answers too short to earn it back
    SAVED = 4.0  # tokens for each sequence kept beyond the price of full drafts: ten wrong drafts end no success
    DEBT = 0.5  # tokens for each sequence: a call that took longer than all that is a mishap, not a habit

    def __init__(self) -> None:
        self.tokens, self.first, self.sequences, self.largest = 0.0, self.FIRST, 0, 0

    def admit(self, sequences: int, known: bool) -> None:
        """So many run now; known: see KNOWN."""
        first = self.KNOWN if known else self.FIRST
        self.tokens += first * max(sequences - self.largest, 0)
        self.first, self.sequences, self.largest = first, sequences, max(sequences, self.largest)

    def add(self, gain: float, least: float = -DEBT, most: float = math.inf) -> None:
        """Tokens that were gained or lost. A loss leaves each sequence `least`, gains are saved up to `most` each."""
        count, now = self.sequences, self.tokens
        self.tokens = max(min(now + gain, max(now, most * count)), min(now, least * count))
