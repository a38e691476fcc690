"""The real engine on an invented device: passes and host work take fixed, invented times."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.state import DeviceState
from outrider.control import Controller
from outrider.control.adaptive import Adaptive, Fixed
from outrider.control.costs import PassCosts
from outrider.drafters import Workspace, make
from outrider.engine.cache import Cache
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.types import Output, SamplingParams, Sequence, Step

MILLISECONDS = {
    1: 3.95, 2: 3.97, 4: 3.98, 8: 4.0, 12: 4.03, 16: 4.06, 24: 4.15, 32: 4.21, 48: 4.46, 64: 4.6, 96: 5.6, 128: 5.9,
    192: 8.7, 256: 8.8, 384: 16.9, 512: 17.2, 768: 22.7, 1024: 31.0, 1280: 40.0,
}  # fmt: skip
DRAFT = 0.74e-3  # seconds of a draft model's pass
TOKENS = 256
CPU = torch.device("cpu")


class World:
    """One clock for the host, one for the device."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def work(self, seconds: float) -> None:
        """The host is busy."""
        self.now += seconds

    def start(self, seconds: float) -> None:
        self.free = max(self.now, self.free) + seconds


class InventedEvent:
    """An event in the device's stream."""

    def __init__(self, world: World) -> None:
        self.world, self.at = world, 0.0

    def record(self, stream: Any = None) -> None:
        self.at = max(self.world.now, self.world.free)

    def synchronize(self) -> None:
        self.world.now = max(self.world.now, self.at)

    def elapsed_time(self, end_event: Any) -> float:
        return (end_event.at - self.at) * 1e3


class InventedRecording:
    """A recording that takes an invented time and computes nothing."""

    def __init__(self, world: World, seconds: float) -> None:
        self.world, self.seconds = world, seconds

    def replay(self) -> Output:
        self.world.start(self.seconds)
        return Output(torch.zeros(1, 4).expand(2048, 4))


class InventedDriver(Driver):
    """A device that is a clock. The time of a recording depends on its shape."""

    def __init__(self, world: World) -> None:
        super().__init__(CPU)
        self.world = world

    def event(self) -> Any:
        return InventedEvent(self.world)

    def record(self, work: Any) -> Any:
        return InventedRecording(self.world, self.seconds(work.__self__))

    def seconds(self, recorded: Any) -> float:
        shape = recorded.shape
        if not hasattr(shape, "rows"):  # a chain of a draft model's passes
            return shape.length * DRAFT * (1 + shape.batch / 100)
        small = getattr(recorded.graphs.model, "small", False)
        return MILLISECONDS[shape.rows] * 1e-3 * (0.2 if small else 1.0)


class InventedRunner:
    """Captured passes that choose the next tokens of given texts."""

    rounds = None

    def __init__(self, run: Run, inner: Graphs) -> None:
        self.run, self.inner, self.plane = run, inner, inner.plane

    def launch(self, *arguments: Any) -> Any:
        pending = self.inner.launch(*arguments)
        return SimpleNamespace(wait=lambda: self._chosen(pending))

    def _chosen(self, pending: Any) -> Output:
        output, batch, texts = pending.wait(), pending.batch, self.run.texts
        choices = [texts[batch.owners[i].id][batch.positions[i] + 1] for i in batch.want]
        tokens = None
        if min(batch.tokens) < 0:
            pairs = zip(batch.owners, batch.positions, strict=True)
            tokens = [texts[s.id][at] if self.run.is_right(s.id, at) else 0 for s, at in pairs]
        return replace(output, choices=choices, highest=[1.0] * len(choices), tokens=tokens)


class HostWork:
    """A listener that adds the host time of a step, roughly as measured on an H200's host, by rows and requests."""

    reads_logits = reads_guesses = False

    def __init__(self, world: World) -> None:
        self.world = world

    def observe(self, step: Step) -> None:
        requests = sum(turn.budget > 0 for turn in step.turns)
        self.world.work(60e-6 + 12e-6 * len(step.turns) + 2e-6 * step.rows)
        self.world.work(requests * 30e-6 + (50e-6 if requests else 0.0))


def fake_model(small: bool = False) -> Any:
    config = SimpleNamespace(heads=36, kv_heads=12, head_dim=64, vocab_size=49152, layers=1, context_length=2048)
    shape = (1, 1, 1, torch.float32)
    return SimpleNamespace(
        config=config, device=CPU, dtype=torch.bfloat16, compute=torch.bfloat16, plane_shape=shape, forward=None,
        small=small, has_layers=True, identity=lambda: None, encoder=False, mtp=None,
        reader=None, drafts_chains=False, draft_ids=None,
    )  # fmt: skip


def text(kind: str, rnd: random.Random) -> list[int]:
    """`fresh` hardly ever repeats a token; `echo` repeats a phrase with 3 % of its tokens replaced."""
    if kind == "fresh":
        return [rnd.randrange(40_000) for _ in range(TOKENS + 200)]
    phrase = [rnd.randrange(40_000) for _ in range(60)]
    tokens: list[int] = []
    while len(tokens) < TOKENS + 200:
        tokens += [token if rnd.random() < 0.97 else rnd.randrange(40_000) for token in phrase]
    return tokens


class Run:
    """A batch of texts through an engine, in invented time."""

    driver: type[InventedDriver] = InventedDriver
    plain: ClassVar[dict[tuple[type[Run], int, str], float]] = {}  # speeds without a drafter, each measured once

    def __init__(self, drafter: str, batch: int, kind: str, right: float = 0.99) -> None:
        self.key = (type(self), batch, kind) if drafter == "off" else None
        self.world, self.right, self.rnd = World(), right, random.Random(7)
        self.engine = self._engine(drafter, batch)
        rnd = random.Random(batch)
        self.texts = {i + 1: text(kind, rnd) for i in range(batch)}
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        self.seqs = [Sequence(i, tokens[: rnd.randrange(40, 120)], params) for i, tokens in self.texts.items()]

    def _engine(self, drafter: str, batch: int) -> Engine:
        cache = Cache(batch * 700 + 600, batch + 33, 2048)
        cache.slots += 1  # a CPU's planes have no slot for padding
        target = fake_model()
        plane = cache.add_plane(*target.plane_shape)
        shared = DeviceState(cache, self.driver(self.world), batch)
        runner = Graphs(target, plane, shared)
        runner.warm(max(16, batch))
        options: dict[str, Any] = {"suffix_shared_tokens": 0}
        options |= {"draft_model": fake_model(small=True)} if drafter == "model" else {}
        space = Workspace(target, cache, plane, options, None, lambda model, plane: Graphs(model, plane, shared))
        made = make(drafter, space)
        cache.slots -= 1
        controller: Controller = Fixed(0) if drafter == "off" else Adaptive(self._costs(), name=made.name)
        scheduler = Scheduler(cache, plane, batch, 512)
        return self._assemble(runner, cache, made, controller, scheduler)

    def _assemble(self, runner: Graphs, cache: Cache, *parts: Any) -> Engine:
        """An engine whose clock, target and host work are invented."""
        target, listeners = InventedRunner(self, runner), (HostWork(self.world),)
        return Engine(target, cache, *parts, 49152, listeners, now=lambda: self.world.now)

    def _costs(self) -> PassCosts:
        counts, times = (1, 2, 4, 8, 16, 32, 64), MILLISECONDS.items()
        return PassCosts({(s, n): t * 1e-3 for s in counts for n, t in times if s <= n <= 1024})

    def is_right(self, seq: int, position: int) -> bool:
        """Whether the draft model guesses this token."""
        return self.rnd.random() < self.right

    def speed(self) -> float:
        """Tokens per second of the whole batch."""
        if self.key is None:
            return self._measure()
        if self.key not in self.plain:
            self.plain[self.key] = self._measure()
        return self.plain[self.key]

    def _measure(self) -> float:
        for seq in self.seqs:
            self.engine.add(seq)
        while self.engine.busy:
            self.engine.step()
        for seq in self.seqs:
            assert seq.generated == self.texts[seq.id][seq.prompt_len : seq.prompt_len + TOKENS]
        return TOKENS * len(self.seqs) / self.world.now
