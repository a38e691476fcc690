"""A draft model with another tokenizer on a GPU: captured passes over its own slots draft what plain ones draft.

Without a GPU the same code runs uncaptured, with its kernels in triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.backends import ops
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.state import DeviceState
from outrider.backends.toy import RandomWeights
from outrider.backends.transformer import Transformer
from outrider.drafters import DraftRequest, Workspace, make
from outrider.engine.cache import Cache
from outrider.types import SamplingParams, Sequence

from support import alphabets
from support.kernels import DEVICE, GPU

TARGET, DRAFT = alphabets.byte_level(alphabets.PROSE), alphabets.byte_level(alphabets.CODE)


def drafts(mode: str, captured: bool) -> list[list[int]]:
    """Two drafts in a row for two sequences: the second continues from what the first left in the plane."""
    config = alphabets.config_of(DRAFT.vocab_size, 64)
    device = DEVICE if captured else torch.device("cpu")
    model = Transformer(config, RandomWeights(config, 2), torch.float32, device)

    def passes(model: Any, plane: Any, cache: Any) -> Graphs | None:
        if not captured:
            return None
        if not GPU:  # a CPU's planes have no slot for padding
            plane.add_scratch(1)
        return Graphs(model, plane, DeviceState(cache, Driver(device), 4))

    cache = Cache(200, 4, 64)
    options = {"draft_model": model, "draft_tokenizer": DRAFT, "translate": mode}
    target = alphabets.model(TARGET)
    space = Workspace(target, cache, cache.add_plane(*target.plane_shape), options, TARGET, passes)
    made = make("model", space)
    params = [SamplingParams(), SamplingParams(temperature=0.9)]
    seqs = [Sequence(i, TARGET.encode(text), params[i], i) for i, text in enumerate(("the fox", "return a"))]
    drafted = []
    for _ in range(2):
        trees = made.draft(DraftRequest(seqs, [2, 2])).trees
        drafted += [tree.tokens for tree in trees]
        for seq, tree in zip(seqs, trees, strict=True):
            seq.tokens += [*tree.tokens[:1], 50]
    return drafted


@pytest.mark.parametrize("mode", ["tli", pytest.param("slem", marks=() if GPU else pytest.mark.slow)])
def test_captured_passes_draft_the_same(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    expected = drafts(mode, captured=False)
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    assert any(expected)
    assert drafts(mode, captured=True) == expected
