"""Bringing a drafting model's plane up to date with a text, a chunk at a time.

Shared by everybody who drafts with layers, wherever they run. It knows tokens and planes, not what is drafted.
"""

from __future__ import annotations

from collections.abc import Callable

from ..engine.cache import Cache, Packing, Plane
from ..types import Sequence

CHUNK = 512  # rows of one pass while catching up with a long prompt


def catch_up(cache: Cache, plane: Plane, seq: Sequence, run: Callable[[Packing], object]) -> int:
    """Feed all but the last chunk of what the plane lacks; returns where the rest begins (never past the end)."""
    start = min(cache.sync(seq, plane), len(seq.tokens) - 1)
    while len(seq.tokens) - start > CHUNK:
        packed = Packing(cache)
        packed.pending(seq, start, start + CHUNK, want=False)
        run(packed)
        start += CHUNK
        plane.held[seq.id] = start
    return start
