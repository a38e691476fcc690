"""A draft model whose tokens are spoiled on the device, to measure the speed at a chosen acceptance rate.

The twin's draft model computes the same function as its target, so that its acceptance rate is .99. `Spoiled` replaces
a share of the drafted tokens by wrong ones where they were chosen, without reading them: everything else (the draft's
passes, the verifying pass, the controller) is as with the draft model itself.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider import Draft
from outrider.drafters import DraftRequest, Workspace
from outrider.drafters.model import SmallModel

NOISE = 1 << 16


class Spoiled(SmallModel):
    """Options: those of `model`, and `spoil`, the share of drafted tokens that are replaced."""

    name = "spoiled"
    traits = replace(SmallModel.traits, options=None, auto=None)

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        generator = torch.Generator().manual_seed(1)
        wrong = torch.rand(NOISE, generator=generator) < float(space.options["spoil"])
        self.noise = wrong.to(space.target.device, torch.long)  # [NOISE] 1: replace this token
        self.at = 0

    def draft(self, request: DraftRequest) -> Draft:
        draft = super().draft(request)
        places = [-1 - token for tree in draft.trees for token in tree.tokens]
        if draft.unread is None or not places:
            return draft
        first, count = min(places), max(places) - min(places) + 1  # one chain is contiguous
        self.at = (self.at + count) % (NOISE - count)
        tokens, vocabulary = draft.unread[first : first + count], self.space.target.config.vocab_size
        tokens.copy_((tokens + self.noise[self.at : self.at + count]) % vocabulary)
        return draft
