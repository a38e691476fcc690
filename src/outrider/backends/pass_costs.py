"""What a target pass costs on this machine, by its sequences and its rows: measured, never assumed.

Measured once per model, dtype, machine and number of threads, and kept; every step refines it from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from ..control.pass_costs import Seconds
from ..engine.batch import BatchBuilder
from ..engine.cache import Cache, Plane
from ..models.paths import cache_folder, write_quietly
from ..types import Batch, Output, Sequence
from .machine import fingerprint

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # of one sequence
EDGE = 17  # of one sequence, on a GPU: a draft of 16 and its root, one more than the 16 that cost like one
EACH = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # of each of several,
MOST_ROWS = 1024  # and of all together
MOST_HERE = 32  # the same on a CPU, where rows cost what they cost: from two of each on, all lines are straight
CONTEXT = 192  # tokens that every row looks back at, on a CPU: it reads them one sequence after the other
PATIENCE = 2.0  # seconds for all sweeps; there are two at least
SCRATCH = -1_000_000  # the first scratch sequence's id; the others' lie below it


class Runner(Protocol):
    """What runs passes, as far as their cost goes."""

    @property
    def plane(self) -> Plane: ...

    def launch(self, batch: Batch, taps: tuple[int, ...], overlapped: bool) -> Pending: ...


class Pending(Protocol):
    def wait(self) -> Output: ...


def target_costs(
    runner: Runner, cache: Cache, sequences: Iterable[int] = (1,), sweeps: int = 5
) -> dict[tuple[int, int], float]:
    """Seconds of a pass by (sequences, rows in all), in scratch sequences that leave no trace.

    Several sweeps over all shapes, and the fastest of each: whatever else the machine does only ever adds. More rows
    never cost less: where they seem to, fewer could be padded. What the cache has no room for is left out.
    """
    lazy = runner.plane.k[0].device.type != "cpu"  # a shape's first pass may have to be captured
    shapes = _shapes(cache, sequences, (*ROWS, EDGE), MOST_ROWS) if lazy else _shapes(cache, sequences, ROWS, MOST_HERE)
    before = 0 if lazy else _context(cache, shapes)
    seqs = [Sequence(SCRATCH - i, [1] * (before + tokens)) for i, tokens in enumerate(_longest(shapes))]
    try:
        for seq in seqs:
            cache.open(seq)
            cache.reserve(seq, len(seq.tokens), 0)
        if lazy:
            _sweep(runner, cache, seqs, shapes, before)
        taken: list[dict[tuple[int, int], float]] = []
        begin = time.perf_counter()
        while len(taken) < sweeps and (len(taken) < 2 or time.perf_counter() - begin < PATIENCE):
            taken.append(_sweep(runner, cache, seqs, shapes, before))
    finally:
        for seq in seqs:
            if seq.id in cache.rows:
                cache.free(seq)
    fastest = {shape: min(sweep[shape] for sweep in taken) for shape in shapes}
    return {
        (many, many * each): min(fastest[many, more] for s, more in shapes if s == many and more >= each)
        for many, each in shapes
    }


def _shapes(cache: Cache, sequences: Iterable[int], alone: tuple[int, ...], most: int) -> list[tuple[int, int]]:
    """(sequences, rows of each) to measure: as many as there are lines and slots for, one row of one at least."""
    lines = max(cache.table.shape[0] - len(cache.rows) - len(cache.retired), 1)
    shapes = [
        (many, each)
        for many in sorted({1, *sequences})
        for each in sorted(alone if many == 1 else EACH)
        if (many, each) == (1, 1) or (each < cache.length - 1 and many <= lines and many * each <= max(most, 2 * many))
    ]
    while len(shapes) > 1 and sum(_longest(shapes)) > cache.available:
        shapes.remove(max(shapes, key=lambda shape: shape[0] * shape[1]))
    return shapes


def _longest(shapes: list[tuple[int, int]]) -> list[int]:
    """Tokens of each scratch sequence: the first ones take part in every shape."""
    return [max(each for many, each in shapes if many > i) for i in range(max(shapes)[0])]


def _context(cache: Cache, shapes: list[tuple[int, int]]) -> int:
    """Tokens before the measured rows: as many as there is room for, up to CONTEXT. Nobody reads what is in them."""
    longest = _longest(shapes)
    free = (cache.available - sum(longest)) // len(longest)
    return max(min(CONTEXT, cache.length - 1 - longest[0], free), 0)


def _sweep(
    runner: Runner, cache: Cache, seqs: list[Sequence], shapes: list[tuple[int, int]], before: int
) -> dict[tuple[int, int], float]:
    return {(many, each): _pass(runner, cache, seqs[:many], before, each) for many, each in shapes}


def _pass(runner: Runner, cache: Cache, seqs: list[Sequence], before: int, each: int) -> float:
    """Seconds of one pass over so many rows of each of these sequences."""
    packed = BatchBuilder(cache)
    for seq in seqs:
        packed.pending(seq, before, before + each, want=True)
    packed.want = list(range(len(seqs) * each))  # verification needs every row's logits
    device = runner.plane.k[0].device.type
    # A pass in this thread alone has a clock that stands still while the machine does something else.
    clock = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    runner.launch(packed, (), False).wait()
    if device == "cuda":
        torch.cuda.synchronize()  # the host may be told before the device is done
    return clock() - begin


def by_rows(seconds: Seconds) -> dict[int, float]:
    """The costs of one sequence's passes alone, for whoever speaks of one text at a time."""
    pairs: list[tuple[Any, float]] = list(seconds.items())
    one = [(key if isinstance(key, tuple) else (1, key), value) for key, value in pairs]
    return {rows: value for (sequences, rows), value in one if sequences == 1}


class CostFile:
    """Costs in memory for everyone who runs the same target, and on disk for the next start, if it has a name."""

    def __init__(self, *names: str) -> None:
        words = "-".join(names).replace("/", "_").replace("torch.", "")
        place = f"costs-{words}-{torch.get_num_threads()}-{fingerprint()}.json"
        self.path = cache_folder() / "profiles" / place if names else None
        self.seconds: Seconds | None = None

    def get(self, measure: Callable[[], Seconds], sequences: Iterable[int] = (1,)) -> Seconds:
        """What is known, if it covers so many sequences, or else what is measured now."""
        if self.seconds is None:
            self.seconds = self._read()
        if self.seconds is None or not self._covers(sequences):
            self.seconds = measure()
            if self.path is not None:
                write_quietly(self.path, json.dumps({_name(key): value for key, value in self.seconds.items()}))
        return self.seconds

    def _covers(self, sequences: Iterable[int]) -> bool:
        assert self.seconds is not None
        known = {key[0] if isinstance(key, tuple) else 1 for key in self.seconds}
        return known.issuperset(sequences)

    def _read(self) -> Seconds | None:
        try:
            known = json.loads(self.path.read_text()) if self.path else {}
            read: dict[Any, float] = {_key(name): float(seconds) for name, seconds in known.items()}
            return read or None
        except (OSError, ValueError, AttributeError, TypeError):
            return None


def _name(key: int | tuple[int, int]) -> str:
    return f"{key[0]},{key[1]}" if isinstance(key, tuple) else str(key)


def _key(name: str) -> int | tuple[int, int]:
    """Older files have rows alone."""
    first, comma, second = name.partition(",")
    return (int(first), int(second)) if comma else int(first)
