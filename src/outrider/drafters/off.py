"""Plain decoding: nothing is drafted.

The baseline runs the same step as every drafter, with empty drafts.
"""

from __future__ import annotations

from ..types import Draft
from . import Drafter, DraftRequest, Traits, register


@register("off")
class Off(Drafter):
    """No options."""

    traits = Traits(options=(), late=True, watches=False)

    def draft(self, request: DraftRequest) -> Draft:
        return Draft.empty(len(request.seqs))
