"""Predicted outputs: what follows in the text that the request itself expects as its answer.

It promises a chain: what stands in the prediction after the place where the answer stands. Without a prediction, and
where the answer has left it, it says nothing. Every request that brings a prediction is drafted for from it first,
whichever drafter is at work (`brought.py`); by its own name this is all that is drafted.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from ..types import Draft, Sequence, Tree, chain
from . import Drafter, register

DOUBT = 0.5  # after m equal tokens the next one is taken to be equal (m + 1) / (m + 1 + DOUBT) of the time


@register("prediction")
class FromPrediction(Drafter):
    """No options: what is predicted is `SamplingParams.prediction`."""

    takes = ()

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        return Draft.pack(foretold(seq, room) for seq, room in zip(seqs, budget, strict=True))


def foretold(seq: Sequence, room: int) -> Tree:
    """What a sequence's prediction says next, likelier the longer it has been right."""
    if seq.prediction is None or room <= 0:
        return chain([])
    tokens, run = seq.prediction.ahead(room), seq.prediction.run
    survival = accumulate((m / (m + DOUBT) for m in range(run + 1, run + 1 + len(tokens))), mul)
    return chain(tokens, list(survival), source=FromPrediction.name)
