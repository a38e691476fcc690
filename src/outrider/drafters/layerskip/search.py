"""Which blocks a target can leave out when it drafts for itself: a search over sets, as SWIFT does it.

A set is scored by one parallel pass of the reduced model over text that the target itself has said: how often its
choice agrees with the full model's, every position reading exact K/V of what came before, as the drafter's does. The
objective is the expected speedup at the best K, from that agreement and from measured seconds. First come seeds, a set
for every number of blocks (`skipseeds`; where there are none, every block alone, and the cheapest-to-miss together);
then local moves from the fastest sets of several sizes and random sets, until time is up.

It may be stopped anywhere: `best` is always valid. It knows blocks and agreement, not drafters, prompts or text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...backends import WHOLE, Model, Part
from ...backends.rows import Rows, rows_of
from ...control.expectation import expected_tokens
from ...engine.batch import BatchBuilder
from ...engine.cache import Cache, Plane
from ...types import Sequence
from .seeds import KINDS, seeds

NOTE = "skip"  # what is noted about a target is called so
MOST_ROWS = 256  # positions in a scoring pass: more are not worth their time
SEED_ROWS = 64  # positions that seeds are looked for on
SEED_SHARE = 0.7  # of the layers, in the largest seed
STEPS = 25  # shares of the time that may be left out are told apart so finely
LEADERS = 5  # of these, whose fastest sets are moved on from
SWEEPS = 5  # over the passes that a price is made of: the fastest of each counts
RATIO = 0.45  # of the blocks are left out in a random set (SWIFT's)
SHORTLISTS = (8192, 16384, 32768, 65536)  # ids: tokenizers number what is frequent first
K_MOST = 12
Block = tuple[str, int]  # ("attention" or "mlp", layer)
Cost = Callable[[int], float]


@dataclass(frozen=True)
class Skip:
    """A set of blocks that do not run, and of ids that nobody looks at."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()
    vocab: int | None = None  # the head reads its first so many ids alone; None: all of it

    @staticmethod
    def of(blocks: Iterable[Block], vocab: int | None = None) -> Skip:
        blocks = set(blocks)
        attention, mlp = (frozenset(i for name, i in blocks if name == kind) for kind in ("attention", "mlp"))
        return Skip(attention, mlp, vocab)

    @property
    def blocks(self) -> frozenset[Block]:
        return frozenset([("attention", i) for i in self.attention] + [("mlp", i) for i in self.mlp])

    @property
    def part(self) -> Part:
        return Part(skip_attention=self.attention, skip_mlp=self.mlp, vocab=self.vocab)

    @property
    def options(self) -> dict[str, Any]:
        """As the drafter `layerskip` is told."""
        own: dict[str, Any] = {"skip_attention": sorted(self.attention), "skip_mlp": sorted(self.mlp)}
        return own if self.vocab is None else own | {"draft_vocab": self.vocab}


class Found(NamedTuple):
    """A set and what is expected of it."""

    skip: Skip
    agreement: float
    speedup: float
    k: int


class Device(Protocol):
    """How a text's passes run where a model is not called on the CPU."""

    def rows(self, packing: BatchBuilder) -> Rows: ...

    def seconds(self, seq: Sequence, part: Part) -> float: ...


class Text:
    """What the target said, laid out once so that any reduced pass over it is one call."""

    def __init__(
        self,
        model: Model,
        answers: list[tuple[list[int], list[int]]],
        most: int = MOST_ROWS,
        device: Callable[[Model, Cache, Plane], Device] | None = None,
    ) -> None:
        """answers: (prompt, what the target said) of each; of all together, at most `most` positions are scored."""
        self.model = model
        each = max(1, most // max(len(answers), 1))
        texts = [(prompt, said[: each + 1]) for prompt, said in answers if len(said) > 1]
        room = [len(prompt) + 2 * len(said) for prompt, said in texts] or [1]  # a said token has a second place
        self.cache = Cache(sum(room), len(room), max(room), model.device)
        self.plane: Plane = self.cache.add_plane(*model.plane_shape)
        self.seqs = [self._place(i, *text) for i, text in enumerate(texts)]
        self.device = device(model, self.cache, self.plane) if device else None  # sees the places that were given
        for seq, _ in self.seqs:
            self._fill(seq)
        packed = self._packed()
        self.positions = len(packed.tokens)
        self.rows = self._rows(packed)
        self.few = self._rows(_thinned(packed))
        self.choices = self._run(WHOLE)  # [T] the full model's, by the same pass

    def agreement(self, skip: Skip) -> float:
        """How often the reduced model chooses as the full one, shrunk a little: few positions prove little."""
        hits = int((self._run(skip.part) == self.choices).sum())
        return (hits + 1) / (self.positions + 2)

    def seconds(self, part: Part) -> float:
        """One drafted token with only these blocks: on a CPU a pass over one row."""
        if self.device is not None:
            return self.device.seconds(min((seq for seq, _ in self.seqs), key=lambda seq: len(seq.tokens)), part)
        # A pass in this thread alone has a clock that stands still while the machine does something else.
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        return seconds_of(lambda: self.model.forward(_first(self.rows), self.plane, part), clock)

    def seeds(self) -> Iterator[Skip]:
        """Sets to begin with, of every size, by the stream's direction; none where a model only runs as a whole."""
        layers = self.model.config.layers
        if not self.positions or layers < 3 or not self.model.has_layers:
            return
        for kind, blocks in KINDS.items():
            for out in seeds(self._layer, layers, kind, max(1, round(SEED_SHARE * layers))):
                yield Skip.of((name, i) for name in blocks for i in out)

    def _place(self, number: int, prompt: list[int], said: list[int]) -> tuple[Sequence, int]:
        """Slots for a whole text and for its second places; returns it with where its answer begins."""
        seq = Sequence(number, prompt + said)
        self.cache.open(seq)
        self.cache.reserve(seq, len(seq.tokens), len(said))
        return seq, len(prompt)

    def _fill(self, seq: Sequence) -> None:
        """Exact K/V of a whole text."""
        for start in range(0, len(seq.tokens), 512):
            packed = BatchBuilder(self.cache)
            packed.pending(seq, start, min(start + 512, len(seq.tokens)), want=False)
            self.model.forward(self._rows(packed), self.plane, Part(head=False))

    def _packed(self) -> BatchBuilder:
        """One row per said token: it reads the exact K/V before it and writes its own into a place of its own."""
        packed = BatchBuilder(self.cache)
        for seq, begin in self.seqs:
            own = self.cache.spare(seq)
            for offset, position in enumerate(range(begin, len(seq.tokens) - 1)):
                packed.again(seq, position, own[offset])
        return packed

    def _rows(self, packed: BatchBuilder) -> Rows:
        return rows_of(packed) if self.device is None or not packed.tokens else self.device.rows(packed)

    def _run(self, part: Part) -> Tensor:
        if not self.positions:
            return self.rows.tokens
        return self.model.forward(self.rows, self.plane, part).logits.argmax(-1)  # [T]

    @torch.inference_mode()
    def _layer(self, layer: int, x: Tensor | None, left: frozenset[str]) -> Tensor:
        """The stream [T, H] after one layer, without some of its blocks."""
        skip = Skip.of((kind, layer) for kind in left)
        part = Part(layer, layer + 1, skip.attention, skip.mlp, head=False)
        return self.model.forward(self.few, self.plane, part, x, (layer,)).hidden[layer]


def _thinned(packed: BatchBuilder) -> BatchBuilder:
    """Every so manieth row."""
    few = BatchBuilder(packed.cache)
    step = max(1, len(packed.tokens) // SEED_ROWS)
    for name in ("tokens", "positions", "slots", "lines", "context", "tails", "owners"):
        setattr(few, name, getattr(packed, name)[::step])
    few.want = list(range(len(few.tokens)))
    return few


def seconds_of(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    run()
    return clock() - begin


def _first(rows: Rows) -> Rows:
    ancestors = None if rows.ancestors is None else rows.ancestors[:1]
    one = (rows.tokens[:1], rows.positions[:1], rows.slots[:1], rows.lines[:1], rows.context[:1])
    return Rows(*one, rows.table, ancestors, torch.zeros(1, dtype=torch.long))


class Price:
    """Seconds of one drafted token, by what runs: measured for all, without attention, without MLPs, with less head."""

    def __init__(
        self, seconds: Callable[[Part], float], layers: int, vocabulary: int = 0, plain: float | None = None
    ) -> None:
        """seconds: what a pass over one row takes with only this part; vocabulary: 0 where the head is always whole;
        plain: what a pass with all of it takes.

        Passes in turns, and the fastest of each: what else the machine does only ever adds. Where `plain` was measured
        elsewhere, in other circumstances, only the ratios of what is measured here count.
        """
        every = frozenset(range(layers))
        some = vocabulary // 4
        parts = (WHOLE, Part(skip_attention=every), Part(skip_mlp=every), *([Part(vocab=some)] if some else []))
        sweeps = [[seconds(part) for part in parts] for _ in range(SWEEPS)]
        whole, without_attention, without_mlp, *some_head = (float(min(taken)) for taken in zip(*sweeps, strict=True))
        scale = 1.0 if plain is None else plain / whole
        self.whole = scale * whole
        self.attention = scale * max(whole - without_attention, 0.0) / layers
        self.mlp = scale * max(whole - without_mlp, 0.0) / layers
        self.vocabulary = vocabulary
        self.id = scale * max(whole - some_head[0], 0.0) / (vocabulary - some) if some_head else 0.0  # of the head

    def __call__(self, skip: Skip) -> float:
        saved = len(skip.attention) * self.attention + len(skip.mlp) * self.mlp
        saved += self.id * (0 if skip.vocab is None else max(self.vocabulary - skip.vocab, 0))
        return max(self.whole - saved, 0.02 * self.whole)


def expected(agreement: float, draft: float, cost: Cost, k_most: int = K_MOST) -> tuple[float, int]:
    """The best expected speedup over plain decoding and its K, when every drafted token costs `draft` seconds."""
    speeds = [(expected_tokens(agreement, k) * cost(1) / (cost(k + 1) + k * draft), -k) for k in range(1, k_most + 1)]
    best, k = max(speeds)
    return best, -k


class Search:
    """Looks for the set with the highest expected speedup; can be stopped and resumed at any score."""

    def __init__(
        self,
        layers: int,
        agreement: Callable[[Skip], float],
        price: Callable[[Skip], float],
        cost: Cost,
        start: Skip | None = None,
        seed: int = 0,
        seeds: Iterable[Skip] = (),
        shortlists: Iterable[int] = (),
    ) -> None:
        """seeds: sets to look at first; shortlists: how many ids a head may be left with."""
        self.layers, self._agreement, self.price, self.cost = layers, agreement, price, cost
        self._seeds, self.shortlists = seeds, list(shortlists)
        self.dice = random.Random(seed)
        self.known: dict[Skip, float] = {}
        self.best: Found | None = None
        self.fastest: dict[int, Found] = {}  # by the share of the time that is left out, in STEPS
        self.start = start
        self.blocks = spared(layers)

    def run(self, deadline: Callable[[], bool], progress: Callable[[Search], None] = lambda search: None) -> Found:
        """Score sets until `deadline` says that time is up or nothing new is left; at least one is scored."""
        for skip in self._proposals():
            self.score(skip)
            progress(self)
            if deadline():
                break
        assert self.best is not None
        return self.best

    def score(self, skip: Skip) -> Found:
        """Agreement is measured once per set; price and costs are cheap."""
        if skip not in self.known:
            self.known[skip] = self._agreement(skip)
        found = self.found(skip)
        step = round(STEPS * self.spares(skip))
        if step not in self.fastest or found.speedup > self.fastest[step].speedup:
            self.fastest[step] = found
        if self.best is None or found.speedup > self.best.speedup:
            self.best = found
        return found

    def found(self, skip: Skip) -> Found:
        """A set that was scored, and what is expected of it."""
        return Found(skip, self.known[skip], *expected(self.known[skip], self.price(skip), self.cost))

    def spares(self, skip: Skip) -> float:
        """The share of a drafted token's time that these blocks are."""
        return 1 - self.price(skip) / self.price(Skip())

    def _proposals(self) -> Iterator[Skip]:
        if self.start is not None:
            yield self.start
        yield from self._seeds
        if len(self.known) <= 1:
            yield from self._greedy()
        for leader in self._leaders() if self.shortlists else ():
            yield from (replace(leader.skip, vocab=ids) for ids in self.shortlists)
        yield from self._moves()

    def _greedy(self) -> Iterator[Skip]:
        """Where there were no seeds: every block alone, and then together."""
        alone = [Skip.of([block]) for block in self.blocks]
        yield from alone
        # Together, those first that are missed least: how many of them is worth it?
        order = sorted(self.blocks, key=lambda block: -self.known[Skip.of([block])])
        for size in range(2, len(order) + 1):
            skip = Skip.of(order[:size])
            yield skip
            if self.known[skip] < 0.2:  # nothing larger will agree again
                break

    def _moves(self) -> Iterator[Skip]:
        """Local moves from fast sets, and a random one now and then; stops when new sets are hard to find."""
        stale = 0
        while stale < 200:
            skip = self._random() if self.dice.random() < 0.15 else self._neighbour()
            if skip in self.known or not skip.blocks:
                stale += 1
                continue
            stale = 0
            yield skip

    def _neighbour(self) -> Skip:
        """Of one of the leaders. Where little or nothing pays, the fastest set of all is often one that hardly leaves
        anything out, with slower ones around it: nobody gets to a large set from there."""
        skip = self.dice.choice(self._leaders()).skip
        if self.shortlists and self.dice.random() < 0.1:
            return replace(skip, vocab=self.dice.choice([None, *self.shortlists]))
        return neighbour(skip, self.blocks, self.dice, layers=self.dice.random() < 0.5)

    def _leaders(self) -> list[Found]:
        return sorted(self.fastest.values(), key=lambda found: -found.speedup)[:LEADERS]

    def _random(self) -> Skip:
        most = max(1, round(RATIO * len(self.blocks)))
        return Skip.of(self.dice.sample(self.blocks, self.dice.randint(1, most)))


def spared(layers: int) -> list[Block]:
    """The blocks that may be left out. The first and the last layer carry too much: no search's set lacks them."""
    inner = range(1, layers - 1) if layers > 2 else range(layers)
    return [(kind, i) for kind in ("attention", "mlp") for i in inner]


def neighbour(skip: Skip, among: list[Block], dice: random.Random, layers: bool = False) -> Skip:
    """A set with one block more, one less, or one exchanged; or so with whole `layers`."""
    units = [[block for block in among if block[1] == i] for i in sorted({i for _, i in among})]
    units = units if layers else [[block] for block in sorted(among)]
    inside = [unit for unit in units if skip.blocks.issuperset(unit)]
    outside = [unit for unit in units if not skip.blocks.issuperset(unit)]
    move = dice.choice(("add", "drop", "swap"))
    blocks = set(skip.blocks)
    if move in ("drop", "swap") and inside:
        blocks.difference_update(dice.choice(inside))
    if move in ("add", "swap") and outside:
        blocks.update(dice.choice(outside))
    return Skip.of(blocks, skip.vocab)
