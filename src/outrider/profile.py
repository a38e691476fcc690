"""What a target pass costs on this machine, by how many rows it has: measured, never assumed.

Measured once per model, dtype, machine and number of threads, and kept; every step refines it from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch

from .cache import Cache, Packing, Plane
from .machine import fingerprint
from .models import Model
from .paths import cache_folder, write_quietly
from .types import Sequence

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
PATIENCE = 2.0  # seconds for all sweeps; there are two at least


def target_costs(model: Model, cache: Cache, plane: Plane, sweeps: int = 5) -> dict[int, float]:
    """Seconds of a pass for each row count, in a scratch sequence that leaves no trace.

    Several sweeps over all counts, and the fastest of each: whatever else the machine does only ever adds. More rows
    never cost less: where they seem to, fewer could be padded.
    """
    rows = [n for n in ROWS if n < cache.length - 1] or [1]
    seq = Sequence(-1_000_000, [1] * (max(rows) + 1))
    cache.open(seq)
    cache.reserve(seq, len(seq.tokens), 0)
    try:
        begin = time.perf_counter()
        taken: list[dict[int, float]] = []
        while len(taken) < sweeps and (len(taken) < 2 or time.perf_counter() - begin < PATIENCE):
            taken.append({n: _pass(model, cache, plane, seq, n) for n in rows})
    finally:
        cache.free(seq)
    fastest = {n: min(sweep[n] for sweep in taken) for n in rows}
    return {n: min(fastest[m] for m in rows if m >= n) for n in rows}


def _pass(model: Model, cache: Cache, plane: Plane, seq: Sequence, n: int) -> float:
    packed = Packing(cache)
    packed.pending(seq, 0, n, want=True)
    packed.want = list(range(n))  # verification needs every row's logits
    rows = packed.rows()
    begin = time.perf_counter()
    model.forward(rows, plane)
    return time.perf_counter() - begin


class CostFile:
    """Costs in memory for everyone who runs the same target, and on disk for the next start, if it has a name."""

    def __init__(self, *names: str) -> None:
        words = "-".join(names).replace("/", "_").replace("torch.", "")
        place = f"costs-{words}-{torch.get_num_threads()}-{fingerprint()}.json"
        self.path = cache_folder() / "profiles" / place if names else None
        self.seconds: dict[int, float] | None = None

    def get(self, measure: Callable[[], dict[int, float]]) -> dict[int, float]:
        """What is known, or else what is measured now."""
        if self.seconds is None:
            self.seconds = self._read()
        if self.seconds is None:
            self.seconds = measure()
            if self.path is not None:
                write_quietly(self.path, json.dumps(self.seconds))
        return dict(self.seconds)

    def _read(self) -> dict[int, float] | None:
        try:
            known = json.loads(self.path.read_text()) if self.path else {}
            return {int(rows): float(seconds) for rows, seconds in known.items()} or None
        except (OSError, ValueError, AttributeError, TypeError):
            return None
