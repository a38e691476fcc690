"""A head's drafts on a device that records them first: the real engine and the real runners in an invented time.

The device is that of `test_never_slower`; in addition a trained head drafts there (0.1 ms and 0.08 ms for each token),
and every recording keeps the host busy for 0.2 s, as on the machine beside the H200. Requests come one after the other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from outrider.build import adaptive
from outrider.cache import Cache
from outrider.control import Controller, Fixed
from outrider.drafters import Workspace, head as head_module, make
from outrider.engine import Engine
from outrider.runners import device, graphs, head_passes
from outrider.runners.desk import Desk
from outrider.runners.graphs import Graphs
from outrider.scheduler import Scheduler
from outrider.types import Draft, SamplingParams, Sequence, Turn, chain
from test_never_slower import CPU, Run, World, fake_model, recording, text

from kernels import GPU

RECORDING = 0.2  # seconds of the host
PINNING = 2e-3
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


def told(drafter: str, right: list[float], k: int | str = "auto", kind: str = "fresh", head: bool = True) -> Told:
    with pytest.MonkeyPatch.context() as patch:
        run = Requests(patch, drafter, right, k, kind, head)
        found = [run.answer(seq) for seq in run.seqs]
    return Told([seconds - RECORDING * recorded for seconds, recorded in found], sum(n for _, n in found))


MANY = 8  # requests
PROMPTS = 7  # recordings that plain decoding needs too, at most: prompts have all lengths


@pytest.mark.parametrize(("right", "ks", "least"), [(0.9, (8, 12), 0.93), (0.68, (6, 8), 0.93), (0.3, (2,), 0.85)])
def test_k_is_found_where_a_head_drafts(right: float, ks: tuple[int, ...], least: float) -> None:
    """A recording that counted as the price of asking kept the head silent for the first half of such a row."""
    best = max(told("head", [right] * MANY, k).speed() for k in ks)
    auto = told("head", [right] * MANY)
    assert auto.speed() > least * best
    assert auto.speed(slice(0, 2)) > (least - 0.1) * best  # from the first answers on
    assert auto.recordings <= PROMPTS + 6  # two ways to read, three lengths, and to verify the longest


def test_a_head_that_is_always_wrong_costs_next_to_nothing() -> None:
    plain, auto = told("off", [0.05] * MANY), told("head", [0.05] * MANY)
    assert auto.speed() > 0.98 * plain.speed()
    assert auto.recordings <= PROMPTS + 3


@pytest.mark.parametrize("drafter", ["head", "auto"])
def test_texts_that_change_between_requests(drafter: str) -> None:
    """Every other one is of a kind that the head cannot guess: each is worth what it would be among its own."""
    good, bad = slice(0, None, 2), slice(1, None, 2)
    right = [0.68, 0.05] * (MANY // 2)
    plain, fixed, auto = told("off", right), told("head", right, 6), told(drafter, right)
    assert auto.speed(good) > 0.9 * fixed.speed(good)
    assert auto.speed(bad) > 0.96 * plain.speed(bad)


@pytest.mark.parametrize(
    ("kind", "right"), [("fresh", 0.9), ("fresh", 0.68), ("fresh", 0.05), ("half", 0.68), ("half", 0.3), ("half", 0.05)]
)
def test_auto_is_as_good_as_the_best_of_its_drafters(kind: str, right: float) -> None:
    row = [right] * MANY
    without, auto = (told("auto", row, kind=kind, head=head) for head in (False, True))
    alone = told("head", row, kind=kind)
    assert auto.speed() > 0.95 * max(without.speed(), alone.speed())
    assert auto.recordings <= PROMPTS + 7


def test_a_first_chain_is_recorded_as_asked_for_and_later_ones_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Requests(monkeypatch, "head", [0.68] * 3, k=6)
    for seq in run.seqs:
        run.answer(seq)
    chains = [shape.length for shape in run.world.recordings if getattr(shape, "kind", "") == "chain"]
    assert chains == [6]  # an answer's last drafts are shorter: the longer one stands in for them


def test_what_a_recording_takes_is_a_phase_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Requests(monkeypatch, "head", [0.68], k=6)
    run.answer(run.seqs[0])
    seconds = run.seqs[0].stats.seconds
    assert seconds["record"] == pytest.approx(3 * RECORDING, rel=0.01)  # a prompt, how the head reads it, a chain
    assert seconds["host"] < 0.03
    assert seconds["draft"] < 0.05


# ------------------------------------------------------------ drafts that are begun before anybody asks


class Begins(Requests):
    """Counts the chains that are started, and those that were under way when they were asked for."""

    def __init__(self, patch: pytest.MonkeyPatch, right: list[float], k: int | str) -> None:
        self.rolled = self.taken = 0
        roll, cut = head_module.TrainedHead._roll, head_module.Begun.cut

        def rolling(drafter: Any, seqs: list[Sequence], budget: list[int]) -> Any:
            self.rolled += 1
            return roll(drafter, seqs, budget)

        def cutting(begun: Any, rooms: list[int]) -> Any:
            self.taken += 1
            return cut(begun, rooms)

        patch.setattr(head_module.TrainedHead, "_roll", rolling)
        patch.setattr(head_module.Begun, "cut", cutting)
        super().__init__(patch, "head", right, k)


@pytest.mark.parametrize("right", [0.9, 0.2])
def test_a_draft_is_followed_by_one_that_nobody_waited_for(monkeypatch: pytest.MonkeyPatch, right: float) -> None:
    run = Begins(monkeypatch, [right] * 2, k=6)
    steps = 0
    for seq in run.seqs:
        run.answer(seq)
        steps += seq.stats.steps
    assert run.taken > 0.9 * (steps - 6)  # all but the first ones, and those after a prompt
    assert run.rolled <= steps + 2  # hardly any was started in vain


def test_nothing_is_begun_where_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Begins(monkeypatch, [0.0], k="auto")
    run.answer(run.seqs[0])
    assert run.rolled <= run.taken + 8  # one at the beginning of each trial, and one in vain at its end


def test_what_was_begun_is_taken_for_the_same_text_and_about_as_many_tokens() -> None:
    seqs = [Sequence(i, [1, 2, 3]) for i in range(2)]
    draft = Draft.pack([chain([-1, -2, -3]), chain([-4, -5, -6])], torch.zeros(6, dtype=torch.long))
    begun = head_module.Begun.of(seqs, [3, 3], draft)
    assert begun.suits(seqs, [3, 1])
    assert begun.suits(seqs, [6, 6])
    assert not begun.suits(seqs, [7, 3])
    assert not begun.suits(seqs[::-1], [3, 3])
    assert not begun.suits(seqs[:1], [3])
    assert [tree.tokens for tree in begun.cut([2, 5]).trees] == [[-1, -2], [-4, -5, -6]]
    assert begun.cut([2, 5]).unread is draft.unread
    seqs[0].tokens.append(4)
    assert not begun.suits(seqs, [3, 3])
