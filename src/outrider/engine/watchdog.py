"""Which of a drafter's verbs is running, and since when.

A call that never returns cannot be interrupted from Python. Another thread may abandon it (`give_up`): if the call ever
returns, `GivenUp` ends its thread before it touches the step again. Watching costs less than a microsecond per call.
"""

from __future__ import annotations

import ctypes
import threading
import time


class GivenUp(BaseException):
    """Ends a thread that hangs in a drafter's call. Not an Exception, so that no drafter catches it by accident."""


class Watchdog:
    """`with watchdog("draft"): …` on the engine's thread; `give_up` from another one."""

    def __init__(self) -> None:
        self._verb, self._since, self._given_up = "", 0.0, False
        self._lock = threading.Lock()  # a call is given up, or has returned: never both

    def __call__(self, verb: str) -> Watchdog:
        self._since, self._verb = time.monotonic(), verb
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._verb = ""
            if self._given_up:
                raise GivenUp

    def give_up(self, seconds: float) -> str:
        """Abandon a call that has been running for longer than this. Returns its verb; empty if there is none."""
        with self._lock:
            stuck = bool(self._verb) and time.monotonic() - self._since > seconds
            self._given_up = self._given_up or stuck
            return self._verb if stuck else ""


def end_thread(thread: threading.Thread) -> None:
    """End a thread at its next Python instruction; one that is blocked in C ends when that call returns, if ever."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(GivenUp))
