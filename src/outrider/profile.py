"""What a target pass costs on this machine, by how many rows it has: measured, never assumed."""

from __future__ import annotations

import statistics
import time

from .cache import Cache, Packing, Plane
from .models import Model
from .types import Sequence

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)


def target_costs(model: Model, cache: Cache, plane: Plane, repeats: int = 3) -> dict[int, float]:
    """Seconds of a pass for each row count: the median of a few, in a scratch sequence that leaves no trace."""
    rows = [n for n in ROWS if n < cache.length - 1] or [1]
    seq = Sequence(-1_000_000, [1] * (max(rows) + 1))
    cache.open(seq)
    cache.reserve(seq, len(seq.tokens), 0)
    try:
        _pass(model, cache, plane, seq, rows[0])  # the first one pays for lazy set-up
        return {n: statistics.median(_pass(model, cache, plane, seq, n) for _ in range(repeats)) for n in rows}
    finally:
        cache.free(seq)


def _pass(model: Model, cache: Cache, plane: Plane, seq: Sequence, n: int) -> float:
    packed = Packing(cache)
    packed.pending(seq, 0, n, want=True)
    packed.want = list(range(n))  # verification needs every row's logits
    rows = packed.rows()
    begin = time.perf_counter()
    model.forward(rows, plane)
    return time.perf_counter() - begin
