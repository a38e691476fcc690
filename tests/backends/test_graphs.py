"""The GPU's runner: the same text as the CPU's, whatever is captured, padded or unread.

Without a GPU the same code runs uncaptured, with its kernels in triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch

from outrider.backends import WHOLE, ops
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import BATCHES, Graphs, _shape, padded_size
from outrider.backends.cuda.state import DEPTHS, UNREAD_BUFFERS, DeviceState
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.control.adaptive import Fixed
from outrider.drafters import Workspace, make
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache
from outrider.engine.request_drafts import Prediction
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.llm import build_engine
from outrider.models.config import ModelConfig
from outrider.types import SamplingParams, Sequence

from support.device_engine import run_all
from support.kernels import DEVICE, GPU

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 5, 6, 7], [11] * 14]
say = partial(run_all, prompts=PROMPTS)
TOKENS = 12 if GPU else 4  # the interpreter takes milliseconds for every program of every kernel
slow = pytest.mark.skipif(not GPU, reason="takes minutes without a GPU")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)


def small_config(layers: int) -> ModelConfig:
    """Two heads instead of four: the interpreter runs a program for each head of each row."""
    return replace(toy_config(layers, context=128), heads=2, kv_heads=1)


def model(blur: float = 0.0, layers: int = 2 if GPU else 1) -> Transformer:
    config = small_config(layers)
    return Transformer(config, RandomWeights(config, 1, blur), torch.float32, DEVICE)


def engine(target: Transformer, drafter: str, k: int, batch: int = 4, **options: object) -> Engine:
    cache = Cache(600, 8, 96, DEVICE)
    if not GPU:  # a CPU's planes have no slot for padding
        cache.slots += 1
    plane = cache.add_plane(*target.plane_shape)
    if not GPU:
        cache.slots -= 1
    state = DeviceState(cache, Driver(DEVICE), batch)

    def passes(model: Transformer, plane: object) -> Graphs:
        return Graphs(model, plane, state)  # type: ignore[arg-type]

    cache.slots += not GPU
    space = Workspace(target, cache, plane, options, None, passes)  # type: ignore[arg-type]
    made = make(drafter, space)
    cache.slots -= not GPU
    scheduler = Scheduler(cache, plane, batch, 16)
    return Engine(Graphs(target, plane, state), cache, made, Fixed(k), scheduler, target.config.vocab_size)


GREEDY = SamplingParams(max_tokens=TOKENS)
WARM = SamplingParams(max_tokens=TOKENS, temperature=0.9)
NUCLEUS = SamplingParams(max_tokens=TOKENS, temperature=1.1, top_p=0.8, top_k=20)
PENALISED = SamplingParams(max_tokens=TOKENS, temperature=0.7, repetition_penalty=1.3)
MIXES = [[GREEDY] * 3, [WARM] * 3, [GREEDY, WARM, NUCLEUS], [PENALISED, GREEDY, WARM]]


@pytest.fixture(scope="module")
def target() -> Transformer:
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            patch.setattr(ops, "on_gpu", lambda tensor: True)
        return model()


@contextmanager
def alone(target: Transformer, batch: int = 4) -> Iterator[Engine]:
    """The target without a drafter. The interpreter is slow, and `test_the_same_bits_as_without_a_gpu`: there it is the
    CPU's runner."""
    if GPU:
        yield engine(target, "off", 0, batch)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "on_gpu", lambda tensor: False)
        same = Transformer(target.config, RandomWeights(target.config, 1), torch.float32)
        yield build_engine(same, Config(drafter="off", max_length=96))


@pytest.mark.parametrize("mix", [pytest.param(mix, marks=slow) for mix in range(4)])
def test_batched_and_alone_the_same_text(target: Transformer, mix: int) -> None:
    params = MIXES[mix]
    together = say(engine(target, "off", 0), params)
    for i in range(len(PROMPTS)):
        lonely = engine(target, "off", 0, batch=1)
        seq = Sequence(9, PROMPTS[i], params[i], seed=40 + i)
        lonely.add(seq)
        while lonely.busy:
            lonely.step()
        assert seq.generated == together[i]


@pytest.mark.parametrize(
    "mix", [pytest.param(0, marks=slow), pytest.param(1, marks=slow), 2, pytest.param(3, marks=slow)]
)
@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("model", {}),
        pytest.param("model", {"tree": True, "tree_width": 2, "tree_depth": 3}, marks=slow),
        pytest.param("layerskip", {"skip_mlp": [0]}, marks=slow),
        pytest.param("ngram", {"ngram_min": 1}, marks=slow),
        ("suffix", {"tree": True}),
        pytest.param("auto", {"draft_model": None}, marks=slow),
    ],
)
def test_every_drafter_says_what_the_target_says(
    target: Transformer, drafter: str, options: dict[str, object], mix: int
) -> None:
    params = MIXES[mix]
    with alone(target) as plain_engine:
        plain = say(plain_engine, params)
    if drafter in ("model", "auto"):
        options = options | {"draft_model": model(blur=0.15)}
    guided = engine(target, drafter, 4, **options)
    assert say(guided, params) == plain


class Odd:
    """A guide that allows odd tokens only (`types.Matcher`)."""

    def allows(self, said: list[int], token: int) -> bool:
        return token % 2 == 1

    def mask(self, said: list[int], guess: bool = False) -> torch.Tensor:
        return torch.arange(toy_config(1).vocab_size) % 2 == 1

    def complete(self, said: list[int]) -> bool:
        return True

    def follow(self, said: list[int], tokens: list[int]) -> int:
        return next((i for i, token in enumerate(tokens) if token % 2 == 0), len(tokens))

    def forced(self, said: list[int], most: int) -> list[int]:
        return []


def test_a_guide_and_a_prediction_beside_a_draft_that_nobody_reads(target: Transformer) -> None:
    def texts(running: Engine, predicted: list[int]) -> list[list[int]]:
        seqs = [Sequence(i + 1, prompt, WARM, seed=40 + i) for i, prompt in enumerate(PROMPTS)]
        seqs[0].matcher, seqs[1].prediction = Odd(), Prediction(predicted)
        for seq in seqs:
            running.add(seq)
        while running.busy:
            assert not running.step().failure
        return [seq.generated for seq in seqs]

    with alone(target) as plain_engine:
        plain = texts(plain_engine, [])
    assert all(token % 2 for token in plain[0])
    assert texts(engine(target, "model", 3, draft_model=model(blur=0.15)), plain[1]) == plain


@slow
def test_an_early_exit_drafts_and_whole_passes_verify() -> None:
    target = model(layers=2)
    guided = engine(target, "exit", 3, exit_layer=1)
    assert guided.drafter.space.first_layers is None  # captured passes do not begin in the middle
    assert say(guided, MIXES[2]) == say(engine(target, "off", 0), MIXES[2])


def test_a_good_draft_is_accepted_without_being_read(target: Transformer) -> None:
    guided = engine(target, "model", 3, draft_model=target)
    seqs = [Sequence(i + 1, prompt, WARM, seed=40 + i) for i, prompt in enumerate(PROMPTS)]
    for seq in seqs:
        guided.add(seq)
    unread = 0
    while guided.busy:
        step = guided.step()
        assert all(token >= 0 for tree in step.draft.trees for token in tree.tokens), "a listener saw an unread token"
        unread += step.output.tokens is not None
    assert unread > 0
    assert all(seq.stats.alpha == 1.0 for seq in seqs), "the target as its own drafter is always right"


def test_the_same_bits_as_without_a_gpu(target: Transformer) -> None:
    """Not promised between devices, but a toy in float32 has no near-ties: the texts agree."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "on_gpu", lambda tensor: False)
        cpu = Transformer(target.config, RandomWeights(target.config, 1), torch.float32)
        plain = say(build_engine(cpu, Config(drafter="off", max_length=96)), [GREEDY] * 3)
    assert say(engine(target, "off", 0), [GREEDY] * 3) == plain


def test_recording_leaves_alone_what_nobody_has_read(target: Transformer) -> None:
    """A shape may be recorded between a pass and the one that goes on from it."""
    crowd = engine(target, "off", 0)
    state: DeviceState = crowd.target.state  # type: ignore[attr-defined]
    state.unread.copy_(torch.arange(len(state.unread)))
    state.record(lambda: state.unread.fill_(7))
    if GPU:  # without one nothing is tried out
        assert torch.equal(state.unread.cpu(), torch.arange(len(state.unread)))


def test_weights_in_eight_bits_keep_the_promise() -> None:
    config = small_config(1)
    eight = Transformer(config, RandomWeights(config, 1), torch.float32, DEVICE, int8=True)
    assert eight.dtype is torch.int8
    assert eight.layers[0].qkv.weight.dtype is torch.int8
    params, prompts = [GREEDY, WARM], PROMPTS[:2]
    plain = say(engine(eight, "off", 0), params, prompts=prompts)
    assert say(engine(eight, "model", 3, draft_model=model(blur=0.15)), params, prompts=prompts) == plain


def test_a_pass_that_wants_very_many_of_its_rows_finds_a_shape(target: Transformer) -> None:
    """64 sequences with long drafts while a prompt is read: more wanted rows than any usual pass has."""
    runner = engine(target, "off", 0).target
    packing = BatchBuilder(runner.state.cache)  # type: ignore[attr-defined]
    packing.tokens, packing.want = [0] * 1500, list(range(1200))
    shape = _shape(packing, (), (), WHOLE, ())
    assert shape.rows > shape.wanted >= 1200


def test_unread_drafts_of_a_padded_batch_have_their_own_place() -> None:
    for batch in (1, 3, 5, 33, 65, 100, 129):
        state = DeviceState(Cache(8, 2, 8), Driver(DEVICE), batch)
        assert (
            max(padded_size(batch), next((n for n in BATCHES if n >= batch), 0)) * DEPTHS[-1]
            <= len(state.unread) // UNREAD_BUFFERS
        )
