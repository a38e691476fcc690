"""Which sequences run in a step: admission, chunked prefill, preemption.

There are no prefill and decode phases. A sequence has pending tokens (those whose K/V the target does not hold); a turn
feeds some of them. When none stays pending, the sequence gets a verdict in the same pass.

Preemption frees a sequence's slots and puts it first in the queue; its tokens are the truth, so nothing is lost, and
the rows that are fed again come out bit-identical. The scheduler knows lengths and slots, not what tokens mean.
"""

from __future__ import annotations

from collections import deque

from ..types import Sequence, Turn
from .cache import Cache, Plane


class Scheduler:
    """First come, first served; the latest sequence is preempted when slots run out."""

    def __init__(self, cache: Cache, plane: Plane, max_batch: int, max_rows: int) -> None:
        self.cache, self.plane = cache, plane
        self.max_batch, self.max_rows = max_batch, max_rows
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

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
        pending = {seq.id: len(seq.tokens) - self.cache.sync(seq, self.plane) for seq in self.running}
        for seq in sorted(self.running, key=lambda s: pending[s.id] > 1):
            feed = min(pending[seq.id], room)
            if feed:
                turns.append(Turn(seq, feed, whole=feed == pending[seq.id]))
                room -= feed
        return turns

    def fit(self, turns: list[Turn]) -> list[Turn]:
        """Reserve slots for every turn; where there are too few, first drop drafts, then preempt the latest."""
        fitted: list[Turn] = []
        preempted: set[int] = set()
        for turn in turns:
            if turn.seq.id in preempted:
                continue
            held = self.plane.holds(turn.seq.id)
            while not self.cache.reserve(turn.seq, held + turn.feed, turn.budget):
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

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_batch:
            seq = self.waiting[0]
            if self.running and self.cache.available < len(seq.tokens) + 1:
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
