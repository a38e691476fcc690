"""A head on a GPU's kernels says what it says on a CPU: same operations, other order, so nearly the same numbers; and a
row's numbers do not depend on its neighbours there either."""

from __future__ import annotations

import pytest
import torch

from outrider.backends import ops
from outrider.backends.toy import toy
from outrider.drafters.head.network import Head
from outrider.models.speculators import random_head

from support.head_scores import PROMPT, run
from support.kernels import DEVICE, GPU  # before anything that imports triton

TARGET = toy(dtype=torch.float32)


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
