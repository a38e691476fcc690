"""A head's drafts on a device that records them first: the real engine and the real runners in an invented time.

The device is that of `test_never_slower`; in addition a trained head drafts there (0.1 ms and 0.08 ms for each token),
and every recording keeps the host busy for 0.2 s, as on the machine beside the H200. Requests come one after the other.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.cache import Cache
from outrider.control import Adaptive, Controller, Fixed
from outrider.drafters import Workspace, head as head_module, make
from outrider.engine import Engine
from outrider.runners import desk
from outrider.runners.desk import Desk
from outrider.runners.graphs import Graphs
from outrider.scheduler import Scheduler
from outrider.types import SamplingParams, Sequence, Turn

from kernels import GPU
from test_never_slower import CPU, Run, World, fake_model, recording, text

RECORDING = 0.2  # seconds of the host
ANSWER = 128  # tokens
pytestmark = pytest.mark.skipif(GPU, reason="an invented device is enough")


def recording_takes_time(world: World) -> Any:
    class Recorded(recording(world)):  # type: ignore[misc]
        def __init__(self, work: Any, device: torch.device, pool: Any) -> None:
            shape = getattr(getattr(work, "__self__", None), "shape", None)
            if shape is not None:
                world.work(RECORDING)
                world.recordings.append(shape)
            kind = getattr(shape, "kind", None)
            if kind is None:
                super().__init__(work, device, pool)
            else:
                self.seconds = 0.1e-3 + (0.08e-3 * shape.length if kind == "chain" else 2e-6 * shape.rows)

    return Recorded


def fake_head() -> Any:
    config = SimpleNamespace(
        heads=16, kv_heads=4, head_dim=64, taps=(0,), target_hidden_size=1, kind="eagle3", block=8, vocab_size=49152
    )
    return SimpleNamespace(
        config=config, device=CPU, dtype=torch.bfloat16, compute=torch.float32, stream=torch.float32,
        plane_shape=(1, 1, 1, torch.float32), ids=torch.arange(4), masks=False, kind_of_model="head", small=True,
    )  # fmt: skip


def said(kind: str, rnd: random.Random) -> list[int]:
    """A prompt and its answer. `half` repeats twenty tokens after every twenty new ones."""
    if kind != "half":
        return text(kind, rnd)
    tokens = text("fresh", rnd)
    for at in range(40, len(tokens) - 20, 40):
        back = rnd.randrange(at - 19)
        tokens[at : at + 20] = tokens[back : back + 20]
    return tokens


class Requests(Run):
    """Requests one after the other; right[i] is how often a drafted token of the i-th one is right."""

    recordings = staticmethod(recording_takes_time)

    def __init__(
        self, patch: pytest.MonkeyPatch, drafter: str, right: list[float], k: int | str = "auto", kind: str = "fresh",
        head: bool = True,
    ) -> None:  # fmt: skip
        self.k, self.chances, self.head = k, right, head
        patch.setattr(head_module, "load_head", lambda space: fake_head())
        patch.setattr(Engine, "_draft", self._drafting(Engine._draft))
        super().__init__(patch, drafter, 1, kind)
        self.passed = self.world.now
        self.recorded = len(self.world.recordings)
        rnd = random.Random(5)
        self.texts = {i: said(kind, rnd) for i in range(len(right))}
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
        sizes = [rnd.randrange(20, 300) for _ in right]
        self.seqs = [Sequence(i, self.texts[i][: sizes[i]], params) for i in self.texts]

    def _engine(self, drafter: str, batch: int) -> Engine:
        self.world.recordings = []
        cache = Cache(2000, batch + 33, 2048)
        cache.slots += 1  # a CPU's planes have no slot for padding
        target = fake_model()
        plane = cache.add_plane(*target.plane_shape)
        shared = Desk(cache, CPU, batch)
        runner = Graphs(target, plane, shared)
        options: dict[str, Any] = {"suffix_shared_tokens": 0, "head": "given" if self.head else "none"}
        engine: Any = None
        space = Workspace(
            target, cache, plane, options, None, lambda model, plane: Graphs(model, plane, shared),
            lambda: getattr(engine.controller, "now", None),
        )  # fmt: skip
        made = make(drafter, space)
        cache.slots -= 1
        controller: Controller = Fixed(0)
        if drafter != "off":
            controller = Adaptive(self._costs(), name=drafter, paced=made.paced, frugal=made.frugal) if self.k == "auto" else Fixed(int(self.k))
        runner.warm(16)
        engine = Engine(runner, cache, made, controller, Scheduler(cache, plane, batch, 512), 49152)
        return engine

    def _drafting(self, draft: Any) -> Any:
        """Looking through the text and filling in forms takes the host a little, however the device is asked."""

        def drafting(engine: Engine, turns: list[Turn]) -> Any:
            self.world.work(20e-6 * any(turn.budget for turn in turns))
            return draft(engine, turns)

        return drafting

    def each(self) -> list[tuple[float, int]]:
        found = []
        for seq in self.seqs:
            self.right = self.chances[seq.id]
            before, known = self.world.now, len(self.world.recordings)
            self.engine.cache.drop_retired()
            self.engine.add(seq)
            while self.engine.busy:
                self.engine.step()
            assert seq.generated == self.texts[seq.id][seq.prompt_len : seq.prompt_len + ANSWER]
            found.append((self.world.now - before, len(self.world.recordings) - known))
        return found
