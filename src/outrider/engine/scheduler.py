"""Which sequences run in a step: admission, chunked prefill, preemption.

There are no prefill and decode phases. A sequence has pending tokens (those whose K/V the target does not hold); a turn
feeds some of them. When none stays pending, the sequence gets a verdict in the same pass.

Where steps are in flight, a sequence's length is known only within bounds: each of them adds at least one token and at
most its draft and one. Slots are reserved for the most, and a sequence that ends at the least takes no further turn.

Preemption frees a sequence's slots and puts it first in the queue; its tokens are the truth, so nothing is lost, and
the rows that are fed again come out bit-identical. The scheduler knows lengths and slots, not what tokens mean.
"""

from __future__ import annotations

from collections import Counter, deque

from ..types import Sequence, Turn
from .cache import Cache, Plane


class Scheduler:
    """First come, first served; the latest sequence is preempted when slots run out."""

    def __init__(self, cache: Cache, plane: Plane, max_batch: int, max_rows: int) -> None:
        self.cache, self.plane = cache, plane
        self.max_batch, self.max_rows = max_batch, max_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._least: Counter[int] = Counter()  # sequence -> tokens that the steps in flight add at least
        self._most: Counter[int] = Counter()  # and at most

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
        room, turns = self.max_rows, []
        going = [seq for seq in self.running if not self._least[seq.id] or seq.room > self._least[seq.id]]
        pending = {seq.id: self._pending(seq) for seq in going}
        for seq in sorted(going, key=lambda s: pending[s.id] > 1):
            feed = min(pending[seq.id], room)
            if feed:
                turns.append(Turn(seq, feed, whole=feed == pending[seq.id]))
                room -= feed
        return turns

    def _pending(self, seq: Sequence) -> int:
        """Tokens that the target has not read. Of a sequence whose prompt was fed in a step in flight it is the one
        that the host has not read yet."""
        return 1 if self._least[seq.id] else max(len(seq.tokens) - self.cache.sync(seq, self.plane), 1)

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
        seq, ahead = turn.seq, self._most[turn.seq.id]
        if turn.whole:
            return self.cache.reserve(seq, len(seq.tokens), min(ahead + turn.budget, max(seq.room - 1, 0)))
        return self.cache.reserve(seq, self.plane.holds(seq.id) + turn.feed, 0)

    def ahead(self, seq: Sequence) -> tuple[int, int]:
        """Tokens that the steps in flight add to a sequence, at least and at most."""
        return self._least[seq.id], self._most[seq.id]

    def launched(self, turns: list[Turn]) -> None:
        """A step is in flight. What it feeds counts as held from now on: later steps run after it."""
        for turn in turns:
            seq = turn.seq
            if turn.whole:
                self._least[seq.id] += 1
                self._most[seq.id] += turn.budget + 1
                self.plane.advance(
                    seq.id, len(seq.tokens) - 1
                )  # its last token is held too, but its logits are not read
            else:
                self.plane.advance(seq.id, self.plane.holds(seq.id) + turn.feed)

    def landed(self, turns: list[Turn]) -> None:
        """The oldest step in flight has been read."""
        for turn in turns:
            if turn.whole:
                for counter, tokens in ((self._least, 1), (self._most, turn.budget + 1)):
                    counter[turn.seq.id] -= tokens
                    if counter[turn.seq.id] <= 0:
                        del counter[turn.seq.id]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            seq = self.waiting[0]
            if self.running and self.cache.available < self.cache.needed(seq) + 1:
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
