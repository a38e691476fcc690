"""What a trained head is fed with: committed tokens, the target's hidden states beside them, then guesses.

Head row p has the token at p + 1 and the feature of position p, lives in the slot of position p, and says what comes at
p + 2. With n committed tokens, rows 0 … n-2 are true; guesses begin with what row n-2 says:

    positions   0 ................ n-2 │ n-1        │ spare
    rows        [ held ][   fed now   ] │ 1st guess │ later guesses
                  true rows             │ scratch: fed again when the target has spoken

A prefix that another sequence has fed is used as it is (its last row may have another token: the price is a little
acceptance). Features that nobody has seen are zeros. It knows rows and states, not what is drafted from them.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends.rows import rows_of
from ...engine.batch import BatchBuilder
from ...engine.cache import Cache, Plane
from ...types import Sequence, Step
from .._rollout import CHUNK

if TYPE_CHECKING:
    from .network import Head

_MOST_KEPT = 256  # sequences whose end nobody has told us
_PIECES = 32  # steps whose features a sequence keeps apart


@dataclass
class Features:
    """The target's hidden states at committed positions, until the head has been fed with them.

    Whoever observes and whoever feeds may be two threads.
    """

    taps: tuple[int, ...]
    pieces: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)  # sequence -> (position, [m, taps * H])
    lock: Lock = field(default_factory=Lock)  # for whoever changes the pieces

    def observe(self, step: Step) -> None:
        """Copy what the step has shown of positions that are committed now."""
        packing, at, hidden = step.batch, 0, step.output.hidden
        if not hidden:  # nobody has asked for it
            return
        positions = step.rows.positions.tolist() if packing is None else packing.positions
        sizes = [turn.feed + len(tree.tokens) for turn, tree in zip(step.turns, step.draft.trees, strict=True)]
        shared = None
        if all(turn.feed == 1 for turn in step.turns):  # one copy for all, and each looks at its part of it
            shared = torch.cat([hidden[tap] for tap in self.taps], 1).split(sizes)  # B x [n, taps * H]
        for i, (turn, verdict) in enumerate(zip(step.turns, step.verdicts, strict=True)):
            path = [] if verdict is None else verdict.path
            if turn.seq.speculate and not turn.seq.done:
                kept = turn.feed + len(path)
                rows: Any = slice(0, kept)  # a chain: no need to look for them one by one
                if path and path[-1] != len(path) - 1:
                    rows = [*range(turn.feed), *(turn.feed + node for node in path)]
                if shared is not None:
                    shown = shared[i] if sizes[i] == kept else shared[i][rows]
                else:
                    shown = torch.cat([hidden[tap][at : at + sizes[i]][rows] for tap in self.taps], 1)
                self._keep(turn.seq.id, positions[at], shown)
            at += sizes[i]

    def _keep(self, name: int, position: int, shown: Tensor) -> None:
        """[m, taps * H]. Now and then the pieces become one, so that nobody holds on to the rows of others for long."""
        with self.lock:
            pieces = self.pieces.setdefault(name, [])
            pieces.append((position, shown))
            if len(pieces) > _PIECES:
                start, stop = pieces[0][0], position + shown.shape[0]
                if sum(piece.shape[0] for _, piece in pieces) == stop - start:  # else something was missed between them
                    self.pieces[name] = [(start, self.between(name, start, stop, shown))]

    def known(self, name: int, position: int) -> bool:
        return any(at <= position < at + piece.shape[0] for at, piece in reversed(self.pieces.get(name, ())))

    def between(self, name: int, start: int, stop: int, like: Tensor) -> Tensor:
        """Hidden states of positions start … stop-1 [m, taps * H]; zeros where nothing was seen."""
        pieces = self.pieces.get(name, [])
        if len(pieces) == 1 and pieces[0][0] <= start and stop <= pieces[0][0] + pieces[0][1].shape[0]:
            return pieces[0][1][start - pieces[0][0] : stop - pieces[0][0]]
        found = like.new_zeros(stop - start, like.shape[1])
        for at, piece in pieces:
            low, high = max(at, start), min(at + piece.shape[0], stop)
            if low < high:
                found[low - start : high - start] = piece[low - at : high - at]
        return found

    def forget(self, name: int, before: int) -> None:
        """The head has been fed with these; the one of the last row may be asked for once more."""
        with self.lock:
            pieces = self.pieces.get(name, ())
            if pieces:
                self.pieces[name] = [(at, piece) for at, piece in pieces if at + piece.shape[0] > before]

    def drop(self, name: int) -> None:
        with self.lock:
            self.pieces.pop(name, None)

    def tidy(self, alive: Set[int]) -> None:
        """Not everybody's end is told."""
        if len(self.pieces) > _MOST_KEPT:
            for name in self.pieces.keys() - alive:
                self.drop(name)


class Kept:
    """The same where the target's passes leave their streams in the slots of their rows: nothing is ever missed."""

    def __init__(self, taps: tuple[int, ...], cache: Cache, plane: Plane) -> None:
        self.cache, self.streams = cache, [plane.streams[tap] for tap in taps]  # [S, H] each

    def observe(self, step: Step) -> None:
        """Nothing to copy."""

    def known(self, name: int, position: int) -> bool:
        """Whoever asks knows that the target has been there."""
        return True

    def between(self, name: int, start: int, stop: int, like: Tensor) -> Tensor:
        row = self.cache.rows.get(name)
        if row is None or len(row.slots) < stop:  # it ended while somebody else was still at it
            return like.new_zeros(stop - start, like.shape[1])
        slots = torch.tensor(row.slots[start:stop]).to(like.device)  # [m]
        return torch.cat([stream[slots] for stream in self.streams], 1).to(like.dtype)  # [m, taps * H]

    def forget(self, name: int, before: int) -> None:
        """A slot's next owner overwrites it."""

    def drop(self, name: int) -> None:
        """The same."""

    def tidy(self, alive: Set[int]) -> None:
        """Nothing is kept by name."""


class HeadBatch(BatchBuilder):
    """Rows of a head: each has the token after its position."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self.masked: list[bool] = []

    def true(self, seq: Sequence, start: int, stop: int, want: bool) -> None:
        """Rows start … stop-1 of what is committed."""
        slots = self.cache.rows[seq.id].slots
        for p in range(start, stop):
            self._add(seq, seq.tokens[p + 1], p, slots[p], p + 1, [])
        self.masked += [False] * (stop - start)
        if want:
            self.want.append(len(self.tokens) - 1)

    def guessed(self, seq: Sequence, token: int, places: list[int], masked: bool = False) -> None:
        """A row after the last true one, in the last of these places; it sees those before it."""
        row, n = self.cache.rows[seq.id], len(seq.tokens)
        tail = [row.slots[n - 1] if place == 0 else row.spare[place - 1] for place in places]
        self._add(seq, token, n - 2 + len(places), tail[-1], n - 1, tail)
        self.masked.append(masked)
        self.want.append(len(self.tokens) - 1)


class TrueRows:
    """Feeds a head with what is committed: the rows that its plane lacks, and what the target saw there."""

    def __init__(
        self,
        head: Head,
        cache: Cache,
        plane: Plane,
        features: Features | Kept,
        name: Callable[[Sequence], int] = lambda seq: seq.id,  # under which features know a sequence
    ) -> None:
        self.head, self.cache, self.plane, self.features, self.name = head, cache, plane, features, name
        width = head.config.target_hidden_size * len(head.config.taps)
        self.blank = torch.empty(0, width, dtype=head.stream, device=head.device)  # [0, taps * H]
        self.tokens: dict[int, int] = {}  # slot -> the token that its true row was last fed with

    def known(self, seq: Sequence) -> bool:
        """Whether the state is there that guesses begin with."""
        last = len(seq.tokens) - 2
        return last >= 0 and self.features.known(self.name(seq), last)

    def read(self, seqs: list[Sequence], masks: list[int]) -> tuple[Tensor, Tensor]:
        """Feed what is committed, and masks behind it: the wanted rows' scores [R, D] and outputs [R, H]."""
        packed, features = HeadBatch(self.cache), []
        for seq, more in zip(seqs, masks, strict=True):
            start, stop = self._catch_up(seq), len(seq.tokens) - 1
            packed.true(seq, start, stop, want=True)
            features.append(self.features.between(self.name(seq), start, stop, self.blank))
            for j in range(more):
                packed.guessed(seq, 0, list(range(j + 1)), masked=True)
            if more:
                features.append(self.blank.new_zeros(more, self.blank.shape[1]))
        masked = torch.tensor(packed.masked) if any(packed.masked) else None  # [T]
        scores, outputs = self.head.read(rows_of(packed), self.plane, torch.cat(features), masked)
        for seq in seqs:
            self.fed(seq, len(seq.tokens) - 1)
        return scores, outputs[packed.want]

    def fed(self, seq: Sequence, rows: int) -> None:
        """The plane holds this many true rows now."""
        before, slots = self.plane.holds(seq.id), self.cache.rows[seq.id].slots
        for p in range(before, rows):
            self.tokens[slots[p]] = seq.tokens[p + 1]
        self.plane.advance(seq.id, rows)
        self.features.forget(self.name(seq), rows - 1)

    def _catch_up(self, seq: Sequence) -> int:
        """Feed all but the last chunk of the true rows that the plane lacks; returns where the rest begins."""
        start, stop = self.cache.sync(seq, self.plane), len(seq.tokens) - 1
        slots, name = self.cache.rows[seq.id].slots, self.name(seq)
        while start < stop and not self.features.known(name, start):
            if self.tokens.get(slots[start]) != seq.tokens[start + 1]:
                break
            start += 1  # somebody who shares the slot has fed it, and knew its feature
        start = min(start, stop - 1)
        while stop - start > CHUNK:
            packed = HeadBatch(self.cache)
            packed.true(seq, start, start + CHUNK, want=False)
            shown = self.features.between(name, start, start + CHUNK, self.blank)
            self.head.read(rows_of(packed), self.plane, shown)
            self.fed(seq, start + CHUNK)
            start += CHUNK
        return start
