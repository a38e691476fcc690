"""A head's scores of one text."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.backends.rows import rows_of
from outrider.drafters.head.features import HeadBatch
from outrider.drafters.head.network import Head
from outrider.engine.cache import Cache
from outrider.types import Sequence

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]


def run(head: Head, features: Tensor, pieces: list[int], masks: int) -> Tensor:
    """Scores of the last true row and of the masks behind it, with the true rows fed in pieces. [1 + masks, D]"""
    cache, seq = Cache(64, 2, 64, head.device), Sequence(1, PROMPT)
    plane = cache.add_plane(*head.plane_shape)
    cache.open(seq)
    cache.reserve(seq, len(PROMPT), 8)
    start, last = 0, len(PROMPT) - 1
    for stop in (*pieces, last):
        packed = HeadBatch(cache)
        packed.committed(seq, start, stop, want=stop == last)
        fed = features[start:stop]
        if stop == last:
            if head.config.kind == "block":
                packed.masks(seq, masks)
            else:
                for j in range(masks):
                    packed.drafted(seq, 3, list(range(j + 1)))
            fed = torch.cat([fed, features[:masks]])
        masked = torch.tensor(packed.masked) if any(packed.masked) else None
        scores, _ = head.scores(rows_of(packed), plane, fed, masked)
        start = stop
    return scores.cpu()
