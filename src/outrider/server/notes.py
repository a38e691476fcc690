"""One sequence's part of each step, for its own client's trace: copied on the engine's thread, computed beside it."""

from __future__ import annotations

import threading
import time

from ..engine.trace import Line, Note
from ..types import Sequence, Step

MAX_PENDING_ROWS = 64  # rows of logits that may wait to become trace lines, per sequence


class StepNotes:
    """Copies one sequence's part of each step. It sees no other sequence.

    The engine's thread only copies (`note`); another one computes lines (`line`). Where that is slower than the steps,
    logits are dropped, and the lines lack what the target computed.
    """

    def __init__(self, seq: Sequence, level: str) -> None:
        self.level = level
        seq.shows_logits = level == "full"
        self.own_seconds = 0.0  # of the engine's thread, spent here
        self._lock, self._pending_rows = threading.Lock(), 0

    def note(self, step: Step, i: int) -> Note | None:
        """This step of the i-th sequence; None while its prompt is prefilled."""
        verdict = step.verdicts[i]
        if verdict is None:
            return None
        begin = time.perf_counter()
        full = self.level == "full" and self._pending_rows < MAX_PENDING_ROWS
        note = Note(step, i, verdict, full, keep=True, own=self.own_seconds)
        with self._lock:
            self._pending_rows += note.rows
        self.own_seconds += time.perf_counter() - begin
        return note

    def line(self, note: Note) -> Line:
        with self._lock:
            self._pending_rows -= note.rows
        return note.line()
