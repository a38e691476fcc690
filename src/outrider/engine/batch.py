"""The rows of one pass: pending tokens and drafted nodes of all sequences, packed.

`BatchBuilder` fills a `types.Batch` sequence by sequence from the cache's slots; `pack` does it for a step. The backend
that runs a batch makes tensors from it. This module knows ids, positions and slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence as Listing

from ..types import Batch, Draft, Sequence, Turn
from .cache import Cache, Plane

Spares = Listing[int] | Mapping[int, int]  # node -> index among a sequence's spare slots


class BatchBuilder(Batch):
    """A batch that is being filled."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache.table, sources=cache.sources)
        self.cache = cache

    def pending(self, seq: Sequence, start: int, stop: int, want: bool) -> None:
        """Committed tokens start..stop-1; with `want`, the last one's logits are needed."""
        row = self.cache.rows[seq.id]
        for position in range(start, stop):
            self._add(seq, seq.tokens[position], position, row.slots[position], position + 1, [])
        if want:
            self.want.append(len(self.tokens) - 1)

    def again(self, seq: Sequence, position: int, slot: int) -> None:
        """A committed token once more, for its logits: it sees the tokens before it; its K/V goes to another slot."""
        self._add(seq, seq.tokens[position], position, slot, position, [slot])
        self.want.append(len(self.tokens) - 1)

    def nodes(self, seq: Sequence, tokens: list[int], parents: list[int], run: Iterable[int], spare: Spares) -> None:
        """Drafted nodes `run` of a tree after seq.tokens; node n is in the sequence's spare slot number spare[n]."""
        row, root = self.cache.rows[seq.id], len(seq.tokens)
        for node in run:
            tail, up = [], node
            while up >= 0:
                tail.append(row.spare[spare[up]])
                up = parents[up]
            self._add(seq, tokens[node], root + len(tail) - 1, tail[0], root, tail[::-1])
            self.want.append(len(self.tokens) - 1)

    def _add(self, seq: Sequence, token: int, position: int, slot: int, context: int, tail: list[int]) -> None:
        self.owners.append(seq)
        self.tokens.append(token)
        self.positions.append(position)
        self.slots.append(slot)
        self.lines.append(self.cache.rows[seq.id].line)
        self.context.append(context)
        self.tails.append(tail)


def pack(cache: Cache, turns: list[Turn], draft: Draft, plane: Plane) -> tuple[Batch, list[int]]:
    """The batch of a step: each sequence's pending tokens, then its tree. Also each root's index among the wanted."""
    batch = BatchBuilder(cache)
    first = []
    for turn, tree in zip(turns, draft.trees, strict=True):
        start = cache.sync(turn.seq, plane)
        batch.pending(turn.seq, start, start + turn.feed, want=turn.whole)
        first.append(len(batch.want) - 1 if turn.whole else -1)
        every = range(len(tree.tokens))
        batch.nodes(turn.seq, tree.tokens, tree.parents, every, every)
    return batch, first
