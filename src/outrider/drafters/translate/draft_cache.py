"""Sequences in a draft model's own words, in a cache of their own.

A target token may be several draft tokens, or a part of one, so the two cannot share slots. A *shadow* is a sequence
retold for the draft model. Tokens are the truth here too: before each draft the shadow is retold from the target's, and
its row in the cache is brought to what it says now: drafted K/V that came true is kept, what was retold otherwise is
forgotten. When places run short, whoever drafted longest ago gives up its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ...engine.cache import Cache, Plane
from ...types import Sequence

SPARE = 64  # slots beside one whole sequence, at least


class Context(Protocol):
    """Retells a text that grows."""

    def hear(self, tokens: list[int]) -> list[int]: ...


class ShadowCache(Cache):
    """A cache whose sequences may change their minds about what was said."""

    def trim(self, seq: Sequence, tokens: int) -> None:
        """Forget what comes after so many tokens.

        0 ........ tokens ........ │ spare
        [ stays   ][ given back   ]
        """
        row = self.rows[seq.id]
        self._drop(row.slots[tokens:])
        row.slots, row.tokens = row.slots[:tokens], row.tokens[:tokens]
        for plane in self.planes:
            plane.wrote(seq.id, ())
            plane.advance(seq.id, min(plane.holds(seq.id), tokens))


@dataclass
class Shadow:
    """One sequence in the draft model's words."""

    origin: Sequence  # the target's
    context: Context
    seq: Sequence  # the same id, draft tokens
    skip: int = 0  # draft tokens at the beginning that do not fit into the draft model's context
    drafted: list[int] = field(default_factory=list)  # the last draft's tree, in draft tokens
    parents: list[int] = field(default_factory=list)


class Shadows:
    """The shadows of all sequences that were drafted for of late."""

    def __init__(self, cache: ShadowCache, plane: Plane, context: Callable[[], Context]) -> None:
        self.cache, self.plane, self.context = cache, plane, context
        self.known: OrderedDict[int, Shadow] = OrderedDict()  # by sequence; the one that drafted longest ago first

    def follow(self, origins: list[Sequence], nodes: list[int]) -> list[Shadow | None]:
        """Their shadows, up to date and with slots for so many drafted nodes each; None where there is no room."""
        busy = {origin.id for origin in origins}
        return [self._follow(origin, count, busy) for origin, count in zip(origins, nodes, strict=True)]

    def end(self, origin: Sequence) -> None:
        """Its K/V stays readable for later prompts that begin like it."""
        shadow = self.known.pop(origin.id, None)
        if shadow is not None:
            self.cache.free(shadow.seq, keep=True)

    def _follow(self, origin: Sequence, nodes: int, busy: set[int]) -> Shadow | None:
        shadow = self.known.get(origin.id) or self._open(origin, busy)
        if shadow is None:
            return None
        self.known.move_to_end(origin.id)
        shadow.origin = origin
        self._reconcile(shadow, self._visible(shadow, shadow.context.hear(origin.tokens), nodes))
        shadow.seq.params, shadow.seq.rule = origin.params, origin.rule
        tokens = len(shadow.seq.tokens)
        if not tokens:
            return None
        while not self.cache.reserve(shadow.seq, tokens, nodes):
            if tokens + nodes > self.cache.length or not self._give_up(busy):
                return None
        return shadow

    def _open(self, origin: Sequence, busy: set[int]) -> Shadow | None:
        while len(self.cache.rows) >= self.cache.table.shape[0]:
            if not self._give_up(busy):
                return None
        context = self.context()
        shadow = Shadow(origin, context, Sequence(origin.id, []))
        shadow.seq.tokens = list(self._visible(shadow, context.hear(origin.tokens), 0))
        if not shadow.seq.tokens:
            return None
        self.cache.open(shadow.seq)
        self.known[origin.id] = shadow
        return shadow

    def _visible(self, shadow: Shadow, ids: list[int], nodes: int) -> list[int]:
        """The end of the text, where all of it is longer than the draft model reads. Cut seldom: it is fed anew."""
        longest = self.cache.length - nodes
        if len(ids) - shadow.skip > longest or shadow.skip > len(ids):
            shadow.skip = max(len(ids) - longest // 2, 0) if len(ids) > longest else 0
        return ids[shadow.skip :]

    def _reconcile(self, shadow: Shadow, ids: list[int]) -> None:
        row, old = self.cache.rows[shadow.seq.id], shadow.seq.tokens
        held = len(row.tokens)
        shadow.seq.tokens = list(ids)
        if row.tokens == ids[:held]:
            path = self._came_true(shadow, ids[len(old) :]) if held == len(old) else []
            self.cache.commit(shadow.seq, held, path)
        else:
            self.cache.trim(shadow.seq, self.cache.sync(shadow.seq, self.plane))
        shadow.drafted, shadow.parents = [], []

    def _came_true(self, shadow: Shadow, new: list[int]) -> list[int]:
        """The nodes of the last draft that this is, one after the other."""
        path: list[int] = []
        at = -1
        for token in new:
            nodes = enumerate(zip(shadow.drafted, shadow.parents, strict=True))
            at = next((i for i, (drafted, parent) in nodes if parent == at and drafted == token), -2)
            if at < 0:
                break
            path.append(at)
        return path

    def _give_up(self, busy: set[int]) -> bool:
        """Forget the shadow that drafted longest ago, if any is not at work."""
        idle = next((name for name in self.known if name not in busy), None)
        if idle is None:
            return False
        self.cache.free(self.known.pop(idle).seq)
        return True
