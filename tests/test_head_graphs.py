"""A trained head's recorded drafts: what the eager head would have drafted from the same features, and the same text.

Without a GPU the same code runs uncaptured, with its kernels in triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.cache import Cache, Packing, Plane
from outrider.control import Fixed
from outrider.drafters import Workspace
from outrider.drafters.head import TrainedHead
from outrider.engine import Engine
from outrider.models import ops
from outrider.models.head import Head
from outrider.models.toy import RandomWeights, random_head, toy_config
from outrider.models.transformer import Transformer
from outrider.runners import heads as recorded_heads
from outrider.runners.desk import Desk
from outrider.runners.graphs import Graphs
from outrider.scheduler import Scheduler
from outrider.types import Draft, SamplingParams, Sequence, Tree

from kernels import DEVICE, GPU, HALF

PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9, 5, 6, 7], [11] * 6]
TOKENS = 24 if GPU else 5  # the interpreter takes milliseconds for every program of every kernel
GREEDY = SamplingParams(max_tokens=TOKENS)
WARM = SamplingParams(max_tokens=TOKENS, temperature=0.8)
NUCLEUS = SamplingParams(max_tokens=TOKENS, temperature=1.1, top_p=0.8, top_k=20)
PENALISED = SamplingParams(max_tokens=TOKENS, temperature=0.7, repetition_penalty=1.3)
CHAIN: dict[str, Any] = {}
TREE: dict[str, Any] = {"tree": True, "tree_width": 2, "tree_depth": 3}
slow = pytest.mark.skipif(not GPU, reason="takes minutes without a GPU")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr(ops, "on_gpu", lambda tensor: True)
        monkeypatch.setattr(recorded_heads, "FEEDS", (4, 8, 16))
        monkeypatch.setattr(recorded_heads, "FEW", 6)


@pytest.fixture(scope="module")
def target() -> Transformer:
    with pytest.MonkeyPatch.context() as patch:
        if not GPU:
            patch.setattr(ops, "on_gpu", lambda tensor: True)
        config = toy_config(2, context=128)
        return Transformer(config, RandomWeights(config, 1), torch.float32, DEVICE)


def head_for(target: Transformer, kind: str, dtype: torch.dtype = torch.float32) -> Head:
    config, tensors = random_head(target.config, kind)
    return Head(config, tensors, target.embedding, dtype, DEVICE, 96)


def padded(cache: Cache, make: Any) -> Any:
    """A CPU's planes have no slot for padding."""
    cache.slots += not GPU
    try:
        return make()
    finally:
        cache.slots -= not GPU


def engine(target: Transformer, head: Head | None, k: int, slots: int = 400, **options: object) -> Engine:
    """With a head that checks itself: every recorded draft is made eagerly too."""
    cache = Cache(slots, 8, 96, DEVICE)
    plane: Plane = padded(cache, lambda: cache.add_plane(*target.plane_shape))
    desk = Desk(cache, DEVICE, 4)
    options |= {"head": head or head_for(target, "eagle3")}
    space = Workspace(target, cache, plane, options, None, lambda model, plane: Graphs(model, plane, desk))
    made = padded(cache, lambda: Twice(space))
    return Engine(Graphs(target, plane, desk), cache, made, Fixed(k), Scheduler(cache, plane, 4, 48), 48)


class Twice(TrainedHead):
    """Drafts eagerly, takes that back, and drafts again as a graph."""

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.drafted: list[tuple[Tree, ...]] = []
        self.again = False
        self.sources: list[int] = []

    def _roll(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        rollout, drafts, held = self.rollout, self.rollout.drafts, dict(self.rollout.plane.held)
        before = {seq.id: rollout.cache.sync(seq, rollout.plane) for seq in seqs}
        wanted: tuple[Tree, ...] = ()
        if self.again:
            rollout.drafts = None
            wanted = super()._roll(seqs, budget).trees
            rollout.drafts = drafts
            rollout.plane.held.update(held | before)
        draft = super()._roll(seqs, budget)
        if draft.unread is not None:
            read = draft.unread.tolist()
            told = tuple(tree._replace(tokens=[read[-1 - t] for t in tree.tokens]) for tree in draft.trees)
        else:
            told = draft.trees
        self.drafted.append(told)
        for mine, theirs in zip(told, wanted, strict=False):
            assert mine.tokens == theirs.tokens
            assert mine.parents == theirs.parents
            if mine.survival is not None:
                assert mine.survival == pytest.approx(theirs.survival, rel=1e-4)
        return draft


def say(engine: Engine, params: list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    seqs = [Sequence(i + 1, prompt, p, seed=40 + i) for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))]
    for seq in seqs:
        engine.add(seq)
    while engine.busy:
        step = engine.step()
        assert not step.failure, step.failure
        engine.cache.check()
    assert not engine.last_failure
    return [seq.generated for seq in seqs]


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("options", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_recorded_drafts_are_the_eager_ones(
    target: Transformer, kind: str, options: dict[str, Any], law: SamplingParams
) -> None:
    made = engine(target, head_for(target, kind), 6, **options)
    made.drafter.again = True
    say(made, [law] * 3)
    assert made.drafter.drafted
    assert all(tree.tokens for trees in made.drafter.drafted for tree in trees)
    assert made.drafter.rollout.drafts.recorded
