"""Plain decoding: the empty draft, so that the baseline runs the same step."""

from __future__ import annotations

from ..types import Draft
from . import Drafter, DraftRequest, Traits, register


@register("off")
class Off(Drafter):
    """Never proposes anything."""

    traits = Traits(options=())

    def draft(self, request: DraftRequest) -> Draft:
        return Draft.empty(len(request.seqs))
