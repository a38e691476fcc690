"""The real engine on an invented machine: a pass takes what a table says, and chooses the next token of a given text.

Nothing here depends on the machine that runs it, and nothing knows a backend: every run gives the same seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from outrider.backends.toy import toy
from outrider.control import Controller
from outrider.control.adaptive import Adaptive, Fixed
from outrider.control.costs import PassCosts
from outrider.drafters import Drafter, DraftRequest, Forecast, Traits, Workspace, make
from outrider.drafters.auto import Auto
from outrider.engine.cache import Cache
from outrider.engine.scheduler import Scheduler
from outrider.engine.step import Engine
from outrider.types import Batch, Draft, Output, SamplingParams, Sequence, Step, Tree, chain

VOCABULARY = 49152
TOKENS = 256
COUNTS = (1, 2, 4, 8, 16, 32, 64)
EACH = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 17, 20, 24, 32)  # measured rows of each sequence

Seconds = Callable[[int, int], float]  # (sequences, rows in all) -> of a pass
Table = dict[int, float]  # rows in all -> milliseconds

STEEP: Table = {
    1: 6.68,
    2: 7.94,
    3: 14.9,
    4: 17.8,
    5: 21.1,
    6: 21.8,
    8: 26.3,
    10: 32.4,
    12: 40.6,
    16: 52.6,
    20: 64.6,
    24: 77.0,
    32: 103.4,
    64: 206.0,
}  # a CPU with AVX2 alone: a 135M model in int8, one thread
AVX2: Table = {1: 4.8, 2: 5.4, 3: 6.8, 5: 9.4, 9: 13.6, 17: 25.0, 33: 48.0, 64: 92.0}  # the same in blocks, two threads
FLAT: Table = {1: 4.0, 16: 4.06, 32: 4.21, 64: 4.6, 128: 6.5, 256: 11.0, 512: 20.0, 1024: 38.0}  # a GPU, not padded
STAIRS: Table = {
    1: 3.95,
    2: 3.97,
    4: 3.98,
    8: 4.0,
    12: 4.03,
    16: 4.06,
    24: 4.15,
    32: 4.21,
    48: 4.46,
    64: 4.6,
    96: 5.6,
    128: 5.9,
    192: 8.7,
    256: 8.8,
    384: 16.9,
    512: 17.2,
    768: 22.7,
    1024: 31.0,
    1280: 40.0,
    2048: 62.0,
}  # an H200 with a 7B model: a pass is padded to the next of these sizes


def linear(table: Table) -> Seconds:
    """Between the points of a table and beyond its last one."""
    costs = PassCosts({rows: ms * 1e-3 for rows, ms in table.items()})
    return lambda sequences, rows: costs(rows)


def padded(table: Table) -> Seconds:
    """The cost of the next larger size."""
    return lambda sequences, rows: 1e-3 * next(ms for size, ms in table.items() if size >= rows)


MACHINES: dict[str, Seconds] = {"steep": linear(STEEP), "flat": linear(FLAT), "stairs": padded(STAIRS)}
OTHERS: dict[str, Seconds] = {"avx2": linear(AVX2)}  # of single tests


def measured(machine: str, most: int = 1024) -> PassCosts:
    """What the start measures of a machine."""
    seconds = (MACHINES | OTHERS)[machine]
    pairs = [(s, s * each) for s in COUNTS for each in EACH if s * each <= max(most, 2 * s)]
    return PassCosts({(s, rows): seconds(s, rows) for s, rows in pairs}, padded=machine == "stairs")


@dataclass
class World:
    """The clock."""

    now: float = 0.0

    def work(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class ClockRunner:
    """A target whose passes take time and choose the next tokens of given texts."""

    rounds: ClassVar[None] = None
    world: World
    plane: Any
    seconds: Seconds
    texts: dict[int, list[int]]
    passes: list[tuple[int, int]] = field(default_factory=list)  # sequences, rows

    def launch(self, batch: Batch, *_: Any) -> Any:
        return SimpleNamespace(wait=lambda: self._run(batch))

    def _run(self, batch: Batch) -> Output:
        sequences = len(set(batch.lines))
        self.passes.append((sequences, batch.count))
        self.world.work(self.seconds(sequences, batch.count))
        choices = [self.texts[batch.owners[i].id][batch.positions[i] + 1] for i in batch.want]
        return Output(torch.zeros(1, 4).expand(len(choices), 4), choices=choices, highest=[1.0] * len(choices))


@dataclass(frozen=True)
class Nature:
    """An invented drafter: a call takes `call` seconds, `sequence` for each sequence and `depth` for each depth."""

    right: float  # of its tokens, given that the ones before are right
    call: float = 0.0
    depth: float = 0.0
    sequence: float = 0.0
    claim: float | None = None  # claimed for each token, given the ones before; None: it claims nothing
    self_limiting: bool = False
    read: float = 0.0  # seconds to read each token that it has not seen
    easy: float | None = None  # share of positions at which it is right .92 of the time, else .25; its claims say so
    late: bool = False  # drafts nothing at the first request for a sequence: the target has not read the prompt yet
    stated: tuple[float, ...] = ()  # survival by depth that is known before its first call, with its costs
    timed: bool = False  # its calls were timed before the first request, as a GPU's recorded drafts are

    def seconds(self, sequences: int, depth: int) -> float:
        """Of a call that has read everything."""
        return self.call + self.sequence * sequences + self.depth * depth

    def survival(self, depth: int) -> float:
        return (self.claim or 0.0) ** (depth + 1)


class Invented(Drafter):
    """Drafts the text itself, with as many errors as its nature says. The dice depend on the position alone."""

    name = "invented"

    def __init__(self, world: World, texts: dict[int, list[int]], nature: Nature) -> None:
        super().__init__(None)
        self.world, self.texts, self.nature = world, texts, nature
        forecast = Forecast(nature.stated, nature.call + 1.6 * nature.depth, nature.read) if nature.stated else None
        if nature.timed:
            calls = tuple((n, k, nature.seconds(n, k)) for n in COUNTS for k in (1, 16))
            forecast = Forecast(nature.stated, calls=calls)
        self.traits = Traits(self_limiting=nature.self_limiting, forecast=forecast)
        if nature.read:
            self.traits = replace(self.traits, backlog=self.backlog)
        self.seen: dict[int, int] = {}
        self.met: set[int] = set()  # sequences of earlier requests
        self.calls = 0

    def backlog(self, seq: Sequence) -> int:
        return len(seq.tokens) - self.seen.get(seq.id, 0)

    def draft(self, request: DraftRequest) -> Draft:
        self.calls += 1
        if self.nature.late and any(seq.id not in self.met for seq in request.seqs):
            self.met.update(seq.id for seq in request.seqs)
            return Draft.empty(len(request.seqs))
        nature, trees = self.nature, [self._tree(*each) for each in zip(request.seqs, request.budgets, strict=True)]
        trees = [self._stopped(tree, request.stop_below) for tree in trees]
        late = sum(max(self.backlog(seq) - 4, 0) for seq in request.seqs)
        self.seen |= {seq.id: len(seq.tokens) for seq in request.seqs}
        depth = max(len(tree.tokens) for tree in trees)
        self.world.work(nature.seconds(len(trees), depth) + nature.read * late)
        return Draft.pack(trees)

    def _stopped(self, tree: Tree, below: float) -> Tree:
        survival = tree.survival
        if survival is None:
            return tree
        return tree.cut(1 + next((i for i, chance in enumerate(survival) if chance < below), len(survival)))

    def _tree(self, seq: Sequence, budget: int) -> Tree:
        start, text = len(seq.tokens), self.texts[seq.id]
        if self.nature.easy is not None:
            return self._informed_chain(seq, budget)
        tokens = [text[at] if self._is_right(seq.id, at) else VOCABULARY - 1 for at in range(start, start + budget)]
        claims = None if self.nature.claim is None else [self.nature.survival(d) for d in range(budget)]
        return chain(tokens, claims, source=self.name)

    def _informed_chain(self, seq: Sequence, budget: int) -> Tree:
        """As trained heads draft: claims tell easy positions from hard ones, and a chain ends where little is left."""
        tokens, claims, text = list[int](), list[float](), self.texts[seq.id]
        for at in range(len(seq.tokens), len(seq.tokens) + budget):
            dice = random.Random(text[at] * 4096 + at)
            chance = 0.92 if dice.random() < (self.nature.easy or 0.0) else 0.25
            tokens.append(text[at] if dice.random() < chance else VOCABULARY - 1)
            claims.append(chance * (claims[-1] if claims else 1.0))
            if self.nature.self_limiting and claims[-1] < 0.6:  # what `Pace` asks for at these prices
                break
        return chain(tokens, claims, source=self.name)

    def _is_right(self, seq: int, at: int) -> bool:
        return random.Random(seq * 4096 + at).random() < self.nature.right


@dataclass(frozen=True)
class AutoWith:
    """`auto` with a costly drafter beside its free ones."""

    costly: Nature


class Timed:
    """A listener that keeps steps' facts: (tokens emitted, rows, draft seconds)."""

    reads_logits = reads_guesses = False

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, float, str]] = []

    def observe(self, step: Step) -> None:
        tokens = sum(len(verdict.tokens) for verdict in step.verdicts if verdict is not None)
        self.steps.append((tokens, step.rows, step.clock["draft"], step.why))


SEARCH = {
    "steep": 30e-6,
    "avx2": 30e-6,
    "flat": 2e-6,
    "stairs": 2e-6,
}  # of a host drafter for each sequence; beside a GPU it is hidden


def workspace(cache: Cache, plane: Any, options: dict[str, Any]) -> Workspace:
    config = SimpleNamespace(vocab_size=VOCABULARY, layers=1, context_length=4096)
    facts = {"device": torch.device("cpu"), "has_layers": False, "identity": lambda: None, "encoder": False}
    facts["mtp"] = None
    target = SimpleNamespace(config=config, **facts)
    return Workspace(target, cache, plane, {"suffix_shared_tokens": 0} | options, None)  # type: ignore[arg-type]


class Emulation:
    """Texts through an engine: `prompts` tokens of each are given, the rest is generated."""

    def __init__(
        self, machine: str, drafter: str | Nature | AutoWith, texts: Iterable[list[int]], prompts: list[int],
        k: int | None = None, batch: int | None = None,
    ) -> None:  # fmt: skip
        """k: fixed; None: chosen by the controller. batch: sequences that run at once."""
        self.texts = {i + 1: [*text, 0] for i, text in enumerate(texts)}
        self.batch = batch or len(self.texts)
        self.world, self.k, self.log = World(), k, Timed()
        longest = max(map(len, self.texts.values()))
        cache = Cache(self.batch * (longest + 64) + 600, self.batch + 2, longest + 64)
        plane = cache.add_plane(1, 1, 1, torch.float32)
        self.runner = ClockRunner(self.world, plane, (MACHINES | OTHERS)[machine], self.texts)
        self.drafter = self._drafter(machine, drafter, cache, plane)
        controller: Controller = Adaptive(measured(machine), name=self.drafter.name) if k is None else Fixed(k)
        scheduler = Scheduler(cache, plane, self.batch, 512)
        self.engine = Engine(
            self.runner, cache, self.drafter, controller, scheduler, VOCABULARY, (self.log,), now=lambda: self.world.now
        )
        self.seqs = [
            Sequence(i, text[:given], SamplingParams(max_tokens=len(text) - 1 - given, ignore_eos=True))
            for (i, text), given in zip(self.texts.items(), prompts, strict=True)
        ]

    def _drafter(self, machine: str, drafter: str | Nature | AutoWith, cache: Cache, plane: Any) -> Drafter:
        if isinstance(drafter, Nature):
            return Invented(self.world, self.texts, drafter)
        nature = drafter.costly if isinstance(drafter, AutoWith) else None
        made = make("auto" if isinstance(drafter, AutoWith) else drafter, workspace(cache, plane, {}))
        if isinstance(made, Auto):
            made.now = lambda: self.world.now
            if nature is not None:
                made.costly = [Invented(self.world, self.texts, nature)]
                made.drafters += made.costly
                made._merge_traits()
        inner = made.draft

        def timed(request: DraftRequest) -> Draft:
            self.world.work(SEARCH[machine] * len(request.seqs))
            return inner(request)

        made.draft = timed  # type: ignore[method-assign]
        return made

    def seconds(self) -> float:
        """Of all texts, prompts included."""
        for seq in self.seqs:
            self.engine.add(seq)
        while self.engine.busy:
            self.engine.step()
        for seq in self.seqs:
            assert seq.tokens == self.texts[seq.id][:-1]
        return self.world.now


def auto_with(drafter: Drafter) -> Auto:
    """`auto` with one costly drafter that taps two layers of the target."""
    target = toy()
    cache = Cache(64, 2, 64)
    auto = Auto(Workspace(target, cache, cache.add_plane(*target.plane_shape)))
    drafter.traits = replace(drafter.traits, taps=(1, 2))
    auto.free, auto.costly, auto.drafters = [], [drafter], [drafter]
    auto._merge_traits()
    return auto
