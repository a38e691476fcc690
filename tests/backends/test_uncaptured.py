"""A text laid out for a GPU: sets are scored there as on the CPU, and a drafted token's price is a recorded chain's.

Without a GPU the same code runs uncaptured, with its kernels in triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from outrider.backends import WHOLE, ops
from outrider.backends.cuda.graphs import UncapturedPasses
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.drafters.layerskip.search import ScoredText, Skip

from support.kernels import DEVICE, GPU

ANSWERS = [([1, 2], [4, 5]), ([7, 8], [9, 10, 11])]
SKIP = Skip(mlp=frozenset({1}))


def model(device: torch.device | str) -> Transformer:
    config = toy_config(2, context=64)
    return Transformer(config, RandomWeights(config, 1, 0.0), torch.float32, device)


def streams(text: ScoredText) -> torch.Tensor:
    """Two layers, the second without its MLP, as seeds are looked for."""
    return text._layer(1, text._layer(0, None, frozenset()), frozenset({"mlp"})).cpu()


def test_a_text_on_a_device_is_scored_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ScoredText(model("cpu"), ANSWERS)
    score, choices, stream = here.agreement(SKIP), here.choices.tolist(), streams(here)
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
        monkeypatch.setattr("outrider.backends.cuda.graphs.TIMED_CHAIN", 2)
    there = ScoredText(model(DEVICE), ANSWERS, device=UncapturedPasses)
    assert there.positions == here.positions == 3
    assert there.choices.tolist() == choices
    assert there.agreement(SKIP) == score
    torch.testing.assert_close(streams(there), stream, rtol=1e-4, atol=1e-4)
    exact = [k[: there.cache.slots].clone() for k in there.plane.k]
    assert there.device is not None
    assert there.device.seconds(there.seqs[1], SKIP.part, 1) > 0  # type: ignore[call-arg]
    kept = [slot for seq in there.seqs for slot in there.cache.rows[seq.id].slots[:-1]]  # a draft feeds the last
    assert all(torch.equal(old[kept], new[kept]) for old, new in zip(exact, there.plane.k, strict=True))
    assert there._run(WHOLE).tolist() == choices
