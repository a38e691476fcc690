"""An invented trained head and request streams, for engines that run in invented time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.state import DeviceState
from outrider.control import Controller
from outrider.control.adaptive import Adaptive, Fixed
from outrider.drafters import DraftRequest, Workspace, make
from outrider.engine.cache import Cache
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.types import Draft, SamplingParams, Sequence

from support.invented_time import CPU, InventedDriver, Run, World, fake_model, text

head_module = pytest.importorskip("outrider.drafters.head.drafter")  # modules that use this one are skipped
RECORDING = 0.2  # seconds of the host


PINNING = 2e-3


ANSWER = 128  # tokens


class SlowToRecord(InventedDriver):
    """Recording a pass takes the host a while, and so does the memory that a device can copy from."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.recordings: list[Any] = []  # shapes

    def record(self, work: Any) -> Any:
        self.world.work(RECORDING)
        self.recordings.append(work.__self__.shape)
        return super().record(work)

    def allocated(self) -> None:
        self.world.work(PINNING)

    def seconds(self, recorded: Any) -> float:
        shape = recorded.shape
        kind = getattr(shape, "kind", None)
        if kind is None:
            return super().seconds(recorded)
        return 0.1e-3 + (0.08e-3 * shape.length if kind == "chain" else 2e-6 * shape.rows)


def fake_head() -> Any:
    config = SimpleNamespace(
        heads=16,
        kv_heads=4,
        head_dim=64,
        taps=(0,),
        target_hidden_size=1,
        kind="eagle3",
        parallel=False,
        block=8,
        vocab_size=49152,
        acceptance=(),
    )
    return SimpleNamespace(
        config=config, device=CPU, dtype=torch.bfloat16, compute=torch.float32, stream=torch.float32,
        plane_shape=(1, 1, 1, torch.float32), ids=torch.arange(4), device_ids=torch.arange(4), masks=False,
        kind_of_model="head", small=True,
    )  # fmt: skip


def answer_text(kind: str, rnd: random.Random) -> list[int]:
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

    options: ClassVar[dict[str, Any]] = {}  # of the drafter, beside the head

    def __init__(
        self, patch: pytest.MonkeyPatch, drafter: str, right: list[float], k: int | str = "auto", kind: str = "fresh",
        head: bool = True,
    ) -> None:  # fmt: skip
        self.k, self.chances, self.head = k, right, head
        patch.setattr(head_module, "open_head", lambda space: head_module.OpenedHead(fake_head()))
        super().__init__(drafter, 1, kind)
        self.passed = self.world.now
        self.recorded = len(self.recordings)
        rnd = random.Random(5)
        self.texts = {i: answer_text(kind, rnd) for i in range(len(right))}
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
        sizes = [rnd.randrange(20, 300) for _ in right]
        self.seqs = [Sequence(i, self.texts[i][: sizes[i]], params) for i in self.texts]

    def _engine(self, drafter: str, batch: int) -> Engine:
        driver = SlowToRecord(self.world)
        self.recordings = driver.recordings
        cache = Cache(2000, batch + 33, 2048)
        cache.slots += 1  # a CPU's planes have no slot for padding
        target = fake_model()
        plane = cache.add_plane(*target.plane_shape)
        shared = DeviceState(cache, driver, batch)
        runner = Graphs(target, plane, shared)
        options: dict[str, Any] = {"suffix_shared_tokens": 0, "head": "given" if self.head else "none"}
        options |= self.options
        space = Workspace(target, cache, plane, options, None, lambda model, plane: Graphs(model, plane, shared))
        made = make(drafter, space)
        made.draft = self._timed(made.draft)  # type: ignore[method-assign]
        cache.slots -= 1
        controller: Controller = Fixed(0 if drafter == "off" or self.k == "auto" else int(self.k))
        if drafter != "off" and self.k == "auto":
            controller = Adaptive(self._costs(), name=made.name)
        runner.warm(16)
        return self._assemble(runner, cache, made, controller, Scheduler(cache, plane, batch, 512))

    def _timed(self, draft: Callable[[DraftRequest], Draft]) -> Callable[[DraftRequest], Draft]:
        """Looking through the text and filling in forms takes the host a little, however the device is asked."""

        def drafting(request: DraftRequest) -> Draft:
            self.world.work(20e-6)
            return draft(request)

        return drafting

    def is_right(self, seq: int, position: int) -> bool:
        """The same for everybody: what is easy for one is easy for all."""
        return random.Random(seq * 4096 + position).random() < self.chances[seq]

    def answer(self, seq: Sequence) -> tuple[float, int]:
        """Seconds of a request, and what it had to record on the way."""
        begin, known = self.world.now, len(self.recordings)
        self.engine.cache.drop_retired()
        self.engine.add(seq)
        while self.engine.busy:
            self.engine.step()
        assert seq.generated == self.texts[seq.id][seq.prompt_len : seq.prompt_len + ANSWER]
        return self.world.now - begin, len(self.recordings) - known


@dataclass(frozen=True)
class Measured:
    """Answers of several requests in a row by a fresh engine; recordings are counted apart."""

    seconds: list[float]
    recordings: int

    def speed(self, some: slice = slice(None)) -> float:
        """Tokens per second of whole requests."""
        return ANSWER * len(self.seconds[some]) / sum(self.seconds[some])


MANY = 8  # requests
