"""Predicted outputs: drafts the text that the request itself expects as its answer.

The text is `SamplingParams.prediction`. A chain is drafted while the answer follows it, and nothing elsewhere. Every
drafter tries a request's prediction first (`engine.request_drafts`); under this name nothing else is drafted.
"""

from __future__ import annotations

from ..engine.request_drafts import predicted_draft
from ..types import Draft
from . import Drafter, DraftRequest, Traits, register


@register("prediction")
class FromPrediction(Drafter):
    """No options."""

    traits = Traits(options=(), dry=True, late=True)

    def draft(self, request: DraftRequest) -> Draft:
        pairs = zip(request.seqs, request.budgets, strict=True)
        return Draft.pack(predicted_draft(seq, budget) for seq, budget in pairs)
