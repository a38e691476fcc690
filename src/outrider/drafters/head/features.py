"""What a trained head is fed with: committed tokens, the target's hidden states beside them, then drafted tokens.

Head row p has the token at p + 1 and the feature of position p, lives in the slot of position p, and predicts the token
at p + 2. With n committed tokens, rows 0 … n-2 are committed; a draft begins with the prediction of row n-2:

    positions   0 ................ n-2 │ n-1          │ spare
    rows        [ held ][  fed now   ]  │ 1st drafted │ later drafted
                  committed rows        │ scratch: fed again, with features, once they are verified

A prefix that another sequence has fed is used as it is (its last row may have another token, at a small cost in
acceptance). Missing features are zeros. This file knows rows and hidden states, not what is drafted from them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence as Listing, Set
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...backends import Chain, ops
from ...backends.rows import rows_of
from ...engine.batch import BatchBuilder
from ...engine.cache import Cache, Plane
from ...types import Sequence, Step
from .._rollout import CHUNK

if TYPE_CHECKING:
    from .network import Head

_FEW = 16  # rows that are read with those whose scores are needed
_SEQUENCES = 256  # more than these are checked for sequences that have ended without `drop`
_PIECES = 32  # steps whose features of one sequence are kept as separate tensors


class FeatureCache:
    """The target's hidden states at committed positions, by sequence id."""

    in_slots = 0  # where native code finds the address of each tap's states [S, H], by slot, and then 0; 0: nowhere

    def observe(self, step: Step) -> None:
        """The target has verified this step."""

    def has(self, seq_id: int, position: int) -> bool:
        """Whether the feature of a position is there, provided that the target has read that position."""
        raise NotImplementedError

    def between(self, seq_id: int, start: int, stop: int, like: Tensor) -> Tensor:
        """Features of positions start … stop-1 [m, taps * H], zeros where missing; dtype and device as `like`."""
        raise NotImplementedError

    def forget(self, seq_id: int, before: int) -> None:
        """The head has been fed with the positions before this one."""

    def drop(self, seq_id: int) -> None:
        """The sequence has ended."""

    def retain(self, live: Set[int]) -> None:
        """Drop sequences that are not among these, where `drop` was not called."""


class Piece(NamedTuple):
    """Hidden states of neighbouring positions."""

    position: int  # of the first
    stop: int  # after the last
    row: int  # of the first in `states`
    states: tuple[Tensor, ...]  # [m, H] for each tap

    def rows(self, start: int, stop: int) -> list[Tensor]:
        """[stop - start, H] for each tap."""
        first, last = start - self.position + self.row, stop - self.position + self.row
        if first == 0 and last == self.states[0].shape[0]:
            return list(self.states)
        return [state[first:last] for state in self.states]


@dataclass
class ObservedFeatures(FeatureCache):
    """Keeps the hidden states that `observe` hands over, until the head has been fed with them.

    `observe` and `between` may be called by two threads.
    """

    taps: tuple[int, ...]
    pieces: dict[int, list[Piece]] = field(default_factory=dict)  # by sequence id
    lock: Lock = field(default_factory=Lock)  # for changes of `pieces`

    def observe(self, step: Step) -> None:
        """Nothing is copied of a step with one row for each sequence and its draft: many are never read."""
        batch, at, hidden = step.batch, 0, step.output.hidden
        if not hidden:  # no taps were requested
            return
        positions = step.rows.positions if batch is None else batch.positions
        states = tuple([hidden[tap] for tap in self.taps])  # [T, H] each
        shared = len(step.turns) == 1 or all(turn.feed == 1 for turn in step.turns)
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            path = [] if verdict is None else verdict.path
            if turn.seq.speculate and not turn.seq.done:
                kept, first, own = turn.feed + len(path), at, states
                if path and path[-1] != len(path) - 1:  # not a chain
                    rows = [*range(at, at + turn.feed), *(at + turn.feed + node for node in path)]
                    first, own = 0, tuple(state[rows] for state in states)
                elif not shared:  # else a prompt's piece would keep the whole pass
                    first, own = 0, tuple(state[at : at + kept].clone() for state in states)
                self._add(turn.seq.id, int(positions[at]), kept, first, own)
            at += turn.feed + len(tree.tokens)

    def _add(self, seq_id: int, position: int, count: int, row: int, states: tuple[Tensor, ...]) -> None:
        """Pieces are joined now and then, so that what whole batches have left is released."""
        with self.lock:
            pieces = self.pieces.setdefault(seq_id, [])
            pieces.append(Piece(position, position + count, row, states))
            if len(pieces) > _PIECES:
                start, stop = pieces[0].position, position + count
                if sum(piece.stop - piece.position for piece in pieces) == stop - start:  # else there is a gap
                    each = zip(*(piece.rows(piece.position, piece.stop) for piece in pieces), strict=True)  # by tap
                    self.pieces[seq_id] = [Piece(start, stop, 0, tuple(map(torch.cat, each)))]

    def has(self, seq_id: int, position: int) -> bool:
        return any(piece.position <= position < piece.stop for piece in reversed(self.pieces.get(seq_id, ())))

    def between(self, seq_id: int, start: int, stop: int, like: Tensor) -> Tensor:
        pieces = self.pieces.get(seq_id, [])
        for piece in reversed(pieces):
            if piece.position <= start and stop <= piece.stop:
                return torch.cat(piece.rows(start, stop), 1)
        features = like.new_zeros(stop - start, like.shape[1])
        for piece in pieces:
            low, high = max(piece.position, start), min(piece.stop, stop)
            if low < high:
                features[low - start : high - start] = torch.cat(piece.rows(low, high), 1)
        return features

    def forget(self, seq_id: int, before: int) -> None:
        with self.lock:
            pieces = self.pieces.get(seq_id, ())
            if pieces:
                self.pieces[seq_id] = [piece for piece in pieces if piece.stop > before]

    def drop(self, seq_id: int) -> None:
        with self.lock:
            self.pieces.pop(seq_id, None)

    def retain(self, live: Set[int]) -> None:
        if len(self.pieces) > _SEQUENCES:
            for seq_id in self.pieces.keys() - live:
                self.drop(seq_id)


class StreamFeatures(FeatureCache):
    """Reads the hidden states that the target's passes leave in the slots of their rows (`Plane.streams`).

    Nothing is copied and nothing is missing; a slot's next owner overwrites it.
    """

    def __init__(self, taps: tuple[int, ...], cache: Cache, plane: Plane) -> None:
        self.cache, self.streams = cache, [plane.streams[tap] for tap in taps]  # [S, H] each
        if all(stream.is_cpu and stream.dtype is torch.float32 for stream in self.streams):
            self._addresses = array("q", [*ops.addresses_of(*self.streams), 0])
            self.in_slots = self._addresses.buffer_info()[0]

    def has(self, seq_id: int, position: int) -> bool:
        return True

    def between(self, seq_id: int, start: int, stop: int, like: Tensor) -> Tensor:
        row = self.cache.rows.get(seq_id)
        if row is None or len(row.slots) < stop:  # the sequence ended while another thread was reading it
            return like.new_zeros(stop - start, like.shape[1])
        taken: list[int] = row.slots[start:stop]
        if taken and taken == list(range(taken[0], taken[0] + len(taken))):  # nothing but a copy, as a rule
            return torch.cat([stream[taken[0] : taken[-1] + 1] for stream in self.streams], 1).to(like.dtype)
        slots = torch.tensor(taken).to(like.device)  # [m]
        return torch.cat([stream[slots] for stream in self.streams], 1).to(like.dtype)  # [m, taps * H]


class HeadBatch(BatchBuilder):
    """Rows of a head: each has the token after its position. Masks have no token and no feature."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self.masked: list[bool] = []

    def committed(self, seq: Sequence, start: int, stop: int, want: bool = False) -> None:
        """Committed rows start … stop-1; with `want`, the last one's scores are needed."""
        row, count = self.cache.rows[seq.id], stop - start
        self.owners += [seq] * count
        self.tokens += seq.tokens[start + 1 : stop + 1]
        self.positions += range(start, stop)
        self.slots += row.slots[start:stop]
        self.lines += [row.line] * count
        self.context += range(start + 1, stop + 1)
        self.tails += [[]] * count
        self.masked += [False] * count
        if want:
            self.want.append(len(self.tokens) - 1)

    def drafted(self, seq: Sequence, token: int, path: list[int]) -> None:
        """A wanted row behind the committed ones, in the last of these scratch slots (by index); it sees the others."""
        self._behind(seq, token, self.scratch(seq, path), masked=False)

    def masks(self, seq: Sequence, count: int, slots: list[int] | None = None) -> None:
        """Wanted masks behind the committed rows, in these slots; by default in the sequence's own scratch slots."""
        slots = self.scratch(seq, range(count)) if slots is None else slots
        for j in range(count):
            self._behind(seq, 0, slots[: j + 1], masked=True)

    def _behind(self, seq: Sequence, token: int, tail: list[int], masked: bool) -> None:
        n = len(seq.tokens)
        self._add(seq, token, n - 2 + len(tail), tail[-1], n - 1, tail)
        self.masked.append(masked)
        self.want.append(len(self.tokens) - 1)

    def scratch(self, seq: Sequence, indices: list[int] | range) -> list[int]:
        """Scratch slot 0 is the one of the last committed token, which has no committed row yet; then spare ones."""
        row, last = self.cache.rows[seq.id], len(seq.tokens) - 1
        return [row.slots[last] if index == 0 else row.spare[index - 1] for index in indices]


class CommittedRows:
    """Feeds a head with the committed rows that its plane lacks, and the target's features there."""

    def __init__(
        self,
        head: Head,
        cache: Cache,
        plane: Plane,
        features: FeatureCache,
        seq_id: Callable[[Sequence], int] = lambda seq: seq.id,  # under which `features` has a sequence
    ) -> None:
        self.head, self.cache, self.plane, self.features, self.seq_id = head, cache, plane, features, seq_id
        width = head.config.target_hidden_size * len(head.config.taps)
        self.blank = torch.empty(0, width, dtype=head.stream, device=head.device)  # [0, taps * H]
        self.tokens: dict[int, int] = {}  # slot -> the token that its committed row was last fed with

    def ready(self, seq: Sequence) -> bool:
        """Whether the feature that a draft begins with is there."""
        last = len(seq.tokens) - 2
        return last >= 0 and self.features.has(self.seq_id(seq), last)

    def read(self, seqs: list[Sequence], masks: list[int]) -> tuple[Tensor, Tensor]:
        """Feed committed rows, and masks[i] masks behind them: the wanted rows' scores [R, D] and outputs [R, H]."""
        packed, starts = self._pack(seqs, masks, _FEW)
        features = self._hidden(seqs, starts, masks)
        masked = torch.tensor(packed.masked) if any(packed.masked) else None  # [T]
        scores, outputs = self.head.read(rows_of(packed), self.plane, features, masked)
        self._advance_all(seqs)
        return scores, outputs[packed.want]

    def chains(self, seqs: list[Sequence], budgets: list[int], floors: Listing[float]) -> list[Chain]:
        """Feed committed rows and draft after each, as `Head.chains` does."""
        masks = [0] * len(seqs)
        packed, starts = self._pack(seqs, masks, CHUNK)
        in_slots = self.features.in_slots if self.head.reads_slots else 0
        features = in_slots or self._hidden(seqs, starts, masks)
        slots = [packed.scratch(seq, range(budget - 1)) for seq, budget in zip(seqs, budgets, strict=True)]
        drafted = self.head.chains(rows_of(packed), self.plane, features, slots, budgets, floors)
        self._advance_all(seqs)
        return drafted

    def _pack(self, seqs: list[Sequence], masks: list[int], most: int) -> tuple[HeadBatch, list[int]]:
        """The last committed rows of each that the plane lacks, `most` at most, with masks behind them; and the first
        of them. Those before are fed."""
        packed, starts = HeadBatch(self.cache), [self._catch_up(seq, most) for seq in seqs]
        for seq, start, more in zip(seqs, starts, masks, strict=True):
            packed.committed(seq, start, len(seq.tokens) - 1, want=True)
            if more:
                packed.masks(seq, more)
        return packed, starts

    def _hidden(self, seqs: list[Sequence], starts: list[int], masks: list[int]) -> Tensor:
        """The target's hidden states in these rows [T, taps * H]; zeros for masks."""
        features = []
        for seq, start, more in zip(seqs, starts, masks, strict=True):
            features.append(self.features.between(self.seq_id(seq), start, len(seq.tokens) - 1, self.blank))
            if more:
                features.append(self.blank.new_zeros(more, self.blank.shape[1]))
        return features[0] if len(features) == 1 else torch.cat(features)

    def _advance_all(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.advance(seq, len(seq.tokens) - 1)

    def advance(self, seq: Sequence, rows: int) -> None:
        """The plane now holds this many committed rows."""
        before, slots = self.plane.holds(seq.id), self.cache.rows[seq.id].slots
        for p in range(before, rows):
            self.tokens[slots[p]] = seq.tokens[p + 1]
        self.plane.advance(seq.id, rows)
        self.features.forget(self.seq_id(seq), rows - 1)  # the last row may be fed once more

    def _catch_up(self, seq: Sequence, most: int) -> int:
        """Feed all but the last rows that the plane lacks, `most` at most; returns where the rest begins."""
        start, stop = self.cache.sync(seq, self.plane), len(seq.tokens) - 1
        slots, seq_id = self.cache.rows[seq.id].slots, self.seq_id(seq)
        while start < stop and not self.features.has(seq_id, start):
            if self.tokens.get(slots[start]) != seq.tokens[start + 1]:
                break
            start += 1  # a sequence that shares the slot has fed this row, with its feature
        start = min(start, stop - 1)
        while stop - start > most:
            packed, end = HeadBatch(self.cache), min(start + CHUNK, stop - 1)
            packed.committed(seq, start, end)
            self.head.keep(rows_of(packed), self.plane, self.features.between(seq_id, start, end, self.blank))
            self.advance(seq, end)
            start = end
        return start
