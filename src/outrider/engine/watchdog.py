"""Which of a drafter's verbs is running, and since when.

Nothing can interrupt a call that does not come back. Whoever watches from another thread may give it up: then it never
comes back into the step it left, whatever it does later, and its thread ends. Watching costs less than a microsecond.
"""

from __future__ import annotations

import ctypes
import threading
import time
from types import TracebackType


class GivenUp(BaseException):
    """Ends a thread that was left behind in a drafter. Not an Exception: no drafter catches it by accident."""


class Watchdog:
    """`with watchdog("draft"): …` on the engine's thread; `stuck` and `give_up` from another one."""

    def __init__(self) -> None:
        self._verb, self._since, self._given_up = "", 0.0, False
        self._lock = threading.Lock()  # a call is given up, or has come back: never both

    def __call__(self, verb: str) -> Watchdog:
        self._since, self._verb = time.monotonic(), verb
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._verb = ""
            if self._given_up:
                raise GivenUp

    def give_up(self, seconds: float) -> str:
        """Leave a call behind that has been running for longer than this; which verb it was, empty if there is none."""
        with self._lock:
            stuck = bool(self._verb) and time.monotonic() - self._since > seconds
            self._given_up = self._given_up or stuck
            return self._verb if stuck else ""


def end_thread(thread: threading.Thread) -> None:
    """End a thread that runs Python at its next instruction; one that waits in C ends when that is over, if ever."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(GivenUp))
