"""The features that a head keeps until it is fed with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.drafters.head.features import ObservedFeatures
from outrider.types import Draft, Output, Sequence, Turn


def test_features_of_a_batch_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, *rest: copies.append(len(parts)) or cat(parts, *rest))
    features = ObservedFeatures((0, 1))
    seqs = [Sequence(i, [1] * 9) for i in range(64)]
    for at in range(100):
        shown = torch.full((64, 3), float(at))
        step: Any = SimpleNamespace(
            turns=[Turn(seq, 1, True) for seq in seqs],
            draft=Draft.empty(64),
            verdicts=[None] * 64,
            batch=SimpleNamespace(positions=[at] * 64),
            output=Output(torch.zeros(0), hidden={0: shown, 1: -shown}),
        )
        features.observe(step)
    assert len(copies) == 100  # one for each step, whatever the batch
    for name in (0, 63):
        found = features.between(name, 0, 100, torch.empty(0, 6))  # [100, 6]
        assert found[:, 0].tolist() == [float(at) for at in range(100)]
        assert torch.equal(found[:, :3], -found[:, 3:])
        held = {piece.untyped_storage().data_ptr() for _, piece in features.pieces[name]}
        assert len(held) <= 33  # old rows are its own: it does not keep those of 63 others alive
