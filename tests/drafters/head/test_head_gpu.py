"""A head on a GPU's kernels says what it says on a CPU: same operations, other order, so nearly the same numbers; and a
row's numbers do not depend on its neighbours there either."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.backends import ops
from outrider.backends.rows import rows_of
from outrider.backends.toy import toy
from outrider.drafters.head.features import HeadBatch
from outrider.drafters.head.network import Head
from outrider.engine.cache import Cache
from outrider.models.speculators import random_head
from outrider.types import Sequence

from support.kernels import DEVICE, GPU  # before anything that imports triton

TARGET = toy(dtype=torch.float32)
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


@pytest.mark.parametrize(("kind", "layers"), [("eagle3", 1), ("block", 2)])
def test_both_devices_agree(kind: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, tensors = random_head(TARGET.config, kind, layers=layers)
    features = torch.randn(len(PROMPT) - 1, 32, generator=torch.Generator().manual_seed(5))
    here = run(Head(config, tensors, TARGET.embedding, torch.float32, length=64), features, [], 3)
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    head = Head(config, tensors, TARGET.embedding.to(DEVICE), torch.float32, DEVICE, 64)
    features = features.to(DEVICE)
    there = run(head, features, [], 3)
    assert there.shape == (4, config.draft_vocab_size)
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)
    assert torch.equal(there, run(head, features, [3, 7], 3))
    taps = [torch.randn(5, 32, device=DEVICE) for _ in config.taps]
    assert torch.equal(head.fuse(taps)[:2], head.fuse([tap[:2] for tap in taps]))
