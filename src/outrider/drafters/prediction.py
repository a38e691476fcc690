"""Predicted outputs: drafts what the request itself expects as its answer (`SamplingParams.prediction`).

It promises the chain that follows in the prediction where the answer stands in it. Without a prediction, and where the
answer has left it, it drafts nothing. Every request with a prediction is drafted for from it first, whichever drafter
is used (`engine.request_drafts`); under its own name nothing else is drafted.
"""

from __future__ import annotations

from ..engine.request_drafts import predicted_draft
from ..types import Draft
from . import Drafter, DraftRequest, Traits, register


@register("prediction")
class FromPrediction(Drafter):
    """No options: what is predicted is `SamplingParams.prediction`."""

    traits = Traits(options=(), dry=True)

    def draft(self, request: DraftRequest) -> Draft:
        pairs = zip(request.seqs, request.budgets, strict=True)
        return Draft.pack(predicted_draft(seq, budget) for seq, budget in pairs)
