"""An invented trained head and request streams, for engines that run in invented time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from outrider.backends.cuda import capture as device, graphs
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.state import Desk
from outrider.build import adaptive
from outrider.control.adaptive import Controller, Fixed
from outrider.drafters import Workspace, make
from outrider.drafters.head import drafter as head_module, passes as head_passes
from outrider.engine.cache import Cache
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.types import SamplingParams, Sequence, Turn

from support.invented_time import CPU, Run, World, fake_model, recording, text

RECORDING = 0.2  # seconds of the host


PINNING = 2e-3


ANSWER = 128  # tokens


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


class Pinned(device.Form):
    """Memory that a device can copy from takes the host a while to get, outside what is timed as a recording."""

    world: World

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.world.work(PINNING)


class Requests(Run):
    """Requests one after the other; right[i] is how often a drafted token of the i-th one is right."""

    recordings = staticmethod(recording_takes_time)
    options: ClassVar[dict[str, Any]] = {}  # of the drafter, beside the head

    def __init__(
        self, patch: pytest.MonkeyPatch, drafter: str, right: list[float], k: int | str = "auto", kind: str = "fresh",
        head: bool = True,
    ) -> None:  # fmt: skip
        self.k, self.chances, self.head = k, right, head
        patch.setattr(head_module, "load_head", lambda space: fake_head())
        patch.setattr(Engine, "_draft", self._drafting(Engine._draft))
        for module in (graphs, head_passes):
            patch.setattr(module, "Form", Pinned)
        super().__init__(patch, drafter, 1, kind)
        self.passed = self.world.now
        self.recorded = len(self.world.recordings)
        rnd = random.Random(5)
        self.texts = {i: said(kind, rnd) for i in range(len(right))}
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
        sizes = [rnd.randrange(20, 300) for _ in right]
        self.seqs = [Sequence(i, self.texts[i][: sizes[i]], params) for i in self.texts]

    def _engine(self, drafter: str, batch: int) -> Engine:
        self.world.recordings, Pinned.world = [], self.world
        cache = Cache(2000, batch + 33, 2048)
        cache.slots += 1  # a CPU's planes have no slot for padding
        target = fake_model()
        plane = cache.add_plane(*target.plane_shape)
        shared = Desk(cache, CPU, batch)
        runner = Graphs(target, plane, shared)
        options: dict[str, Any] = {"suffix_shared_tokens": 0, "head": "given" if self.head else "none"}
        options |= self.options
        engine: Any = None
        space = Workspace(
            target, cache, plane, options, None, lambda model, plane: Graphs(model, plane, shared),
            lambda: getattr(engine.controller, "now", None),
        )  # fmt: skip
        made = make(drafter, space)
        cache.slots -= 1
        controller: Controller = Fixed(0 if drafter == "off" or self.k == "auto" else int(self.k))
        if drafter != "off" and self.k == "auto":
            controller = adaptive(self._costs(), made)
        runner.warm(16)
        engine = Engine(runner, cache, made, controller, Scheduler(cache, plane, batch, 512), 49152)
        return engine

    def _drafting(self, draft: Any) -> Any:
        """Looking through the text and filling in forms takes the host a little, however the device is asked."""

        def drafting(engine: Engine, turns: list[Turn]) -> Any:
            self.world.work(20e-6 * any(turn.budget for turn in turns))
            return draft(engine, turns)

        return drafting

    def is_right(self, seq: int, position: int) -> bool:
        """The same for everybody: what is easy for one is easy for all."""
        return random.Random(seq * 4096 + position).random() < self.chances[seq]

    def answer(self, seq: Sequence) -> tuple[float, int]:
        """Seconds of a request, and what it had to record on the way."""
        begin, known = self.world.now, len(self.world.recordings)
        self.engine.cache.drop_retired()
        self.engine.add(seq)
        while self.engine.busy:
            self.engine.step()
        assert seq.generated == self.texts[seq.id][seq.prompt_len : seq.prompt_len + ANSWER]
        return self.world.now - begin, len(self.world.recordings) - known


@dataclass(frozen=True)
class Told:
    """Answers of several requests in a row by a fresh engine; recordings are counted apart."""

    seconds: list[float]
    recordings: int

    def speed(self, some: slice = slice(None)) -> float:
        """Tokens per second of whole requests."""
        return ANSWER * len(self.seconds[some]) / sum(self.seconds[some])


MANY = 8  # requests
