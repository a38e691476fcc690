"""Pauses, in steps, between trials of something that does not pay. Each failed trial lengthens the next pause."""

from __future__ import annotations

FIRST_PAUSE, LONGEST_PAUSE = 24, 384  # steps


class Backoff:
    """A trial is due after `pause` idle steps. Each trial doubles the pause, up to LONGEST_PAUSE."""

    def __init__(self) -> None:
        self.idle, self.pause = 0, FIRST_PAUSE

    @property
    def due(self) -> bool:
        return self.idle >= self.pause

    def tried(self) -> None:
        """A trial starts."""
        self.idle, self.pause = 0, min(2 * self.pause, LONGEST_PAUSE)
