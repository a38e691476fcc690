"""Never slower on a device that hides the host's work: the real engine in an invented time.

The device is a clock: a pass takes what it took on an H200 (7B, bfloat16), starts when the one before it has ended, and
chooses the next token of a text that was fixed beforehand. What the host does takes invented, fixed times. Nothing here
depends on the machine that runs it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider import engine as engine_module
from outrider.build import adaptive
from outrider.cache import Cache
from outrider.control import Adaptive, Controller, Fixed
from outrider.costs import Costs
from outrider.drafters import Drafter, Workspace, make
from outrider.drafters._head import Features
from outrider.drafters.auto import AGAIN, UNASKED, Auto
from outrider.engine import Engine
from outrider.models.toy import toy
from outrider.runners import desk, device, graphs
from outrider.runners.desk import Desk
from outrider.runners.graphs import Graphs
from outrider.scheduler import Scheduler
from outrider.types import Draft, Output, SamplingParams, Sequence, Step, Turn, chain

from kernels import GPU

MILLISECONDS = {
    1: 3.95, 2: 3.97, 4: 3.98, 8: 4.0, 12: 4.03, 16: 4.06, 24: 4.15, 32: 4.21, 48: 4.46, 64: 4.6, 96: 5.6, 128: 5.9,
    192: 8.7, 256: 8.8, 384: 16.9, 512: 17.2, 768: 22.7, 1024: 31.0, 1280: 40.0,
}  # fmt: skip
DRAFT = 0.74e-3  # seconds of a draft model's pass
TOKENS = 256
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(GPU, reason="an invented device is enough")


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


@pytest.mark.parametrize("drafter", ["suffix", "auto"])
@pytest.mark.parametrize("batch", [1, 4, 16, 64])
def test_nothing_is_lost_where_nothing_repeats(monkeypatch: pytest.MonkeyPatch, batch: int, drafter: str) -> None:
    with monkeypatch.context() as patch:
        plain = Run(patch, "off", batch, "fresh").speed()
    run = Run(monkeypatch, drafter, batch, "fresh")
    assert run.speed() > 0.97 * plain, run.engine.controller.why


@pytest.mark.parametrize(("batch", "least"), [(1, 2.5), (4, 2.0), (16, 1.3), (64, 0.97)])
def test_much_is_won_where_texts_repeat_themselves(monkeypatch: pytest.MonkeyPatch, batch: int, least: float) -> None:
    with monkeypatch.context() as patch:
        plain = Run(patch, "off", batch, "echo").speed()
    assert Run(monkeypatch, "suffix", batch, "echo").speed() > least * plain


GOOD = [
    (1, 0.99, 3.5),
    (4, 0.99, 3.0),
    (16, 0.99, 2.0),
    (32, 0.99, 1.4),
    (64, 0.99, 1.05),
    (1, 0.8, 1.7),
    (16, 0.8, 1.2),
]
VAIN = [(batch, right, 0.97) for batch in (1, 4, 16, 64) for right in (0.0, 0.3)]
UNSURE = [(16, 0.6, 0.95), (32, 0.7, 0.9), (64, 0.8, 0.97)]  # near break-even: what it takes to find out, in 256 tokens


@pytest.mark.parametrize(("batch", "right", "least"), [*GOOD, *VAIN, *UNSURE])
def test_a_draft_model_pays_or_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, batch: int, right: float, least: float
) -> None:
    with monkeypatch.context() as patch:
        plain = Run(patch, "off", batch, "fresh").speed()
    run = Run(monkeypatch, "model", batch, "fresh", right)
    assert run.speed() > least * plain, run.engine.controller.why


def test_plain_passes_follow_each_other_without_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "off", 16, "fresh")
    assert run.speed() > 0.93 * 16 / (MILLISECONDS[16] * 1e-3)  # prompts and the last sequences take the rest


# ------------------------------------------------------------ what is done where nothing is drafted: counts, not times


def crowded(batch: int) -> tuple[Adaptive, list[Turn]]:
    """A controller whose batch fills the machine: a further row takes as long as a token brings."""
    controller = Adaptive(Costs({rows: 0.001 * rows for rows in (1, 2, 4, 8, 16, 32, 64, 128)}), frugal=True)
    controller.draft_node, controller.draft_call = 1e-6, 1e-6
    return controller, [Turn(Sequence(i, [1]), 1, whole=True) for i in range(batch)]


@pytest.mark.parametrize("batch", [8, 64])
def test_a_step_that_drafts_nothing_makes_no_prices(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(Costs, "table", lambda self, rows, sequences=1: made.append(rows) or [])
    controller, turns = crowded(batch)
    for _ in range(100):
        assert controller.budget(turns) is turns  # the very same turns: none is made anew
        assert controller.prune(turns, Draft.empty(batch)).trees
    assert not made
    assert "even a sure draft would lose" in controller.why


class Reads(Drafter):
    """A drafter with a memory, which counts the tokens that it has to read for a draft."""

    name = "head"

    def __init__(self) -> None:
        self.read: dict[int, int] = {}
        self.calls = self.total = 0

    def behind(self, seq: Sequence) -> int:
        return len(seq.tokens) - self.read.get(seq.id, 0)

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        self.calls += 1
        for seq in seqs:
            self.total += self.behind(seq)
            self.read[seq.id] = len(seq.tokens)
        return Draft.pack(chain([1], survival=[0.3]) for _ in seqs)


def auto_with(drafter: Drafter, row: float) -> Auto:
    """`auto` with one costly drafter, where every further row of a pass costs so many tokens."""
    market: Any = SimpleNamespace(speed=700.0, price=lambda rows: row * rows)
    target = toy()
    cache = Cache(64, 2, 64)
    auto = Auto(Workspace(target, cache, cache.add_plane(*target.plane_shape), market=lambda: market))
    auto.free, auto.costly, auto.drafters = [], [drafter], [drafter]
    auto.needs = auto.taps = (1, 2)
    return auto


def live(auto: Auto, batch: int, steps: int, prompt: int = 100) -> None:
    """Answers of 50 tokens, one after the other in each place. Reading takes 60 µs a token, a call a millisecond."""
    drafter: Any = auto.costly[0]
    seqs = [Sequence(i, [1] * prompt, SamplingParams(max_tokens=50)) for i in range(batch)]
    for step in range(steps):
        before = drafter.total
        auto.draft(seqs, [4] * batch)
        seconds = 1e-3 * bool(auto.asked) + 60e-6 * (drafter.total - before)
        for i, seq in enumerate(seqs):
            seq.tokens.append(1)
            if seq.room == 0:
                auto.end(seq)
                seqs[i] = Sequence(seq.id + batch, [1] * prompt, SamplingParams(max_tokens=50))
        turns = [Turn(seq, 1, True) for seq in seqs]
        told: Any = SimpleNamespace(turns=turns, clock={"draft": seconds}, verdicts=[None] * batch, index=step)
        told.draft = Draft.empty(batch)
        auto.observe(told)


@pytest.mark.parametrize("batch", [4, 8, 64])
def test_a_head_that_cannot_pay_is_tried_at_a_bounded_price(batch: int) -> None:
    """Where rows are dear, what is spent on finding out stays below a few hundredths of what is made."""
    reads = Reads()
    auto = auto_with(reads, row=0.8)
    live(auto, batch, 2000)
    assert reads.calls  # it has had its trial
    spent = 700.0 * (1e-3 * reads.calls + 60e-6 * reads.total)  # tokens
    assert spent < 0.03 * 2000 * batch


def test_nothing_is_kept_for_a_head_that_nobody_asks_until_there_are_fewer() -> None:
    reads = Reads()
    auto = auto_with(reads, row=0.8)
    live(auto, 8, UNASKED + 2)
    assert auto.taps == ()  # the target shows nothing, and nothing is copied
    live(auto, 4, 1)
    assert auto.taps == (1, 2)  # fewer than those that kept it silent
    live(auto, 8, 1)
    assert auto.taps == ()  # that is remembered,
    shown = 0
    for _ in range(AGAIN + UNASKED):
        live(auto, 8, 1)
        shown += auto.taps == (1, 2)
    assert 0 < shown <= 4 * UNASKED  # and found out anew after a long while
    auto.space = auto_with(reads, row=0.0).space
    live(auto, 8, 2)
    assert auto.taps == (1, 2)  # rows cost nothing any more: it is asked again


def test_features_of_a_batch_are_copied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts, *rest: copies.append(len(parts)) or cat(parts, *rest))
    features = Features((0, 1))
    seqs = [Sequence(i, [1] * 9) for i in range(64)]
    for at in range(100):
        shown = torch.full((64, 3), float(at))
        step: Any = SimpleNamespace(
            turns=[Turn(seq, 1, True) for seq in seqs],
            draft=Draft.empty(64),
            verdicts=[None] * 64,
            rows=SimpleNamespace(packing=SimpleNamespace(positions=[at] * 64)),
            output=Output(torch.zeros(0), hidden={0: shown, 1: -shown}),
        )
        features.observe(step)
    assert len(copies) == 100  # one for each step, whatever the batch
    for name in (0, 63):
        found = features.between(name, 0, 100, torch.empty(0, 6))  # [100, 6]
        assert found[:, 0].tolist() == [float(at) for at in range(100)]
        assert torch.equal(found[:, :3], -found[:, 3:])
        held = {piece.untyped_storage().data_ptr() for _, piece in features.pieces[name]}
        assert len(held) <= 33  # old rows are its own: it does not keep those of 63 others alive
