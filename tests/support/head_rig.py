"""A trained head over one sequence, run without an engine."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.backends.rows import rows_of
from outrider.drafters.head.features import HeadBatch
from outrider.drafters.head.network import Head
from outrider.engine.cache import Cache, Plane
from outrider.types import Sequence


class Rig:
    """One sequence of a head, with everything in its place."""

    def __init__(self, head: Head, tokens: list[int]) -> None:
        self.head, self.cache, self.seq = head, Cache(128, 2, 96), Sequence(1, tokens)
        self.plane: Plane = self.cache.add_plane(*head.plane_shape)
        self.cache.open(self.seq)
        assert self.cache.reserve(self.seq, len(tokens), 8)

    def read(self, start: int, stop: int, shown: Tensor, masks: int = 0) -> tuple[Tensor, Tensor]:
        """Rows start … stop-1, all wanted, and masks behind them. shown [T, taps * H]."""
        packed = HeadBatch(self.cache)
        packed.committed(self.seq, start, stop, want=False)
        packed.want = list(range(stop - start))
        packed.masks(self.seq, masks)
        blank = shown.new_zeros(masks, shown.shape[1])
        masked = torch.tensor(packed.masked) if masks else None
        return self.head.read(rows_of(packed), self.plane, torch.cat([shown[start:stop], blank]), masked)


def shown_to(head: Head, rows: int) -> Tensor:
    """[rows, taps * H], with an input that dwarfs the others, as targets have them."""
    width = head.config.hidden_size * len(head.config.taps)
    shown = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    shown[:, 3] *= 300
    return shown
