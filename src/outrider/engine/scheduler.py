"""Which sequences run in a step: admission, chunked prefill, preemption.

There are no prefill and decode phases. A sequence has pending tokens (those whose K/V the target does not hold); a turn
feeds some of them. When none stays pending, the sequence gets a verdict in the same pass.

Where steps are in flight, a sequence's length is known only within bounds: each of them adds at least one token and at
most its draft and one. Slots are reserved for the most, and a sequence that ends at the least takes no further turn.

Preemption frees a sequence's slots and puts it first in the queue; its tokens are the truth, so nothing is lost, and
the rows that are fed again come out bit-identical. The scheduler knows lengths and slots, not what tokens mean.
"""

from __future__ import annotations

from collections import deque

from ..types import Sequence, Turn
from .cache import Cache, Plane

NOTHING = (0, 0)


class Scheduler:
    """First come, first served; the latest sequence is preempted when slots run out."""

    def __init__(
        self, cache: Cache, plane: Plane, max_batch: int, max_rows: int, prompt_rows: int | None = None
    ) -> None:
        """max_rows: of a step; prompt_rows: of one in which no sequence waits for its next token."""
        self.cache, self.plane = cache, plane
        self.max_batch, self.max_rows, self.prompt_rows = max_batch, max_rows, prompt_rows or max_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._ahead: dict[int, tuple[int, int]] = {}  # sequence -> tokens that the steps in flight add: least, most

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence, keep: bool) -> None:
        """Drop a finished or cancelled sequence; with `keep` its prefix stays readable for later prompts."""
        if seq in self.running:
            self.running.remove(seq)
            self.cache.free(seq, keep)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def pick(self) -> list[Turn]:
        """The turns of the next step: sequences with one pending token first, then chunks of prompts."""
        self._admit()
        decoding, prompts = list[Turn](), list[tuple[Sequence, int]]()
        for seq in self.running:
            least, _ = self._ahead.get(seq.id, NOTHING)
            if least and seq.room <= least:
                continue
            # Of a sequence whose prompt was fed in a step in flight, the token that the host has not read is pending.
            pending = 1 if least else len(seq.tokens) - self.cache.sync(seq, self.plane)
            if pending <= 1:
                decoding.append(Turn(seq, 1, True))
            else:
                prompts.append((seq, pending))
        turns = decoding[: self.max_rows]
        room = self.max_rows - len(turns) if turns else self.prompt_rows
        for seq, pending in prompts:
            feed = min(pending, room)
            if feed:
                turns.append(Turn(seq, feed, whole=feed == pending))
                room -= feed
        return turns

    def fit(self, turns: list[Turn]) -> list[Turn]:
        """Reserve slots for every turn; where there are too few, first drop drafts, then preempt the latest."""
        fitted: list[Turn] = []
        preempted: set[int] = set()
        for turn in turns:
            if turn.seq.id in preempted:
                continue
            while not self._reserve(turn):
                if turn.budget:
                    turn = turn.allow(0)
                    continue
                victim = self._preempt()
                preempted.add(victim.id)
                fitted = [t for t in fitted if t.seq is not victim]
                if victim is turn.seq:
                    break
            else:
                fitted.append(turn)
        return fitted

    def _reserve(self, turn: Turn) -> bool:
        seq = turn.seq
        if turn.whole:
            nodes = min(self.ahead(seq)[1] + turn.budget, max(seq.room - 1, 0))
            return self.cache.reserve(seq, len(seq.tokens), nodes)
        return self.cache.reserve(seq, self.plane.holds(seq.id) + turn.feed, 0)

    def ahead(self, seq: Sequence) -> tuple[int, int]:
        """Tokens that the steps in flight add to a sequence, at least and at most."""
        return self._ahead.get(seq.id, NOTHING)

    def launched(self, turns: list[Turn]) -> None:
        """A step is in flight. What it feeds counts as held from now on: later steps run after it."""
        for turn in turns:
            seq = turn.seq
            if turn.whole:
                least, most = self.ahead(seq)
                self._ahead[seq.id] = least + 1, most + turn.budget + 1
                # Its last token is held too, but its logits are not read.
                self.plane.advance(seq.id, len(seq.tokens) - 1)
            else:
                self.plane.advance(seq.id, self.plane.holds(seq.id) + turn.feed)

    def landed(self, turns: list[Turn]) -> None:
        """The oldest step in flight has been read."""
        for turn in turns:
            if turn.whole:
                least, most = self._ahead.pop(turn.seq.id)
                if least > 1:
                    self._ahead[turn.seq.id] = least - 1, most - turn.budget - 1

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            seq = self.waiting[0]
            if self.running and not self.cache.has(self.cache.needed(seq) + 1):
                return  # it would only be preempted again
            self.waiting.popleft()
            self.running.append(seq)
            seq.stats.reused = max(seq.stats.reused, min(self.cache.open(seq), seq.prompt_len))

    def _preempt(self) -> Sequence:
        victim = self.running.pop()
        self.cache.free(victim)
        victim.stats.preempted += 1
        self.waiting.appendleft(victim)
        return victim
