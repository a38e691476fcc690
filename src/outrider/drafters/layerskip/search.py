"""Searches the blocks that a target can skip when it drafts for itself, as in SWIFT.

A set of skipped blocks is scored with one parallel pass over text that the target generated: how often the reduced
model's choice agrees with the full model's, each position reading exact K/V of those before it, as in drafting. The
objective is the expected speedup at the best K, from the agreement and measured seconds. The search starts with seeds,
a set for every number of blocks (without seeds: every block alone, then the least missed ones together). Local moves
from the fastest sets of several sizes and random sets follow until time is up.

It may be stopped anywhere: `best` is always valid. It knows blocks and agreement, not drafters or prompts.
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
from ...engine.batch import BatchBuilder
from ...engine.cache import Cache, Plane
from ...types import Sequence
from .._expectation import expected_tokens

NOTE = "skip"  # the name under which the set of a target is stored
MAX_ROWS = 256  # positions in a scoring pass
SEED_ROWS = 64  # positions that seeds are computed on
SEED_SHARE = 0.7  # of the layers are skipped in the largest seed
STEPS = 25  # classes of sets, by the share of the time that they skip
LEADERS = 5  # classes whose fastest sets are moved on from
SWEEPS = 5  # over the passes that a cost is measured with; the fastest of each counts
RANDOM_SHARE = 0.45  # of the blocks, at most, are skipped in a random set (SWIFT's)
SHORTLISTS = (8192, 16384, 32768, 65536)  # ids: tokenizers number frequent tokens first
MAX_K = 12
KINDS: dict[str, tuple[str, ...]] = {"layer": ("attention", "mlp"), "mlp": ("mlp",), "attention": ("attention",)}

Block = tuple[str, int]  # ("attention" or "mlp", layer)
PassCost = Callable[[int], float]  # rows -> seconds
RunLayer = Callable[[int, "Tensor | None", frozenset[str]], Tensor]  # layer, state before it, skipped blocks -> state


@dataclass(frozen=True)
class Skip:
    """A set of blocks that do not run, and a limit on the ids that the head scores."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()
    vocab: int | None = None  # only the first so many ids; None: all

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
        """As options of the drafter `layerskip`."""
        sets: dict[str, Any] = {"skip_attention": sorted(self.attention), "skip_mlp": sorted(self.mlp)}
        return sets if self.vocab is None else sets | {"draft_vocab": self.vocab}


class ScoredSkip(NamedTuple):
    """A set and its expected speedup over plain decoding at its best K."""

    skip: Skip
    agreement: float
    speedup: float
    k: int


class PassRunner(Protocol):
    """Runs scoring passes on another device than the CPU."""

    def rows(self, packing: BatchBuilder) -> Rows: ...

    def seconds(self, seq: Sequence, part: Part) -> float: ...


class ScoredText:
    """Text of the target with its K/V, so that any reduced pass over it is one call."""

    def __init__(
        self,
        model: Model,
        answers: list[tuple[list[int], list[int]]],
        most: int = MAX_ROWS,
        device: Callable[[Model, Cache, Plane], PassRunner] | None = None,
    ) -> None:
        """answers: prompt and generated tokens of each; at most `most` positions are scored in all."""
        self.model = model
        each = max(1, most // max(len(answers), 1))
        kept = [(model.opening(prompt), answer[: each + 1]) for prompt, answer in answers if len(answer) > 1]
        texts = [(start.tokens, answer) for start, answer in kept]
        sizes = [len(prompt) + 2 * len(answer) for prompt, answer in texts] or [1]  # a scored row has its own slot
        slots = sum(sizes) + sum(len(start.source) for start, _ in kept)
        self.cache = Cache(slots, len(sizes), max(sizes), model.device, model.source_length)
        self.plane: Plane = self.cache.add_plane(*model.plane_shape)
        self.seqs = [Sequence(i, start.tokens + answer, source=start.source) for i, (start, answer) in enumerate(kept)]
        for seq, (_, answer) in zip(self.seqs, texts, strict=True):
            self.cache.open(seq)
            self.cache.reserve(seq, len(seq.tokens), len(answer))
        self.device = device(model, self.cache, self.plane) if device else None  # reads the reserved slots
        for seq in self.seqs:
            self._prefill(seq)
        scored = [
            (seq, position, slot)
            for seq, (prompt, _) in zip(self.seqs, texts, strict=True)
            for position, slot in zip(range(len(prompt), len(seq.tokens) - 1), self.cache.spare(seq), strict=False)
        ]
        self.positions = len(scored)
        self.rows = self._again(scored)
        self.few = self._again(scored[:: max(1, len(scored) // SEED_ROWS)])
        self.choices = self._run(WHOLE)  # [T] of the full model, by the same pass

    def agreement(self, skip: Skip) -> float:
        """How often the reduced model chooses as the full one, with one more hit and one more miss as a prior."""
        hits = int((self._run(skip.part) == self.choices).sum())
        return (hits + 1) / (self.positions + 2)

    def seconds(self, part: Part) -> float:
        """Of one drafted token with only this part: on a CPU, of a pass over one row."""
        if self.device is not None:
            return self.device.seconds(min(self.seqs, key=lambda seq: len(seq.tokens)), part)
        # A thread's own clock does not run while the machine does something else.
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        return seconds_of(lambda: self.model.forward(first_row(self.rows), self.plane, part), clock)

    def seeds(self) -> Iterator[Skip]:
        """Sets of every size to start with; none where a model runs only as a whole."""
        layers = self.model.config.layers
        if not self.positions or layers < 3 or not self.model.has_layers:
            return
        for kind, blocks in KINDS.items():
            for skipped in seeds(self._layer, layers, kind, max(1, round(SEED_SHARE * layers))):
                yield Skip.of((name, i) for name in blocks for i in skipped)

    def _prefill(self, seq: Sequence) -> None:
        for start in range(0, len(seq.tokens), 512):
            batch = BatchBuilder(self.cache)
            batch.pending(seq, start, min(start + 512, len(seq.tokens)), want=False)
            self.model.forward(self._rows(batch), self.plane, Part(head=False))

    def _again(self, scored: list[tuple[Sequence, int, int]]) -> Rows:
        """Rows that read the exact K/V before their position and write their own into a spare slot."""
        batch = BatchBuilder(self.cache)
        for seq, position, slot in scored:
            batch.again(seq, position, slot)
        return self._rows(batch)

    def _rows(self, batch: BatchBuilder) -> Rows:
        return rows_of(batch) if self.device is None or not batch.tokens else self.device.rows(batch)

    def _run(self, part: Part) -> Tensor:
        if not self.positions:
            return self.rows.tokens
        return self.model.forward(self.rows, self.plane, part).logits.argmax(-1)  # [T]

    @torch.inference_mode()
    def _layer(self, layer: int, x: Tensor | None, skipped: frozenset[str]) -> Tensor:
        """The hidden state [T, H] after one layer without some of its blocks."""
        skip = Skip.of((kind, layer) for kind in skipped)
        part = Part(layer, layer + 1, skip.attention, skip.mlp, head=False)
        return self.model.forward(self.few, self.plane, part, x, (layer,)).hidden[layer]


def seconds_of(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    started = clock()
    run()
    return clock() - started


def first_row(rows: Rows) -> Rows:
    ancestors = None if rows.ancestors is None else rows.ancestors[:1]
    one = (rows.tokens[:1], rows.positions[:1], rows.slots[:1], rows.lines[:1], rows.context[:1])
    sources = None if rows.sources is None else rows.sources.at(torch.zeros(1, dtype=torch.long))
    return Rows(*one, rows.table, ancestors, torch.zeros(1, dtype=torch.long), sources=sources)


class DraftCost:
    """Seconds of one drafted token, by the blocks and ids that run.

    Measured with passes in turns; the fastest of each counts, because other load only ever adds.
    """

    def __init__(
        self, seconds: Callable[[Part], float], layers: int, vocabulary: int = 0, plain: float | None = None
    ) -> None:
        """seconds: of a pass over one row with only this part; vocabulary: 0 where the head always runs whole;
        plain: seconds of a whole pass measured elsewhere, to which these measurements are scaled."""
        every, some = frozenset(range(layers)), vocabulary // 4
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


def expected_speedup(agreement: float, draft_cost: float, pass_cost: PassCost, max_k: int = MAX_K) -> tuple[float, int]:
    """The best expected speedup over plain decoding, and its K; draft_cost: seconds of each drafted token."""
    speeds = [
        (expected_tokens(agreement, k) * pass_cost(1) / (pass_cost(k + 1) + k * draft_cost), -k)
        for k in range(1, max_k + 1)
    ]
    best, k = max(speeds)
    return best, -k


class Search:
    """Searches the set with the highest expected speedup; can be stopped after any score and resumed."""

    def __init__(
        self,
        layers: int,
        agreement: Callable[[Skip], float],
        draft_cost: Callable[[Skip], float],
        pass_cost: PassCost,
        start: Skip | None = None,
        seed: int = 0,
        seeds: Iterable[Skip] = (),
        shortlists: Iterable[int] = (),
    ) -> None:
        """seeds: sets to score first; shortlists: limits on the ids that the head scores."""
        self._agreement, self.draft_cost, self.pass_cost = agreement, draft_cost, pass_cost
        self._start, self._seeds, self.shortlists = start, seeds, list(shortlists)
        self.rng = random.Random(seed)
        self.agreements: dict[Skip, float] = {}  # of all sets scored so far
        self.best: ScoredSkip | None = None
        self.fastest: dict[int, ScoredSkip] = {}  # by skipped share of the time, in STEPS classes
        self.blocks = skippable(layers)

    def run(self, deadline: Callable[[], bool], progress: Callable[[Search], None] = lambda search: None) -> ScoredSkip:
        """Score sets until `deadline` returns True or nothing new is left; at least one is scored."""
        for skip in self._candidates():
            self.score(skip)
            progress(self)
            if deadline():
                break
        assert self.best is not None
        return self.best

    def score(self, skip: Skip) -> ScoredSkip:
        """Agreement is measured once per set."""
        if skip not in self.agreements:
            self.agreements[skip] = self._agreement(skip)
        agreement = self.agreements[skip]
        scored = ScoredSkip(skip, agreement, *expected_speedup(agreement, self.draft_cost(skip), self.pass_cost))
        step = round(STEPS * self.skipped_share(skip))
        if step not in self.fastest or scored.speedup > self.fastest[step].speedup:
            self.fastest[step] = scored
        if self.best is None or scored.speedup > self.best.speedup:
            self.best = scored
        return scored

    def skipped_share(self, skip: Skip) -> float:
        """The share of a drafted token's time that this set saves."""
        return 1 - self.draft_cost(skip) / self.draft_cost(Skip())

    def _candidates(self) -> Iterator[Skip]:
        if self._start is not None:
            yield self._start
        yield from self._seeds
        if len(self.agreements) <= 1:
            yield from self._greedy()
        for leader in self._leaders() if self.shortlists else ():
            yield from (replace(leader.skip, vocab=ids) for ids in self.shortlists)
        yield from self._moves()

    def _greedy(self) -> Iterator[Skip]:
        """Without seeds: every block alone, then the least missed ones together, more and more of them."""
        yield from (Skip.of([block]) for block in self.blocks)
        order = sorted(self.blocks, key=lambda block: -self.agreements[Skip.of([block])])
        for size in range(2, len(order) + 1):
            skip = Skip.of(order[:size])
            yield skip
            if self.agreements[skip] < 0.2:  # no larger set will agree again
                break

    def _moves(self) -> Iterator[Skip]:
        """Local moves from fast sets, and sometimes a random set; ends when new sets become hard to find."""
        stale = 0
        while stale < 200:
            skip = self._random() if self.rng.random() < 0.15 else self._neighbour()
            if skip in self.agreements or not skip.blocks:
                stale += 1
                continue
            stale = 0
            yield skip

    def _neighbour(self) -> Skip:
        """Of a leader of any size: slower sets may lie between the fastest set and a better, larger one."""
        skip = self.rng.choice(self._leaders()).skip
        if self.shortlists and self.rng.random() < 0.1:
            return replace(skip, vocab=self.rng.choice([None, *self.shortlists]))
        return neighbour(skip, self.blocks, self.rng, layers=self.rng.random() < 0.5)

    def _leaders(self) -> list[ScoredSkip]:
        return sorted(self.fastest.values(), key=lambda scored: -scored.speedup)[:LEADERS]

    def _random(self) -> Skip:
        most = max(1, round(RANDOM_SHARE * len(self.blocks)))
        return Skip.of(self.rng.sample(self.blocks, self.rng.randint(1, most)))


def skippable(layers: int) -> list[Block]:
    """The blocks that a search may skip: not those of the first and the last layer, which are always needed."""
    inner = range(1, layers - 1) if layers > 2 else range(layers)
    return [(kind, i) for kind in ("attention", "mlp") for i in inner]


def neighbour(skip: Skip, among: list[Block], rng: random.Random, layers: bool = False) -> Skip:
    """A set with one block (or, with `layers`, one whole layer) added, dropped or exchanged."""
    units = [[block for block in among if block[1] == i] for i in sorted({i for _, i in among})]
    units = units if layers else [[block] for block in sorted(among)]
    inside = [unit for unit in units if skip.blocks.issuperset(unit)]
    outside = [unit for unit in units if not skip.blocks.issuperset(unit)]
    move = rng.choice(("add", "drop", "swap"))
    blocks = set(skip.blocks)
    if move in ("drop", "swap") and inside:
        blocks.difference_update(rng.choice(inside))
    if move in ("add", "swap") and outside:
        blocks.update(rng.choice(outside))
    return Skip.of(blocks, skip.vocab)


class _Path(NamedTuple):
    """The hidden state after some layers, and the layers whose block was skipped."""

    x: Any  # [T, H]; None before the first layer
    skipped: tuple[int, ...] = ()


def seeds(run: RunLayer, layers: int, kind: str, most: int) -> Iterator[tuple[int, ...]]:
    """The layers that skip their `kind` (see KINDS), for 1 to `most` of them; never the first or the last layer.

    CLaSp's dynamic programme: at each layer, the best path with n skips is the best one with n skips so far and this
    layer, or the best one with n - 1 without its block, whichever state is closer to the full model's, by cosine.
    """
    blocks = frozenset(KINDS[kind])
    paths = [_Path(None)]  # by number of skips; the first is the full model
    for layer in range(layers):
        ran = [_Path(run(layer, path.x, frozenset()), path.skipped) for path in paths]
        if 0 < layer < layers - 1:
            skipping = [
                _Path(path.x if len(blocks) == 2 else run(layer, path.x, blocks), (*path.skipped, layer))
                for path in paths[:most]
            ]
            ran = [_nearest(ran[n : n + 1] + skipping[max(n - 1, 0) : n], ran[0].x) for n in range(len(skipping) + 1)]
        paths = ran
    for path in paths[1:]:
        yield path.skipped


def _nearest(paths: list[_Path], full: Tensor) -> _Path:
    if len(paths) == 1:
        return paths[0]
    similarity = torch.nn.functional.cosine_similarity
    return max(paths, key=lambda path: float(similarity(path.x.float(), full.float(), dim=-1).mean()))
