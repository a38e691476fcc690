"""The device's own loop: rounds say what plain decoding on a CPU says, whatever is drafted, cut or in flight.

Without a GPU the same code runs uncaptured, with its kernels in triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from outrider.backends import ops
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.rounds import Rounds
from outrider.backends.cuda.state import DeviceState
from outrider.backends.loaded_weights import embedding_of
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.control.adaptive import Fixed
from outrider.drafters import Workspace, make
from outrider.drafters.head.network import Head
from outrider.engine.cache import Cache
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.models.speculators import random_head
from outrider.types import SamplingParams, Sequence

from support.kernels import DEVICE, GPU

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 5, 6, 7], [11] * 14]
TOKENS = 24 if GPU else 6
WARM = {"temperature": 0.9}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)


def model(blur: float = 0.0) -> Transformer:
    config = toy_config(1, context=128)
    return Transformer(config, RandomWeights(config, 1, blur), torch.float32, DEVICE)


def head_of(target: Transformer) -> Head:
    config, tensors = random_head(target.config)
    return Head(config, tensors, embedding_of(target), target.compute, target.device)


def engine(drafter: str = "off", k: int = 0, rounds: bool = True, slots: int = 600, **options: object) -> Engine:
    target = model()
    cache = Cache(slots, 8, 96, DEVICE)
    cache.slots += not GPU  # a CPU's planes have no slot for padding
    plane = cache.add_plane(*target.plane_shape)
    cache.slots -= not GPU
    state = DeviceState(cache, Driver(DEVICE), 4)
    runner = Graphs(target, plane, state)
    runner.rounds = Rounds(runner) if rounds else None
    cache.slots += not GPU
    space = Workspace(target, cache, plane, options, None, lambda m, p: Graphs(m, p, state))  # type: ignore[arg-type]
    made = make(drafter, space)
    cache.slots -= not GPU
    return Engine(runner, cache, made, Fixed(k), Scheduler(cache, plane, 4, 16), target.config.vocab_size)


def run(engine: Engine, **params: object) -> list[list[int]]:
    seqs = [
        Sequence(i + 1, prompt, SamplingParams(max_tokens=TOKENS + i, **params), seed=40 + i)  # type: ignore[arg-type]
        for i, prompt in enumerate(PROMPTS)
    ]
    for seq in seqs:
        engine.add(seq)
    while engine.busy:
        step = engine.step()
        assert not step.failure, step.failure
        engine.cache.check()
    assert not engine.failures
    return [seq.generated for seq in seqs]


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            patch.setattr(ops, "on_gpu", lambda tensor: True)
        return {"greedy": run(engine(rounds=False)), "warm": run(engine(rounds=False), **WARM)}


def test_plain_rounds(plain: dict[str, list[list[int]]]) -> None:
    assert run(engine()) == plain["greedy"]


@pytest.mark.parametrize(
    ("drafter", "k", "options"),
    [
        ("ngram", 3, {"ngram_min": 1}),
        ("suffix", 3, {}),
        ("model", 3, {}),
        ("layerskip", 2, {"skip_mlp": [0]}),
        ("head", 3, {}),
    ],
)
def test_every_source_of_drafts(
    plain: dict[str, list[list[int]]], drafter: str, k: int, options: dict[str, object]
) -> None:
    if drafter in ("model", "head"):
        options = {"draft_model": model(0.15)} if drafter == "model" else {"head": head_of(model())}
    assert run(engine(drafter, k, **options), **WARM) == plain["warm"]
