"""The real engine on an invented device: passes and host work take fixed, invented times."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.backends.cuda import capture as device, graphs, state as desk
from outrider.backends.cuda.graphs import Graphs
from outrider.backends.cuda.state import Desk
from outrider.backends.toy import toy
from outrider.build import adaptive
from outrider.control.adaptive import Controller, Fixed
from outrider.control.costs import Costs
from outrider.drafters import Drafter, Workspace, make
from outrider.drafters.auto import Auto
from outrider.engine import step as engine_module
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
        self.now, self.free, self.passes, self.vain = 0.0, 0.0, 0, 0

    def work(self, seconds: float) -> None:
        """The host is busy."""
        self.now += seconds

    def start(self, seconds: float) -> None:
        self.free = max(self.now, self.free) + seconds
        self.passes += 1


class Moment:
    """A mark in the device's stream of work."""

    def __init__(self, world: World) -> None:
        self.world, self.at = world, 0.0

    def record(self, stream: Any = None) -> None:
        self.at = max(self.world.now, self.world.free)

    def synchronize(self) -> None:
        self.world.now = max(self.world.now, self.at)

    def elapsed_time(self, later: Moment) -> float:
        return (later.at - self.at) * 1e3


def recording(world: World) -> Any:
    class Recorded:
        def __init__(self, work: Any, device: torch.device, pool: Any) -> None:
            if not hasattr(work, "__self__"):  # what only keeps the desk's memory alive
                self.seconds = 0.0
                return
            shape = work.__self__.shape
            small = getattr(getattr(work.__self__, "graphs", None), "model", None)
            if hasattr(shape, "rows"):
                self.seconds = MILLISECONDS[shape.rows] * 1e-3 * (0.2 if getattr(small, "small", False) else 1.0)
            else:
                self.seconds = shape.length * DRAFT * (1 + shape.batch / 100)

        def replay(self) -> Output:
            world.start(self.seconds)
            return Output(torch.zeros(1, 4).expand(2048, 4))

    return Recorded


def fake_model(small: bool = False) -> Any:
    config = SimpleNamespace(heads=36, kv_heads=12, head_dim=64, vocab_size=49152, layers=1, context_length=2048)
    shape = (1, 1, 1, torch.float32)
    return SimpleNamespace(
        config=config, device=CPU, dtype=torch.bfloat16, plane_shape=shape, forward=None, small=small
    )


def text(kind: str, rnd: random.Random) -> list[int]:
    """`fresh` hardly ever says anything twice; `echo` repeats what it said before, with changes."""
    if kind == "fresh":
        return [rnd.randrange(40_000) for _ in range(TOKENS + 200)]
    phrase = [rnd.randrange(40_000) for _ in range(60)]
    said: list[int] = []
    while len(said) < TOKENS + 200:
        said += [token if rnd.random() < 0.97 else rnd.randrange(40_000) for token in phrase]
    return said


class Run:
    """A batch of texts through an engine, in invented time."""

    recordings = staticmethod(recording)

    def __init__(self, patch: pytest.MonkeyPatch, drafter: str, batch: int, kind: str, right: float = 0.99) -> None:
        self.world, self.right, self.rnd = World(), right, random.Random(7)
        for module in (desk, graphs, device):
            patch.setattr(module, "mark", lambda _: Moment(self.world))
        patch.setattr(desk, "Recording", self.recordings(self.world))
        patch.setattr(engine_module, "time", SimpleNamespace(perf_counter=lambda: self.world.now))
        patch.setattr(graphs.Pending, "wait", self._told(graphs.Pending.wait))
        patch.setattr(Engine, "_publish", self._busy(Engine._publish))
        self.engine = self._engine(drafter, batch)
        rnd = random.Random(batch)
        self.texts = {i + 1: text(kind, rnd) for i in range(batch)}
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        self.seqs = [Sequence(i, said[: rnd.randrange(40, 120)], params) for i, said in self.texts.items()]

    def _engine(self, drafter: str, batch: int) -> Engine:
        cache = Cache(batch * 700 + 600, batch + 33, 2048)
        cache.slots += 1  # a CPU's planes have no slot for padding
        target = fake_model()
        plane = cache.add_plane(*target.plane_shape)
        shared = Desk(cache, CPU, batch)
        runner = Graphs(target, plane, shared)
        runner.warm(max(16, batch))
        options = {"suffix_shared_tokens": 0, "draft_model": fake_model(small=True)}
        space = Workspace(target, cache, plane, options, None, lambda model, plane: Graphs(model, plane, shared))
        made = make(drafter, space)
        cache.slots -= 1
        controller: Controller = Fixed(0) if drafter == "off" else adaptive(self._costs(), made)
        scheduler = Scheduler(cache, plane, batch, 512)
        return Engine(runner, cache, made, controller, scheduler, 49152)

    def _costs(self) -> Costs:
        known = {(s, n): t * 1e-3 for s in (1, 2, 4, 8, 16, 32, 64) for n, t in MILLISECONDS.items() if s <= n <= 1024}
        return Costs(known)

    def _busy(self, publish: Any) -> Any:
        """What steps took on the machine beside the H200, roughly: by their rows, and when drafts are asked for."""

        def busy(engine: Engine, step: Step) -> None:
            asked = sum(turn.budget > 0 for turn in step.turns)
            self.world.work(60e-6 + 12e-6 * len(step.turns) + 2e-6 * step.rows.count)
            self.world.work(asked * 30e-6 + (50e-6 if asked else 0.0))
            publish(engine, step)

        return busy

    def _told(self, wait: Any) -> Any:
        def told(pending: Any) -> Output:
            said, p = wait(pending), pending.packing
            choices = [self.texts[p.owners[i].id][p.positions[i] + 1] for i in p.want]
            tokens = None
            if min(p.tokens) < 0:
                pairs = zip(p.owners, p.positions, strict=True)
                tokens = [self.texts[s.id][at] if self.is_right(s.id, at) else 0 for s, at in pairs]
            return replace(said, choices=choices, highest=[1.0] * len(choices), tokens=tokens)

        return told

    def is_right(self, seq: int, position: int) -> bool:
        """Whether the draft model guesses this token."""
        return self.rnd.random() < self.right

    def speed(self) -> float:
        """Tokens per second of the whole batch."""
        for seq in self.seqs:
            self.engine.add(seq)
        while self.engine.busy:
            self.engine.step()
        for seq in self.seqs:
            assert seq.generated == self.texts[seq.id][seq.prompt_len : seq.prompt_len + TOKENS]
        return TOKENS * len(self.seqs) / self.world.now


def auto_with(drafter: Drafter, row: float) -> Auto:
    """`auto` with one costly drafter, where every further row of a pass costs so many tokens."""
    market: Any = SimpleNamespace(speed=700.0, price=lambda rows: row * rows)
    target = toy()
    cache = Cache(64, 2, 64)
    auto = Auto(Workspace(target, cache, cache.add_plane(*target.plane_shape), market=lambda: market))
    auto.free, auto.costly, auto.drafters = [], [drafter], [drafter]
    auto.needs = auto.taps = (1, 2)
    return auto
