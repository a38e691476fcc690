"""A head's scores of one text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.backends.rows import rows_of
from outrider.drafters.head.dflash import DFlashHead, DFlashRollout
from outrider.drafters.head.features import HeadBatch, ObservedFeatures, Piece
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


def block_scores(head: DFlashHead) -> Tensor:
    """Scores of a block's masks behind ten positions with random states, given certain tokens before. [6, D]"""
    tokens = [(13 * i + 5) % head.config.vocab_size for i in range(11)]
    cache, seq = Cache(40, 2, 30), Sequence(1, tokens)
    plane, features = cache.add_plane(*head.plane_shape), ObservedFeatures(head.config.taps)
    cache.open(seq)
    cache.reserve(seq, 11, 4)
    width = head.config.target_hidden_size * len(head.config.taps)
    shown = torch.randn(10, width, generator=torch.Generator().manual_seed(2))
    features.pieces[1] = [Piece(0, 10, 0, shown.chunk(len(head.config.taps), 1))]
    rollout, chosen, given = DFlashRollout(head, cache, plane, features), list[int](), list[Tensor]()
    (scores,) = rollout._blocks([seq], [6])
    for row in rollout._in_order(scores, seq, chosen):
        chosen.append(tokens[len(given)])
        given.append(row)
    return torch.stack(given)


def scored(head: Any) -> Tensor:
    """Scores of ten rows with true features, then of one that continues. [11, D]"""
    tokens = [(13 * i + 5) % head.config.vocab_size for i in range(11)]
    cache, seq = Cache(40, 2, 30), Sequence(1, tokens)
    plane = cache.add_plane(*head.plane_shape)
    cache.open(seq)
    cache.reserve(seq, 11, 4)
    rows = HeadBatch(cache)
    rows.committed(seq, 0, 10)
    rows.want = list(range(10))
    dice = torch.Generator().manual_seed(2)
    hidden = torch.randn(10, head.config.target_hidden_size * len(head.config.taps), generator=dice)
    first, outputs = head.read(rows_of(rows), plane, hidden)
    after = HeadBatch(cache)
    after.drafted(seq, 17, [0])
    later, _ = head.scores(rows_of(after), plane, outputs[-1:])
    return torch.cat([first, later])
