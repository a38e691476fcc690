"""A trained head's recorded drafts: what the eager head would have drafted from the same features, and the same text.

Without a GPU the same code runs uncaptured, with its kernels in triton's interpreter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.backends import ops
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.state import DeviceState
from outrider.backends.toy import RandomWeights, toy_config
from outrider.backends.transformer import Transformer
from outrider.config import Config
from outrider.control.adaptive import Fixed
from outrider.drafters import DraftRequest, Traits, Workspace
from outrider.drafters.head import captured as captured_heads
from outrider.drafters.head.captured import highest
from outrider.drafters.head.dflash import DFlashHead
from outrider.drafters.head.drafter import TrainedHead
from outrider.drafters.head.mtp import MtpHead, mtp_readings
from outrider.drafters.head.network import Head
from outrider.engine.batch import BatchBuilder
from outrider.engine.cache import Cache, Plane
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.llm import build_engine
from outrider.models.mtp import find_mtp
from outrider.models.speculators import DFLASH, random_head, shapes
from outrider.models.weights import Weights, expected
from outrider.types import Draft, SamplingParams, Sequence, Tree, Turn, chain

from support.device_engine import run_all
from support.kernels import DEVICE, GPU, HALF

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 5, 6, 7], [11] * 6]
say = partial(run_all, prompts=PROMPTS)
TOKENS = 24 if GPU else 9  # the interpreter takes milliseconds for every program of every kernel
GREEDY = SamplingParams(max_tokens=TOKENS)
WARM = SamplingParams(max_tokens=TOKENS, temperature=0.8)
NUCLEUS = SamplingParams(max_tokens=TOKENS, temperature=1.1, top_p=0.8, top_k=20)
PENALISED = SamplingParams(max_tokens=TOKENS, temperature=0.7, repetition_penalty=1.3)
OTHERS = [NUCLEUS, PENALISED, GREEDY]
CHAIN: dict[str, Any] = {}
DEEP: dict[str, Any] = {"tree": True, "tree_width": 2, "tree_depth": 4}
TREE: dict[str, Any] = {"tree": True, "tree_width": 2, "tree_depth": 3}
slow = pytest.mark.skipif(not GPU, reason="takes minutes without a GPU")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_heads, "FEW", 6)  # so that a toy's prompt is long enough to be read ahead
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
        monkeypatch.setattr(captured_heads, "FEEDS", (4, 8, 16))
        monkeypatch.setattr(captured_heads, "READINGS", (8, 16))


@pytest.fixture(scope="module")
def target() -> Transformer:
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            patch.setattr(ops, "on_gpu", lambda tensor: True)
        config = toy_config(2, context=128)
        return Transformer(config, RandomWeights(config, 1), torch.float32, DEVICE)


def mtp_head(target: Transformer) -> Head:
    """One more layer of the toy's family behind a random product."""
    weights, h, dice = RandomWeights(target.config, 3), target.config.hidden_size, torch.Generator().manual_seed(5)
    tensors = {f"layers.2.{name}.weight": torch.ones(h) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors["layers.2.eh_proj.weight"] = torch.randn(h, 2 * h, generator=dice) * h**-0.5
    for name in expected(replace(target.config, layers=3)):
        if name.startswith("layers.2."):
            tensors[name] = weights.get(name, torch.float32)
    layer = find_mtp(Tensors(tensors), target.config)
    assert layer is not None
    config: Any = mtp_readings(layer, target)[0].config
    return MtpHead(layer, config, target, torch.float32, 96)


class Tensors(Weights):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.tensors[name].to(dtype)


VARIANTS: dict[str, dict[str, Any]] = {
    "dflash": {}, "dspark": {"markov": 5, "markov_kind": "rnn"},
    "domino": {"prefix_state": 6, "prefix_inner": 7, "prefix_from": 1},
    "dflash2": {"conv": 2, "conv_group": 8, "selector": 5, "selector_top": 6, "windows": (0, 7), "two_sided": True},
    "xpress": {"refiner": 8, "refiner_inner": 12, "refiner_passes": 3},
}  # fmt: skip


def head_for(target: Transformer, kind: str, dtype: torch.dtype = torch.float32) -> Head:
    if kind == "mtp":
        return mtp_head(target)
    blocks = kind == "anchored" or kind in VARIANTS
    config, tensors = random_head(target.config, DFLASH if blocks else kind, layers=1 + blocks)
    config = replace(config, anchored=kind in ("dspark", "anchored"))
    if VARIANTS.get(kind):
        dice, config = torch.Generator().manual_seed(7), replace(config, **VARIANTS[kind])
        for name in shapes(config).keys() - tensors.keys():
            tensors[name] = 3 * torch.randn(shapes(config)[name], generator=dice)
    for name, tensor in tensors.items():  # what it says must hang on what it sees
        if "self_attn" in name or name == "lm_head.weight":
            tensor *= 3
    if config.kind == DFLASH:
        config = replace(config, windows=(0, 7), mask_token=4) if kind == DFLASH else config
        return DFlashHead(config, tensors, target.embedding, dtype, DEVICE, 96, None)
    return Head(config, tensors, target.embedding, dtype, DEVICE, 96)


def padded(cache: Cache, make: Any) -> Any:
    """A CPU's planes have no slot for padding."""
    cache.slots += not GPU
    try:
        return make()
    finally:
        cache.slots -= not GPU


def engine(
    target: Transformer, head: Head, text: list[list[int]] | None = None, k: int = 5, slots: int = 400,
    kind: type[TrainedHead] | None = None, **options: Any,
) -> Engine:  # fmt: skip
    """With a head that checks itself, unless another is given: every recorded draft is made eagerly too."""
    cache = Cache(slots, 8, 96, DEVICE)
    plane: Plane = padded(cache, lambda: cache.add_plane(*target.plane_shape))
    state = DeviceState(cache, Driver(DEVICE), 4)
    options |= {"head": head, "text": text}

    def passes(model: Any, plane: Plane) -> Graphs:
        return Graphs(model, plane, state)

    space: Any = Workspace(target, cache, plane, options, None, passes)  # type: ignore[arg-type]
    drafter = padded(cache, lambda: (kind or Twice)(space))
    return Engine(Graphs(target, plane, state), cache, drafter, Fixed(k), Scheduler(cache, plane, 4, 48), 48)


class Twice(TrainedHead):
    """Drafts eagerly, takes that back, drafts again as a graph; then says what the text will be, every other time."""

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.drafted: list[tuple[Tree, ...]] = []
        self.traits = replace(self.traits, unread=False)  # an eager draft needs places that only an asked one has

    def _roll(self, request: DraftRequest) -> Draft:
        rollout, plane, graphs = self.rollout, self.rollout.plane, self.rollout.graphs
        kept, held = [t.clone() for t in (*plane.k, *plane.v)], dict(plane._held)
        rollout.graphs = None
        eager = super()._roll(request).trees
        rollout.graphs, plane._held = graphs, held
        for tensor, before in zip((*plane.k, *plane.v), kept, strict=True):
            tensor.copy_(before)
        draft = super()._roll(request)
        read = [] if draft.unread is None else draft.unread.tolist()
        told = [tree._replace(tokens=[read[-1 - t] if t < 0 else t for t in tree.tokens]) for tree in draft.trees]
        self.drafted.append(tuple(told))
        for mine, theirs in zip(told, eager, strict=True):
            assert mine.tokens == theirs.tokens
            assert mine.parents == theirs.parents
            if mine.survival is not None:
                assert mine.survival == pytest.approx(theirs.survival, rel=1e-4)
        text = self.space.options["text"]
        if text is None or len(self.drafted) % 3 == 0:
            return draft
        starts = [len(seq.generated) for seq in request.seqs]
        return Draft.pack(
            chain(text[seq.id - 1][start : start + len(tree.tokens)])
            for seq, start, tree in zip(request.seqs, starts, told, strict=True)
        )


LAWS = {"greedy": [GREEDY] * 3, "mixed": [SamplingParams(max_tokens=TOKENS - 4), WARM, WARM]}


@pytest.fixture(scope="module")
def plain(target: Transformer) -> dict[str, list[list[int]]]:
    """The target alone."""
    every = LAWS | {"others": OTHERS}
    if GPU:
        return {name: say(engine(target, head_for(target, "eagle3"), k=0), params) for name, params in every.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "on_gpu", lambda tensor: False)  # much faster, and a toy in float32 has no near-ties
        same = Transformer(target.config, RandomWeights(target.config, 1), torch.float32)
        return {
            name: say(build_engine(same, Config(drafter="off", max_length=96)), params)
            for name, params in every.items()
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "law"),
    [
        ("eagle3", CHAIN, "mixed"),
        ("eagle3", DEEP, "mixed"),
        ("eagle3", DEEP, "greedy"),
        ("mtp", CHAIN, "mixed"),
        ("mtp", DEEP, "mixed"),
        ("dflash", CHAIN, "mixed"),
        ("dflash", DEEP, "mixed"),
        ("dflash", DEEP, "greedy"),
        ("dspark", CHAIN, "mixed"),
        ("domino", CHAIN, "mixed"),
        ("dflash2", CHAIN, "mixed"),
        ("xpress", CHAIN, "mixed"),
        ("xpress", DEEP, "mixed"),
        ("anchored", CHAIN, "mixed"),
        ("anchored", DEEP, "mixed"),
        ("block", CHAIN, "mixed"),
        ("block", DEEP, "mixed"),
        ("block", DEEP, "greedy"),
    ],
)
def test_recorded_drafts_are_the_eager_ones(target: Transformer, kind: str, options: dict[str, Any], law: str) -> None:
    made: Any = engine(target, head_for(target, kind), k=2, **options)
    params = [replace(p, max_tokens=40) for p in LAWS[law]]
    seqs = [Sequence(i + 1, prompt, p, seed=40 + i) for i, (prompt, p) in enumerate(zip(PROMPTS, params, strict=True))]
    for seq in seqs:
        made.add(seq)
    for _ in range(2):
        assert not made.step().failure
    for seq in seqs:
        assert made.cache.reserve(seq, len(seq.tokens), 24)
    made.drafter._roll(DraftRequest(seqs, [14, 6, 9] if options else [4, 2, 3]))
    made.drafter._roll(DraftRequest(seqs[1:2], [4]))
    assert max(len(tree.tokens) for tree in made.drafter.drafted[-2]) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options", "law"),
    [
        ("eagle3", CHAIN, "mixed"),
        ("eagle3", TREE, "mixed"),
        ("block", CHAIN, "mixed"),
        ("dflash", CHAIN, "mixed"),
        pytest.param("block", TREE, "mixed", marks=slow),
        pytest.param("eagle3", TREE, "greedy", marks=slow),
        pytest.param("eagle3", CHAIN, "greedy", marks=slow),
        pytest.param("block", CHAIN, "greedy", marks=slow),
        pytest.param("block", TREE, "greedy", marks=slow),
    ],
)
def test_recorded_drafts_change_no_text(
    target: Transformer, plain: dict[str, list[list[int]]], kind: str, options: dict[str, Any], law: str
) -> None:
    made = engine(target, head_for(target, kind), plain[law], **options)
    assert say(made, LAWS[law]) == plain[law]
    drafter: Any = made.drafter
    assert drafter.rollout.graphs.captured
    assert drafter.traits.taps == (), "nobody has to look at what the passes leave in their slots"
    assert max(len(trees) for trees in drafter.drafted) == 3
    assert all(tree.tokens for trees in drafter.drafted for tree in trees)


def one(engine: Engine, seq: Sequence) -> set[str]:
    """Answer alone; returns the phases that the device has timed."""
    engine.add(seq)
    spent: set[str] = set()
    while engine.busy:
        step = engine.step()
        assert not step.failure, step.failure
        engine.cache.check()
        spent |= step.output.seconds.keys()
    return spent


@pytest.mark.slow
def test_filters_are_drawn_on_the_device_and_penalties_on_the_host(
    target: Transformer, plain: dict[str, list[list[int]]]
) -> None:
    made: Any = engine(target, head_for(target, "eagle3"), plain["others"], k=3)
    assert say(made, OTHERS) == plain["others"]
    assert not made.drafter.rollout.graphs.captured
    nucleus = Sequence(1, PROMPTS[0], NUCLEUS, seed=40)
    assert one(made, nucleus) >= {"draft", "verify"}
    assert nucleus.generated == plain["others"][0]
    assert all(shape.drawn for shape in made.drafter.rollout.graphs.captured)


@pytest.mark.slow
def test_short_floats_too(target: Transformer, plain: dict[str, list[list[int]]]) -> None:
    made = engine(target, head_for(target, "eagle3", HALF), plain["mixed"], k=3)
    assert made.target.plane.streams[0].dtype == HALF
    assert say(made, LAWS["mixed"]) == plain["mixed"]


@pytest.mark.slow
def test_whoever_loses_its_slots_is_fed_anew(target: Transformer, plain: dict[str, list[list[int]]]) -> None:
    made = engine(target, head_for(target, "block"), plain["greedy"], k=2, slots=15 + TOKENS)
    seqs = [Sequence(i + 1, prompt, GREEDY) for i, prompt in enumerate(PROMPTS[:2])]
    for seq in seqs:
        made.add(seq)
    while made.busy:
        assert not made.step().failure
        made.cache.check()
    assert [seq.generated for seq in seqs] == plain["greedy"][:2]
    assert sum(seq.stats.preempted for seq in seqs) > 0


@pytest.mark.slow
def test_whoever_shares_a_prompt_finds_its_features_too(target: Transformer, plain: dict[str, list[list[int]]]) -> None:
    made: Any = engine(target, head_for(target, "eagle3"), plain["greedy"], k=2)
    first, again = Sequence(2, PROMPTS[1], GREEDY), Sequence(2, PROMPTS[1], GREEDY)
    assert one(made, first) >= {"read", "draft", "verify"}
    assert "read" not in one(made, again)
    assert first.generated == again.generated == plain["greedy"][1]
    assert again.stats.reused == len(PROMPTS[1]) - 1


class Napping(Fixed):
    """Drafts, rests, and drafts again."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.steps, self.most = 0, k

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        self.steps += 1
        self.k = 0 if 3 <= self.steps < 7 else self.most
        return super().budget(turns, traits)


def test_nothing_is_missed_while_nothing_is_drafted(target: Transformer, plain: dict[str, list[list[int]]]) -> None:
    made = engine(target, head_for(target, "eagle3"))
    made.controller = Napping(2)
    seq, drafted = Sequence(1, PROMPTS[0], GREEDY, seed=40), []
    made.add(seq)
    while made.busy:
        assert not made.step().failure
        drafted.append(len(made.drafter.drafted))  # type: ignore[attr-defined]
    assert seq.generated == plain["greedy"][0]
    assert drafted[-1] > drafted[5], "it drafts again as soon as it is asked"


def test_streams_are_left_where_their_rows_are(target: Transformer) -> None:
    """The same numbers as taps show, and the same logits as without."""
    cache, seq = Cache(32, 2, 32, DEVICE), Sequence(1, PROMPTS[1])
    plane: Plane = padded(cache, lambda: cache.add_plane(*target.plane_shape))
    state = DeviceState(cache, Driver(DEVICE), 1)
    cache.open(seq)
    cache.reserve(seq, len(seq.tokens), 0)
    packed = BatchBuilder(cache)
    packed.pending(seq, 0, len(seq.tokens), want=True)
    without = Graphs(target, plane, state).launch(packed, (0, 1), overlapped=False).wait()
    bare = without.logits.clone()
    shown = [without.hidden[tap].clone() for tap in (0, 1)]
    plane.keep_streams((0, 1), target.config.hidden_size, torch.float32)
    runner = Graphs(target, plane, state)
    runner.warm(1)
    output = runner.launch(packed, (), overlapped=False).wait()
    assert torch.equal(output.logits, bare)
    slots = torch.tensor(cache.rows[1].slots)
    for tap in (0, 1):
        assert torch.equal(plane.streams[tap][slots], shown[tap])


@pytest.mark.parametrize(("words", "count"), [(2048, 5), (2048, 31), (2048, 40), (100, 7), (64, 64)])
def test_the_highest_of_pieces_are_the_highest_of_all(words: int, count: int) -> None:
    rows = torch.randperm(3 * words, generator=torch.Generator().manual_seed(words + count)).view(3, words).float()
    values, places = highest(rows, count)
    expected = rows.topk(count)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)
