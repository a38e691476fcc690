"""The features that a head keeps until it is fed with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.drafters.head.features import ObservedFeatures
from outrider.types import Draft, Output, Sequence, Turn


def observed(features: ObservedFeatures, seqs: list[Sequence], at: int, feed: int = 1) -> None:
    """A step in which each of these has fed so many tokens from a position on; its states are that position."""
    rows = torch.arange(at, at + feed).float().repeat(len(seqs))[:, None].expand(-1, 3).contiguous()  # [T, 3]
    step: Any = SimpleNamespace(
        turns=[Turn(seq, feed, True) for seq in seqs],
        draft=Draft.empty(len(seqs)),
        verdicts=[None] * len(seqs),
        batch=SimpleNamespace(positions=[*range(at, at + feed)] * len(seqs)),
        output=Output(torch.zeros(0), hidden={0: rows, 1: -rows}),
    )
    features.observe(step)


def test_a_step_copies_no_features_and_old_ones_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, *rest: copies.append(len(parts)) or cat(parts, *rest))
    features, seqs = ObservedFeatures((0, 1)), [Sequence(i, [1] * 9) for i in range(64)]
    for at in range(32):
        observed(features, seqs, at)
    assert not copies
    for at in range(32, 100):
        observed(features, seqs, at)
    for name in (0, 63):
        found = features.between(name, 0, 100, torch.empty(0, 6))  # [100, 6]
        assert found[:, 0].tolist() == [float(at) for at in range(100)]
        assert torch.equal(found[:, :3], -found[:, 3:])
        assert torch.equal(features.between(name, 98, 99, torch.empty(0, 6)), found[98:99])
        assert torch.equal(features.between(name, 40, 99, torch.empty(0, 6)), found[40:99])
        held = {state.untyped_storage().data_ptr() for piece in features.pieces[name] for state in piece.states}
        assert len(held) <= 2 * 33  # old rows are its own: it does not keep those of 63 others alive


def test_a_prompt_in_a_batch_keeps_its_own_rows_only() -> None:
    features, seqs = ObservedFeatures((0, 1)), [Sequence(i, [1] * 9) for i in range(3)]
    observed(features, seqs, 0, feed=5)
    observed(features, seqs, 5)
    for seq in seqs:
        assert [state.shape for state in features.pieces[seq.id][0].states] == [(5, 3), (5, 3)]
        found = features.between(seq.id, 1, 8, torch.empty(0, 6))
        assert found[:, 0].tolist() == [1, 2, 3, 4, 5, 0, 0]  # zeros where nothing was seen
        features.forget(seq.id, 5)
        assert not features.has(seq.id, 4)
        assert features.has(seq.id, 5)
