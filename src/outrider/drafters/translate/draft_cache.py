"""Sequences in a draft model's ids, with a cache of their own.

A target token may be several draft tokens, or a part of one, so the two models cannot share slots. Before each draft a
sequence's target tokens are translated again, and its row in the cache is brought in line: drafted K/V that was
accepted is kept, and what is now translated otherwise is dropped. When slots run short, the sequence that drafted
longest ago loses its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...engine.cache import Cache, Plane
from ...types import Sequence, Tree
from .alignment import Translation

SPARE = 64  # slots beside one whole sequence, at least
EMPTY = Tree([], [])


class DraftCache(Cache):
    """A cache whose sequences may change committed tokens."""

    def trim(self, seq: Sequence, tokens: int) -> None:
        """Drop everything after the first `tokens` tokens, except the spare slots."""
        row = self.rows[seq.id]
        self._drop(row.slots[tokens:])
        row.slots, row.tokens = row.slots[:tokens], row.tokens[:tokens]
        self._write_table(row, tokens)  # spare slots follow the others there
        for plane in self.planes:
            plane.wrote(seq.id, ())
            plane.advance(seq.id, min(plane.holds(seq.id), tokens))


@dataclass
class DraftSequence:
    """One sequence in the draft model's ids."""

    origin: Sequence  # the target's
    translation: Translation
    seq: Sequence  # the same id, draft tokens
    skip: int = 0  # draft tokens at the start that do not fit into the draft model's context
    last: Tree = EMPTY  # the last draft, in draft tokens


class DraftSequences:
    """The draft sequences of all sequences drafted for recently."""

    def __init__(self, cache: DraftCache, plane: Plane, translation: Callable[[], Translation]) -> None:
        self.cache, self.plane, self.translation = cache, plane, translation
        self.open: OrderedDict[int, DraftSequence] = OrderedDict()  # by id; the least recently used first

    def sync(self, origins: list[Sequence], nodes: list[int]) -> list[DraftSequence | None]:
        """Draft sequences, up to date and with slots for so many drafted nodes each; None where there is no room."""
        busy = {origin.id for origin in origins}
        return [self._sync(origin, count, busy) for origin, count in zip(origins, nodes, strict=True)]

    def end(self, origin: Sequence) -> None:
        """Its K/V stays readable for later prompts with the same prefix."""
        ended = self.open.pop(origin.id, None)
        if ended is not None:
            self.cache.free(ended.seq, keep=True)

    def _sync(self, origin: Sequence, nodes: int, busy: set[int]) -> DraftSequence | None:
        draft = self.open.get(origin.id) or self._add(origin, busy)
        if draft is None:
            return None
        self.open.move_to_end(origin.id)
        draft.origin = origin
        self._reconcile(draft, self._visible(draft, draft.translation.update(origin.tokens), nodes))
        draft.seq.params, draft.seq.rule = origin.params, origin.rule
        tokens = len(draft.seq.tokens)
        if not tokens:
            return None
        while not self.cache.reserve(draft.seq, tokens, nodes):
            if tokens + nodes > self.cache.length or not self._evict(busy):
                return None
        return draft

    def _add(self, origin: Sequence, busy: set[int]) -> DraftSequence | None:
        while len(self.cache.rows) >= self.cache.table.shape[0]:
            if not self._evict(busy):
                return None
        draft = DraftSequence(origin, self.translation(), Sequence(origin.id, []))
        draft.seq.tokens = list(self._visible(draft, draft.translation.update(origin.tokens), 0))
        if not draft.seq.tokens:
            return None
        self.cache.open(draft.seq)
        self.open[origin.id] = draft
        return draft

    def _visible(self, draft: DraftSequence, ids: list[int], nodes: int) -> list[int]:
        """The end of a text that is too long for the draft model. It is cut rarely, because the rest is fed anew."""
        longest = self.cache.length - nodes
        if len(ids) - draft.skip > longest or draft.skip > len(ids):
            draft.skip = max(len(ids) - longest // 2, 0) if len(ids) > longest else 0
        return ids[draft.skip :]

    def _reconcile(self, draft: DraftSequence, ids: list[int]) -> None:
        row, old = self.cache.rows[draft.seq.id], draft.seq.tokens
        held = len(row.tokens)
        draft.seq.tokens = list(ids)
        if row.tokens == ids[:held]:
            path = self._accepted(draft, ids[len(old) :]) if held == len(old) else []
            self.cache.commit(draft.seq, held, path)
        else:
            self.cache.trim(draft.seq, self.cache.sync(draft.seq, self.plane))
        draft.last = EMPTY

    def _accepted(self, draft: DraftSequence, new: list[int]) -> list[int]:
        """The path of the last draft that these new tokens follow."""
        path: list[int] = []
        at = -1
        for token in new:
            nodes = enumerate(zip(draft.last.tokens, draft.last.parents, strict=True))
            at = next((i for i, (drafted, parent) in nodes if parent == at and drafted == token), -2)
            if at < 0:
                break
            path.append(at)
        return path

    def _evict(self, busy: set[int]) -> bool:
        """Drop the least recently used sequence that is not in this draft; False if there is none."""
        idle = next((name for name in self.open if name not in busy), None)
        if idle is None:
            return False
        self.cache.free(self.open.pop(idle).seq)
        return True
