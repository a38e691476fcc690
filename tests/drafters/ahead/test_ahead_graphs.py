"""A draft model on a GPU that prepares for outcomes: captured passes grow the same forks as plain ones.

Without a GPU the same code runs uncaptured, with its kernels in triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from outrider.backends import ops
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.state import DeviceState
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.drafters.ahead.forks import Forker, ForkPlan
from outrider.types import SamplingParams, Sequence

from support.kernels import DEVICE, GPU


def make(captured: bool) -> Forker:
    config = toy_config(2 if GPU else 1, context=128)
    device = DEVICE if captured else torch.device("cpu")
    model = Transformer(config, RandomWeights(config, 1), torch.float32, device)
    forker = Forker(model, 200, 4, 96)
    if captured:
        if not GPU:  # a CPU's planes have no slot for padding
            forker.cache.planes.clear()
            forker.cache.slots += 1
            forker.plane = forker.cache.add_plane(*model.plane_shape)
            forker.cache.slots -= 1
        forker.passes = Graphs(model, forker.plane, DeviceState(forker.cache, Driver(device), 4))
    return forker


def prepared(forker: Forker, temperature: float) -> list[tuple[int, int, list[int]]]:
    params = SamplingParams(temperature=temperature, max_tokens=40)
    plans = []
    for number, (text, drafted) in enumerate([([1, 2, 3], [4, 5]), ([7, 8, 9, 7], [])]):
        seq = Sequence(number, text, params, seed=number)
        forker.open(seq)
        plans.append(ForkPlan(seq, drafted, [2] * (len(drafted) + 1)))
    list(forker.grow(plans, 2))
    forker.cache.check()
    return [(b.accepted, b.token, b.chain) for plan in plans for b in plan.branches]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_captured_passes_grow_the_same_forks(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    expected = prepared(make(captured=False), temperature)
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    assert prepared(make(captured=True), temperature) == expected


@pytest.mark.slow
def test_the_warm_up_records_what_rounds_need_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
    forker = make(captured=True)
    forker.warm_up()
    recorded = len(forker.passes.passes)
    assert recorded > 4
    assert not forker.cache.rows
    forker.cache.check()
    seq = Sequence(1, [1, 2, 3], SamplingParams(max_tokens=40))
    forker.open(seq)
    for drafted, more in (([4, 5, 6, 7], [4, 5, 6, 7, 8]), ([9, 9], [3]), ([], [2])):
        list(forker.grow([ForkPlan(seq, drafted, [2] * len(drafted) + [2])], 2))
        forker.extend(seq, more)
    assert len(forker.passes.passes) == recorded
