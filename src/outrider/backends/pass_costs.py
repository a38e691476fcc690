"""Seconds of a target pass on this machine, by its sequences and its rows: measured, never assumed.

Measured once per model, dtype, machine and number of threads, and stored; every step refines them from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..control.costs import PassCosts, Seconds
from ..engine.batch import BatchBuilder
from ..engine.cache import Cache
from ..engine.step import Runner
from ..models.paths import cache_folder, write_quietly
from ..models.stages import stage
from ..types import Sequence
from .cpu import native
from .machine import fingerprint, is_overloaded

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)  # of a single sequence
EDGE = 17  # of a single sequence, on a GPU: a draft of 16 and its root, one more than the 16 that cost like one
EACH = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # rows per sequence of several
MOST_ROWS = 1024  # of all sequences together, on a GPU
MOST_CPU_ROWS = 32  # on a CPU, where the cost is linear in the rows: from two rows per sequence on
CONTEXT = 192  # tokens before the rows, on a CPU, which reads them one sequence after the other
SWEEP_SECONDS = 2.0  # for all sweeps; there are two at least
SCRATCH = -1_000_000  # id of the first scratch sequence; the others count down
Shapes = list[tuple[int, int]]  # (sequences, rows of each)
Timings = dict[tuple[int, int], float]  # seconds
STEADY = 1.15  # the second-fastest time of a shape ÷ its fastest, in the middle of all shapes, on a machine left alone


class MeasuredCosts(Timings):
    """`steady` is False where other work disturbed the measurement: it is used, but not stored."""

    steady = True


def target_costs(runner: Runner, cache: Cache, sequences: Iterable[int] = (1,), sweeps: int = 5) -> MeasuredCosts:
    """Seconds of a pass by (sequences, rows in all), measured in scratch sequences, which are freed.

    The minimum of several sweeps over all shapes, more on a busy machine: other work only adds time. Costs never fall
    with rows, because fewer rows can be padded. Shapes that do not fit the cache are left out.
    """
    gpu = runner.plane.k[0].device.type != "cpu"
    single, most = ((*ROWS, EDGE), MOST_ROWS) if gpu else (ROWS, MOST_CPU_ROWS)
    shapes = _shapes(cache, sequences, single, most)
    before = 0 if gpu else _context(cache, shapes)
    seqs = [Sequence(SCRATCH - i, _tokens(runner, i, before + rows)) for i, rows in enumerate(_longest(shapes))]

    def sweep() -> Timings:
        return {(count, each): _pass_seconds(runner, cache, seqs[:count], before, each) for count, each in shapes}

    try:
        for seq in seqs:
            cache.open(seq)
            cache.reserve(seq, len(seq.tokens), 0)
        if gpu:
            prepared: Any = runner  # its passes are captured
            prepared.prepare(count * each for count, each in shapes)
            sweep()
        timings: list[Timings] = []
        start = time.perf_counter()
        while len(timings) < sweeps and (len(timings) < 2 or time.perf_counter() - start < SWEEP_SECONDS):
            timings.append(sweep())
        while not _is_steady(timings) and time.perf_counter() - start < 3 * SWEEP_SECONDS:
            timings.append(sweep())
    finally:
        for seq in seqs:
            if seq.id in cache.rows:
                cache.free(seq)
    costs = MeasuredCosts(_fastest(timings))
    costs.steady = _is_steady(timings) and not is_overloaded()
    return costs


def _tokens(runner: Runner, number: int, count: int) -> list[int]:
    """What is fed. Rows of a mixture of experts have different tokens: equal ones would all read the same experts."""
    config: Any = getattr(getattr(runner, "model", None), "config", None)
    if not getattr(config, "experts", 0):
        return [1] * count
    return [(7919 * (i + 1) + 104_729 * (number + 1)) % config.vocab_size for i in range(count)]


def _is_steady(timings: list[Timings]) -> bool:
    """Whether the two fastest times of most shapes agree, and rows cost something."""
    pairs = (sorted(timing[shape] for timing in timings)[:2] for shape in timings[0])
    return median(slower / faster for faster, slower in pairs) < STEADY and not _busy(_fastest(timings))


def _fastest(timings: list[Timings]) -> Timings:
    """The minimum by (sequences, rows in all), which no smaller shape exceeds."""
    fastest = {shape: min(timing[shape] for timing in timings) for shape in timings[0]}
    return {
        (count, count * each): min(fastest[count, more] for s, more in fastest if s == count and more >= each)
        for count, each in fastest
    }


def _busy(seconds: Seconds) -> bool:
    """Whether other work hid the cost of rows: a pass over one took exactly as long as a pass over eight."""
    rows = by_rows(seconds)
    return 8 in rows and rows[1] == rows[8]


def _shapes(cache: Cache, sequences: Iterable[int], single: tuple[int, ...], most: int) -> Shapes:
    """The shapes to measure for which there are lines and slots; one row of one sequence at least."""
    lines = max(cache.table.shape[0] - len(cache.rows) - len(cache.retired), 1)
    shapes = [
        (count, each)
        for count in sorted({1, *sequences})
        for each in sorted(single if count == 1 else EACH)
        if (count, each) == (1, 1)
        or (each < cache.length - 1 and count <= lines and count * each <= max(most, 2 * count))
    ]
    while len(shapes) > 1 and sum(_longest(shapes)) > cache.available:
        shapes.remove(max(shapes, key=lambda shape: shape[0] * shape[1]))
    return shapes


def _longest(shapes: Shapes) -> list[int]:
    """Rows of each scratch sequence: the first ones take part in every shape."""
    return [max(each for count, each in shapes if count > i) for i in range(max(shapes)[0])]


def _context(cache: Cache, shapes: Shapes) -> int:
    """Tokens before the measured rows: as many as there is room for, up to CONTEXT. Their K/V is not initialised."""
    longest = _longest(shapes)
    free = (cache.available - sum(longest)) // len(longest)
    return max(min(CONTEXT, cache.length - 1 - longest[0], free), 0)


def _pass_seconds(runner: Runner, cache: Cache, seqs: list[Sequence], before: int, each: int) -> float:
    """Seconds of one pass over `each` rows of each sequence."""
    batch = BatchBuilder(cache)
    for seq in seqs:
        batch.pending(seq, before, before + each, want=True)
    batch.want = list(range(len(seqs) * each))  # verification needs every row's logits
    device = runner.plane.k[0].device.type
    # The clock of a single thread does not count what other processes do.
    clock = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    runner.launch(batch, (), False).wait()
    if device == "cuda":
        torch.cuda.synchronize()  # `wait` may return before the device is idle
    return clock() - start


def by_rows(seconds: Seconds) -> dict[int, float]:
    """Seconds of the passes of a single sequence, by rows."""
    return {_pair(key)[1]: value for key, value in seconds.items() if _pair(key)[0] == 1}


class CostFile:
    """Costs of one target: in memory for every engine that runs it, and on disk if the file has a name."""

    def __init__(self, *names: str) -> None:
        name = "-".join(names).replace("/", "_").replace("torch.", "")
        file = f"costs-{name}-{torch.get_num_threads()}-{fingerprint()}-{native.version()}.json"
        self.path = cache_folder() / "profiles" / file if names else None
        self.seconds: Seconds | None = None
        self._refined: tuple[Seconds, PassCosts] | None = None

    def refined(self, measure: Callable[[], Seconds], sequences: Iterable[int], padded: bool) -> PassCosts:
        """The costs that steps refine: one object for all engines of a target, so that a new engine knows what the
        others have seen since the costs were measured."""
        seconds = self.get(measure, sequences)
        if self._refined is None or self._refined[0] is not seconds:
            self._refined = seconds, PassCosts(seconds, padded)
        return self._refined[1]

    def get(self, measure: Callable[[], Seconds], sequences: Iterable[int] = (1,)) -> Seconds:
        """The stored costs, if they cover these numbers of sequences, or else those that are measured now."""
        if self.seconds is None and self.path is not None:
            stored = read_seconds(self.path, _key)
            self.seconds = None if stored is None or _busy(stored) else stored
        if self.seconds is None or not {_pair(key)[0] for key in self.seconds}.issuperset(sequences):
            with stage("Timing passes"):
                self.seconds = measure()
            disturbed = isinstance(self.seconds, MeasuredCosts) and not self.seconds.steady
            if self.path is not None and not disturbed and not _busy(self.seconds):
                write_quietly(self.path, json.dumps({_name(key): value for key, value in self.seconds.items()}))
        return self.seconds


def read_seconds(path: Path, key: Callable[[str], Any] = str) -> dict[Any, float] | None:
    """Seconds by key from a JSON file; None if it is missing, empty or damaged."""
    try:
        return {key(name): float(seconds) for name, seconds in json.loads(path.read_text()).items()} or None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _pair(key: int | tuple[int, int]) -> tuple[int, int]:
    """(sequences, rows); rows alone are those of a single sequence."""
    return key if isinstance(key, tuple) else (1, key)


def _name(key: int | tuple[int, int]) -> str:
    return f"{key[0]},{key[1]}" if isinstance(key, tuple) else str(key)


def _key(name: str) -> int | tuple[int, int]:
    """Older files have rows alone."""
    first, comma, second = name.partition(",")
    return (int(first), int(second)) if comma else int(first)
