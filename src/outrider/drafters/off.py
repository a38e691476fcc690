"""The empty draft: plain decoding is a drafter too, so that both run the same step."""

from __future__ import annotations

from ..types import Draft, Sequence
from . import Drafter, register


@register("off")
class Off(Drafter):
    """Never proposes anything."""

    takes = ()

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        return Draft.empty(len(seqs))
