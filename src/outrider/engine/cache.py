"""Slots and planes: where K/V is stored, and which of it is valid.

Tokens are the truth; the cache reconciles to them. A *slot* stores the K/V of one token. The table maps (sequence,
position) to a slot. A *plane* is the K/V of a group of layers (the target; a draft model; a head), indexed by the same
slots, with one number per sequence: how many of its leading tokens it holds.

    positions   0 ........ held ........ n-1 │ n ................
                [ in the plane ][ pending  ] │ [ drafted nodes ]
                row.slots                    │ row.spare

A drafted node occupies a spare slot; the table lists spare slots after the others, so that a device which emits tokens
ahead of the host finds theirs. `commit(path)` appends the accepted nodes' slots to the row; the others are spare again.
A model with an encoder also has slots for each sequence's source (`Row.source`), whose K/V cross-attention reads:
written once, shared by all sequences with the same source, and never part of a text.

Keys are rotated for root position + depth, which is their final position: nothing is moved or recomputed. Slots are
shared between sequences with a common prefix and reference-counted; only unshared positions are ever written.

This module knows ids and slots; it never reads a number inside a plane.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..types import Sequence, common_prefix

TOUCHED = 512  # slots of a plane on a CPU whose memory is there before the first answer takes them: a usual request's
CHECKED = 8  # tokens that show whether a list that grows is still the one that it was
AHEAD = 16  # slots that a sequence on a device gets beyond those that it needs, while half of them are free


@dataclass
class Row:
    """One sequence's slots. `tokens` are the ids whose K/V the slots are meant for."""

    line: int  # in the table
    slots: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)  # slots of the encoder's input
    source_ids: list[int] = field(default_factory=list)
    origin: list[int] | None = None  # a sequence's list that begins with `tokens`, and only grows

    def agreement(self, tokens: list[int]) -> int:
        """How many leading tokens of a sequence are the row's. Its own list is known by itself and the last of them: to
        compare the whole text takes every token of it from memory, where a pass leaves it."""
        count = len(self.tokens)
        since = max(count - CHECKED, 0)
        if tokens is self.origin and tokens[since:count] == self.tokens[since:]:
            return count
        common = common_prefix(self.tokens, tokens)
        self.origin = tokens if common == count else None
        return common


class Plane:
    """The K/V of a group of layers, in slots shared with every other plane."""

    def __init__(self, layers: int, slots: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        # Not zeroed: no slot is read before it is written, and untouched memory costs nothing.
        slots += device.type != "cpu"  # one more, without an owner: captured passes write their padding there
        make = partial(torch.empty, slots, heads, dim, dtype=dtype, device=device)
        self.k = [_touched(make()) for _ in range(layers)]  # [S, H, d]
        self.v = [_touched(make()) for _ in range(layers)]
        self._held: dict[int, int] = {}  # sequence -> leading tokens whose K/V is here
        self._nodes: dict[int, frozenset[int]] = {}  # sequence -> drafted nodes whose K/V is in its spare slots
        self.passes = 0  # that wrote here: shows whether another pass came after one's own
        self.streams: dict[int, torch.Tensor] = {}  # layer -> [S, H] its output, where a drafter needs it
        self.addresses: Any = None  # of all these tensors, as a backend has noted them; None: again, they have moved
        self._sources: set[int] = set()  # first slots of the sources whose K/V is here

    def has_source(self, first: int) -> bool:
        """Whether the K/V of the source that begins in this slot is here."""
        return first in self._sources

    def keep_source(self, first: int) -> None:
        """The plane now holds the source that begins in this slot."""
        self._sources.add(first)

    def drop_source(self, first: int) -> None:
        self._sources.discard(first)

    def holds(self, seq: int) -> int:
        """Leading tokens of a sequence whose K/V is here."""
        return self._held.get(seq, 0)

    def advance(self, seq: int, tokens: int) -> None:
        """The plane now holds this many leading tokens of a sequence."""
        self._held[seq] = tokens

    def wrote(self, seq: int, nodes: Iterable[int]) -> None:
        """The plane holds these drafted nodes in the sequence's spare slots, node n in slot n, and no others."""
        self._nodes[seq] = frozenset(nodes)

    def count_pass(self) -> None:
        """Every model's `forward` calls this: a pass writes here."""
        self.passes += 1

    def commit(self, seq: int, fed: int, path: list[int]) -> None:
        """Nodes on the accepted path become held tokens, as far as they were written after all `fed` tokens."""
        wrote, keep = self._nodes.pop(seq, frozenset()), 0
        if not path:
            return
        while keep < len(path) and path[keep] in wrote:
            keep += 1
        if self.holds(seq) == fed:
            self._held[seq] = fed + keep

    def forget(self, seq: int, rename: int | None = None) -> None:
        """Drop a sequence, or give it another id."""
        self._nodes.pop(seq, None)
        held = self._held.pop(seq, None)
        if rename is not None and held is not None:
            self._held[rename] = held

    def keep_streams(self, layers: Iterable[int], width: int, dtype: torch.dtype) -> None:
        """Let passes store the output of these layers [H] in each row's slot, beside its K/V: on a GPU, and where the
        model `keeps_streams`."""
        for layer in layers:
            if layer not in self.streams:
                make = self.k[0].new_empty if self.k[0].is_cpu else self.k[0].new_zeros
                self.streams[layer] = _touched(make(self.k[0].shape[0], width, dtype=dtype))
        self.addresses = None

    def add_scratch(self, more: int) -> int:
        """Append slots that no sequence will ever own; returns the first. What was written before is lost."""
        assert not self.streams, "streams have as many slots as there are"
        first, heads, dim = self.k[0].shape
        self.k = [k.new_empty(first + more, heads, dim) for k in self.k]  # [S, H, d]
        self.v = [v.new_empty(first + more, heads, dim) for v in self.v]
        self.addresses = None
        return first

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k, *self.v))


def _touched(tensor: torch.Tensor) -> torch.Tensor:
    """The same [S, ...]; on a CPU its first slots are written, so that passes do not wait for the system's pages: with
    SmolLM2 six of them for each token, some 20 µs."""
    if tensor.is_cpu:
        tensor[:TOUCHED] = 0
    return tensor


class Cache:
    """All slots, the table, the planes. Rows are found by sequence id."""

    def __init__(
        self, slots: int, lines: int, length: int, device: torch.device | str = "cpu", source_length: int = 0
    ) -> None:
        """source_length: of the longest source; 0: there is no encoder."""
        self.slots, self.length, self.device = slots, length, torch.device(device)
        self.sources = torch.zeros(lines, source_length, dtype=torch.int32) if source_length else None
        self.table = torch.zeros(lines, length, dtype=torch.int32)  # [lines, length]
        self._table = self.table.numpy()  # the same memory: numpy writes a few numbers faster
        self.planes: list[Plane] = []
        self.rows: dict[int, Row] = {}
        self.retired: OrderedDict[int, Row] = OrderedDict()  # finished rows, kept for their prefixes; LRU first
        self._free = list(range(slots - 1, -1, -1))
        self._lines = list(range(lines - 1, -1, -1))
        self._readers = [0] * slots  # reference counts: rows that hold the slot
        self._retired_id = 0
        self.on_take: Callable[[list[int]], None] | None = None  # called with slots that nobody has written since
        self.changes: list[dict[int, int]] = []  # for each copy of the table on a device: flat index -> new slot

    def add_plane(
        self, layers: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Plane:
        plane = Plane(layers, self.slots, heads, dim, dtype, device or self.device)
        self.planes.append(plane)
        return plane

    @property
    def available(self) -> int:
        """Slots that can be taken without preemption: free ones, and those that only finished rows hold."""
        held = Counter(slot for row in self.retired.values() for slot in (*row.slots, *row.source))
        return len(self._free) + sum(self._readers[slot] == count for slot, count in held.items())

    def needed(self, seq: Sequence) -> int:
        """Slots of a waiting sequence's tokens and, if no row has the same, of its source."""
        return len(seq.tokens) + (0 if self._with_source(seq) else len(self._source_of(seq)))

    def has(self, slots: int) -> bool:
        """Whether so many slots can be taken without preemption. Those of finished rows are counted only if needed."""
        return slots <= len(self._free) or slots <= self.available

    def open(self, seq: Sequence) -> int:
        """Create a sequence's row with the longest prefix that any row holds already; returns that length."""
        if not self._lines:
            self._evict()
        row = self.rows[seq.id] = Row(self._lines.pop())
        self._open_source(seq, row)
        source, length = self._longest_prefix(seq)
        if source is not None:
            shared = self.rows.get(source) or self.retired[source]
            row.slots, row.tokens = shared.slots[:length], shared.tokens[:length]
            for slot in row.slots:
                self._readers[slot] += 1
            self._write_table(row, 0)
            for plane in self.planes:
                plane.advance(seq.id, min(plane.holds(source), length))
        return length

    def _open_source(self, seq: Sequence, row: Row) -> None:
        """Slots for the sequence's source, or those of a row that has the same."""
        ids = self._source_of(seq)
        if not ids:
            return
        assert self.sources is not None
        same = self._with_source(seq)
        if same is not None:
            row.source = list(same.source)
            for slot in row.source:
                self._readers[slot] += 1
        else:
            row.source = self._take(len(ids))
        row.source_ids = ids
        self.sources[row.line, : len(ids)] = torch.tensor(row.source, dtype=torch.int32)

    def _source_of(self, seq: Sequence) -> list[int]:
        return [] if self.sources is None else seq.source

    def _with_source(self, seq: Sequence) -> Row | None:
        """A row that holds the same source."""
        ids = self._source_of(seq)
        rows = (*self.rows.values(), *self.retired.values())
        return next((row for row in rows if row.source_ids == ids), None) if ids else None

    def sync(self, seq: Sequence, plane: Plane) -> int:
        """How many leading tokens of the sequence this plane holds; seq.tokens from there on are pending."""
        row = self.rows[seq.id]
        held = min(plane.holds(seq.id), row.agreement(seq.tokens))
        plane.advance(seq.id, held)
        return held

    def reserve(self, seq: Sequence, tokens: int, nodes: int) -> bool:
        """Slots for the first `tokens` tokens of a sequence and for `nodes` drafted ones; False if too few are left."""
        row = self.rows[seq.id]
        start = len(row.slots)
        end = start + len(row.spare)
        more = (tokens if tokens > start else start) + nodes - end
        if tokens + nodes > self.length or not self.has(more):
            return False
        if more > 0:
            if self.changes and len(self._free) >= more + AHEAD + self.slots // 2:  # a device is told seldom
                more = min(more + AHEAD, self.length - end)
            row.spare += self._take(more)
            self._write_table(row, end)
        if tokens > start:  # the first spare slots are theirs, and written already where a device has emitted them
            row.slots += row.spare[: tokens - start]
            row.tokens += seq.tokens[start:tokens]
            del row.spare[: tokens - start]
        return True

    def spare(self, seq: Sequence) -> list[int]:
        """The slots of the nodes that may be drafted for this sequence, node 0 first."""
        return self.rows[seq.id].spare

    def commit(self, seq: Sequence, fed: int, path: Iterable[int], on_device: bool = False) -> None:
        """The target holds `fed` tokens and the accepted path: their slots become the next positions.

        seq.tokens already ends with the emitted tokens; unaccepted nodes' slots stay spare for the next draft.
        on_device: the device has done the same with its copy of the table.
        """
        row, path = self.rows[seq.id], list(path)
        for plane in self.planes:
            plane.commit(seq.id, fed, path)
        if path:
            start = len(row.slots)
            row.slots += [row.spare[node] for node in path]
            row.tokens += seq.tokens[start : start + len(path)]
            accepted = set(path)
            row.spare = [slot for node, slot in enumerate(row.spare) if node not in accepted]
            if path != list(range(len(path))):  # a chain's slots are in their places already
                self._write_table(row, start, tell=not on_device)

    def next_free(self, n: int) -> list[int]:
        """The slots that would be taken next, first to last; fewer if a retired row would have to be evicted."""
        return self._free[: -n - 1 : -1]

    def free(self, seq: Sequence, keep: bool = False) -> None:
        """Free a sequence's slots. With `keep`, they stay readable for later prompts until slots run short."""
        row = self.rows.pop(seq.id)
        kept = self._held(seq.id) if keep else 0
        self._drop(row.spare + row.slots[kept:])
        row.slots, row.tokens, row.spare = row.slots[:kept], row.tokens[:kept], []
        if not kept:
            self._drop_source(row)
        if kept:
            self._retired_id -= 1  # negative: never the id of a live sequence
            self.retired[self._retired_id] = row
            self._forget(seq.id, rename=self._retired_id)
        else:
            self._lines.append(row.line)
            self._forget(seq.id)

    def drop_retired(self) -> None:
        """Evict every finished row."""
        while self.retired:
            self._evict()

    def check(self) -> None:
        """Raise AssertionError unless every slot is accounted for exactly once per reader."""
        readers, rows = [0] * self.slots, {**self.rows, **self.retired}
        for row in rows.values():
            assert len(row.slots) == len(row.tokens), "a row's slots and tokens differ in number"
            slots = row.slots + row.spare
            assert self.table[row.line, : len(slots)].tolist() == slots, "the table disagrees with its row"
            assert len({*slots, *row.source}) == len(slots) + len(row.source), "a row holds a slot twice"
            assert len(row.source) == len(row.source_ids), "a row's source and its slots differ in number"
            if self.sources is not None:
                listed = self.sources[row.line, : len(row.source)].tolist()
                assert listed == row.source, "the table of sources disagrees with its row"
            for slot in (*slots, *row.source):
                readers[slot] += 1
            assert all(self._readers[s] == 1 for s in row.spare), "a spare slot is shared"
        assert readers == self._readers, "readers are miscounted"
        assert sorted(self._free) == [s for s in range(self.slots) if not readers[s]], "a slot is lost or free twice"
        lines = [row.line for row in rows.values()] + self._lines
        assert sorted(lines) == list(range(self.table.shape[0])), "a line is lost or used twice"
        firsts = {row.source[0] for row in rows.values() if row.source}
        assert all(plane._sources <= firsts for plane in self.planes), "a plane claims a source that no row has"
        for id_, held in ((id_, held) for plane in self.planes for id_, held in plane._held.items()):
            assert held <= (len(rows[id_].slots) if id_ in rows else 0), "a plane claims tokens without slots"

    def _take(self, n: int) -> list[int]:
        while len(self._free) < n:
            self._evict()
        taken = [self._free.pop() for _ in range(n)]
        for slot in taken:
            self._readers[slot] = 1
        if self.on_take is not None:
            self.on_take(taken)
        return taken

    def _drop(self, slots: list[int]) -> None:
        for slot in slots:
            self._readers[slot] -= 1
            if not self._readers[slot]:
                self._free.append(slot)

    def _drop_source(self, row: Row) -> None:
        self._drop(row.source)
        if row.source and not self._readers[row.source[0]]:
            for plane in self.planes:
                plane.drop_source(row.source[0])
        row.source, row.source_ids = [], []

    def _evict(self) -> None:
        """Free the least recently used finished row."""
        id_, row = self.retired.popitem(last=False)
        self._lines.append(row.line)
        self._drop(row.slots)
        self._drop_source(row)
        self._forget(id_)

    def _forget(self, id_: int, rename: int | None = None) -> None:
        for plane in self.planes:
            plane.forget(id_, rename)

    def _held(self, id_: int) -> int:
        """Leading tokens that some plane holds."""
        return max((plane.holds(id_) for plane in self.planes), default=0)

    def _longest_prefix(self, seq: Sequence) -> tuple[int | None, int]:
        """The row that shares most with a new sequence. The last token is always fed: its logits are needed."""
        best, length, tokens, source = None, 0, seq.tokens, self._source_of(seq)
        for id_, row in (*self.rows.items(), *self.retired.items()):
            if row.source_ids != source or row.tokens[length : length + 1] != tokens[length : length + 1]:
                continue  # of another source, or it shares no more than the best one
            common = min(common_prefix(row.tokens, seq.tokens), self._held(id_), len(seq.tokens) - 1)
            if common > length:
                best, length = id_, common
        if best is not None and best in self.retired:
            self.retired.move_to_end(best)
        return best, length

    def _write_table(self, row: Row, start: int, tell: bool = True) -> None:
        """Write the table from position `start` on, spare slots included; `tell`: also to its copies on devices."""
        slots = [*row.slots[start:], *row.spare[max(start - len(row.slots), 0) :]]
        self._table[row.line, start : start + len(slots)] = slots
        at = row.line * self.length + start
        for copy in self.changes if tell else ():
            copy.update(zip(range(at, at + len(slots)), slots, strict=True))
