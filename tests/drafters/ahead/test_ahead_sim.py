"""The simulator of bench/ahead_sim.py against the real engine with the real drafter, in simulated time.

Target and draft model are clocks: a pass takes the setting's time, and an oracle that knows the text is right as often
as the setting says. Everything between (the engine's step, requests, outcomes, waiting) is real.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.backends.toy import toy
from outrider.control.adaptive import Fixed
from outrider.drafters import Workspace, make
from outrider.drafters.ahead import drafter as ahead_module
from outrider.drafters.ahead.setup import DraftSource
from outrider.drafters.ahead.shared_queue import QueueSizes, SharedQueue
from outrider.engine.cache import Cache
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.types import Output, SamplingParams, Sequence

from support.ahead import SimulatedHost

TOKENS, WRONG = 3000, 1


def load(name: str) -> ModuleType:
    path = Path(__file__).parents[3] / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sim, watching = load("ahead_sim"), load("ahead_watch")
timeline = load("ahead_timeline")


class World:
    """One clock."""

    now = 0.0

    def at_least(self, moment: float) -> None:
        self.now = max(self.now, moment)


class Oracle(SimulatedHost):
    """Knows the text, and answers with the setting's times and hit rates."""

    kind = "oracle"

    def __init__(self, world: World, text: list[int], setting: Any) -> None:
        sizes = QueueSizes(4, len(text) + 64, 64)
        super().__init__(SharedQueue(sizes, bytearray(sizes.bytes)), clock=lambda: world.now)
        self.world, self.text, self.s, self.dice = world, text, setting, random.Random(3)

    def submit(self) -> None:
        queue, s, begin = self.queue, self.s, self.world.now
        self.request += 1
        lane = next(i for i, length in enumerate(queue["trunk_length"]) if length >= 0)
        trunk, root = queue["trunk"][lane, : queue["trunk_length"][lane]].tolist(), int(queue["length"][lane])
        depth = queue.scalar("depth")
        if not trunk and queue["forks"][lane, 0] == 1:  # just in time
            queue["keys"][0] = lane, 0, self._right(root)
            queue["chains"][0, :depth] = [self._right(root + 1 + i) for i in range(depth)]
            queue["count"][0] = 1
            self.due = lambda depth: begin + (depth + 1) * s.draft
        else:
            accepted = next((i for i, t in enumerate(trunk) if t != self.text[root + i]), len(trunk))
            hit = self.dice.random() < (s.hit_end if accepted == len(trunk) else s.hit_inside)
            queue["keys"][0] = lane, accepted, self.text[root + accepted]
            after = root + accepted + 1
            queue["chains"][0, :depth] = [self._right(after + i) for i in range(depth)]
            queue["count"][0] = int(hit)
            self.due = lambda depth: begin + sim.done(s, depth)
        self.submitted, queue["times"][0] = begin, begin
        queue["times"][1 : depth + 2] = [self.due(i) for i in range(depth + 1)]
        queue["seconds"][:] = s.first + depth * s.deeper, s.first, s.deeper
        queue["answered"][0], queue["published"][0] = self.request, depth

    def _right(self, at: int) -> int:
        return self.text[at] if self.dice.random() < self.s.alpha else WRONG


class Target:
    """Takes the setting's time and emits the text."""

    rounds = None

    def __init__(self, world: World, text: list[int], setting: Any, plane: Any, drafter: Any) -> None:
        self.world, self.text, self.s, self.plane, self.drafter = world, text, setting, plane, drafter

    def launch(self, batch: Any, taps: object, overlapped: bool) -> Any:
        begin = self.world.now
        choices = [self.text[batch.positions[i] + 1] for i in batch.want]

        def wait() -> Output:
            beside = bool(getattr(self.drafter, "in_flight", None))  # the worker drafts beside this pass
            self.world.at_least(begin + (self.s.passes if beside else self.s.verify))
            return Output(torch.zeros(1, 4).expand(len(choices), 4), highest=[1.0] * len(choices), choices=choices)

        return SimpleNamespace(wait=wait)


def busy(world: World, setting: Any, publish: Any) -> Any:
    """The host takes time between a verdict and the next draft."""

    def busily(engine: Engine, step: Any) -> None:
        world.now += setting.ahead_host if engine.drafter.name == "ahead" else setting.plain_host
        publish(engine, step)

    return busily


def engine_speed(
    monkeypatch: pytest.MonkeyPatch, setting: Any, drafter: str, listener: Callable[[Any], Any] | None = None
) -> tuple[float, Any]:
    """Tokens per second of the real engine in simulated time, and its drafter."""
    dice, world = random.Random(5), World()
    text = [dice.randrange(2, 48) for _ in range(TOKENS + 100)]
    monkeypatch.setattr(watching, "time", SimpleNamespace(perf_counter=lambda: world.now))
    monkeypatch.setattr(Engine, "_publish", busy(world, setting, Engine._publish))
    monkeypatch.setattr(ahead_module, "draft_source", lambda space: DraftSource(Oracle(world, text, setting)))
    target = toy()
    cache = Cache(TOKENS + 400, 4, TOKENS + 200)
    plane = cache.add_plane(1, 1, 1, torch.float32)
    options = {"draft_model": target, "ahead_fallback": "", "ahead_always": True, "ahead_depth": setting.depth}
    made: Any = make(drafter, Workspace(target, cache, plane, options))
    made.clock = lambda: world.now
    runner = Target(world, text, setting, plane, made)
    k = 0 if drafter == "off" else setting.k
    engine = Engine(runner, cache, made, Fixed(k), Scheduler(cache, plane, 1, 512), 48, now=lambda: world.now)
    if listener is not None:
        engine.listeners = (listener(SimpleNamespace(engine=engine)),)
    seq = Sequence(1, text[:10], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    engine.add(seq)
    while engine.busy:
        engine.step()
    assert seq.generated == text[10 : 10 + TOKENS]
    assert not engine.failures
    return TOKENS / world.now, made


HIDDEN = sim.Setting(0.010, 0.002, 0.002, 0.0015, 0.8, 0.9, 0.5, k=5, depth=5)
SETTINGS = {
    "all hidden": HIDDEN,
    "always hit": replace(HIDDEN, hit_end=1.0, hit_inside=1.0),
    "never hit": replace(HIDDEN, hit_end=0.0, hit_inside=0.0),
    "draft slower than verify": replace(HIDDEN, deeper=0.004),
    "forks not known in time": replace(HIDDEN, first=0.013),
    "one device": replace(HIDDEN, slow=1.4),
    "slow beside the target, fast alone": replace(HIDDEN, deeper=0.006, first_idle=0.001, deeper_idle=0.001),
    "a slow host": replace(HIDDEN, deeper=0.003, ahead_host=0.004, plain_host=0.002),
    "poor drafter": replace(HIDDEN, alpha=0.4, hit_inside=0.3, depth=2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_simulator_agrees_with_the_engine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    setting = SETTINGS[name]
    speed, drafter = engine_speed(monkeypatch, setting, "ahead")
    expected = sim.ahead(setting)
    assert speed == pytest.approx(expected["tok_s"], rel=0.05)
    assert drafter.statistics.hit_rate == pytest.approx(expected["hit_rate"], abs=0.05)


def test_plain_decoding_agrees_too(monkeypatch: pytest.MonkeyPatch) -> None:
    speed, _ = engine_speed(monkeypatch, HIDDEN, "off")
    assert speed == pytest.approx(sim.plain(HIDDEN), rel=0.01)


def test_ahead_wins_where_drafting_is_hidden_and_loses_where_it_is_not() -> None:
    assert sim.ahead(HIDDEN)["tok_s"] > 1.2 * sim.ordinary(HIDDEN)
    assert sim.ahead(replace(HIDDEN, slow=2.5))["tok_s"] < sim.ordinary(HIDDEN)
    rows = sim.table(replace(HIDDEN, slow=1.4))
    assert [row["what"].endswith("(projection)") for row in rows] == [False, False, True, True]
    assert rows[3]["tok_s"] > rows[2]["tok_s"]


# ---------------------------------------------------------------- a race measures all that a projection needs


RACES = ["all hidden", "slow beside the target, fast alone", "a slow host", "one device", "poor drafter"]


@pytest.mark.parametrize("name", RACES)
def test_what_a_race_measures_projects_that_race(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From the times that the bench's listener records, and nothing else."""
    setting, watches = SETTINGS[name], list[Any]()

    def watch(llm: Any) -> Any:
        watches.append(watching.Watch(llm))
        return watches[-1]

    speed, _ = engine_speed(monkeypatch, setting, "ahead", watch)
    facts, figures = watches[0].facts(), watches[0].ahead()
    assert facts["decode_tok_s"] == pytest.approx(speed, rel=0.02)
    for each in ("first", "deeper", "hit_end", "hit_inside", "ahead_host"):
        if not (each == "first" and setting.first > setting.passes):
            assert figures[each] == pytest.approx(getattr(setting, each), rel=0.1, abs=0.03 if "hit" in each else 1e-5)
    assert figures["window"] == pytest.approx(setting.passes)
    unused = {"verify": setting.verify, "draft": setting.draft, "alpha": setting.alpha, "k": setting.k}
    measured = sim.setting_of(
        {n: v for n, v in figures.items() if n not in ("jits", "outcomes", "ready", "waited")}
        | unused | {"ahead_alpha": facts["alpha"], "tokens": TOKENS}
    )  # fmt: skip
    assert sim.ahead(measured)["tok_s"] == pytest.approx(facts["decode_tok_s"], rel=0.04)
    picture = timeline.svg(watches[0].steps, name)
    assert picture.count("a pass over") == timeline.SHOWN
    waits = "slow" in name or "host" in name
    assert ('fill="#e07b39"><title>depth' in picture) == waits


def test_a_projection_is_compared_with_the_measurement() -> None:
    race = {"temperature": 0.0, "rows": {"plain": {}, "ordinary": {}, "ahead": {}}}
    assert sim.held(HIDDEN, race)["validated"] is None  # an older race knows only whole requests
    known = replace(HIDDEN, k=2, depth=2, depths=((2, 1),))
    speeds = {"plain": sim.plain(known), "ordinary": sim.ordinary(known), "ahead": sim.ahead(known)["tok_s"]}
    race["rows"] = {name: {"decode_tok_s": 1.05 * speed} for name, speed in speeds.items()}
    report = sim.held(known, race)
    assert report["validated"] is True
    assert [row.get("error") for row in report["rows"][:3]] == pytest.approx([1 / 1.05 - 1] * 3)
    assert "error" not in report["rows"][3]  # two devices were not measured
    race["rows"]["ahead"] = {"decode_tok_s": 1.3 * speeds["ahead"]}
    assert sim.held(known, race)["validated"] is False


def test_a_setting_of_an_older_file_is_read_or_refused() -> None:
    old = {"verify": 0.01, "draft": 0.001, "first": 0.002, "deeper": 0.001, "alpha": 0.8, "hit_end": 0.9}
    old |= {"hit_inside": 0.5, "k": 5, "depth": 5, "slow": 1.2}
    assert sim.setting_of(old).passes == pytest.approx(0.012)
    with pytest.raises(SystemExit, match="temper"):
        sim.setting_of(old | {"temper": 1})


def test_the_end_of_an_answer_is_simulated() -> None:
    """The last drafts of an answer are shorter, and so are its last steps."""
    sure = replace(HIDDEN, alpha=1.0)
    assert sim.ordinary(sure) == pytest.approx(6 / (0.010 + 5 * 0.002))
    assert sim.ordinary(replace(sure, tokens=10)) == pytest.approx(9 / (2 * 0.010 + (5 + 2) * 0.002))
