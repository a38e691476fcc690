"""A draft model whose tokens are spoiled on the device, to measure the speed at a chosen acceptance rate.

The twin's draft model computes the same function as its target, so that its acceptance rate is .99. `Spoiled` replaces
a share of the drafted tokens by wrong ones in the round, without reading them: everything else (the draft's passes, the
verifying pass, the controller) is as with the draft model itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from outrider.backends.cuda.kernels.rounds import DRAFT
from outrider.drafters.model import SmallModel

NOISE = 1 << 16


class Spoiled(SmallModel):
    """Options: those of `model`, and `spoil`, the share of drafted tokens that are replaced."""

    name = "spoiled"
    traits = replace(SmallModel.traits, options=None, auto=None)

    def record(self, rounds: Any) -> None:
        super().record(rounds)
        chains, device = rounds.drafts, self.space.target.device
        wrong = torch.rand(NOISE, generator=torch.Generator().manual_seed(1)) < float(self.space.options["spoil"])
        noise, at = wrong.to(device, torch.int32), torch.zeros(1, dtype=torch.int64, device=device)
        vocabulary, places = self.space.target.config.vocab_size, torch.arange(DRAFT, device=device)

        def spoil() -> None:
            """Every draft's tokens [B, DRAFT], by the next stretch of noise for each sequence."""
            lines = rounds.inputs.device["lines"].long()
            begin = at + torch.arange(len(lines), device=device) * DRAFT
            drafts = rounds.lines.draft[lines] + noise[(begin[:, None] + places) % NOISE]
            rounds.lines.draft[lines] = drafts % vocabulary
            at.add_(len(lines) * DRAFT)

        recording, passes = rounds.record(spoil), chains.passes

        def spoiled(turns: Any, rows: Any, asks: list[int]) -> list[tuple[str, Any, int]]:
            return [*passes(turns, rows, asks), *([("draft", recording, 1)] if any(asks) else [])]

        chains.passes = spoiled
