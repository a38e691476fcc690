"""One engine for several threads: their sequences run in one batch, and one of the threads steps it for all.

Promise: a call returns when its own sequences are where it wants them, whoever made the steps. No thread is started:
the first that waits becomes the one that steps, until its own sequences have ended; then the next takes over. A failing
step fails the calls whose sequences were running; an interrupted one (Ctrl-C) only the call that it interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence as Listing
from typing import Protocol

from ..types import Sequence
from .step import Engine


class StepLock:
    """At most one thread steps the engines of a target: they share its buffers."""

    def __init__(self, enter_thread: Callable[[], None]) -> None:
        """`enter_thread` prepares a thread that has not stepped last: OpenMP and CUDA keep settings for each."""
        self.changed = threading.Condition()  # after every step
        self.stepping = False
        self._enter_thread, self._last = enter_thread, threading.get_ident()

    def take(self) -> None:
        """With `changed` held, and nobody stepping: from now on this thread steps."""
        self.stepping = True
        if self._last != threading.get_ident():
            self._last = threading.get_ident()
            self._enter_thread()

    def release(self) -> None:
        with self.changed:
            self.stepping = False
            self.changed.notify_all()


class EngineOwner(Protocol):
    """Whoever builds the engine, and a new one after a step that did not end."""

    @property
    def engine(self) -> Engine: ...

    def restart(self, keep: Listing[Sequence] = ()) -> None:
        """A new engine. What was running is cancelled, except `keep`, which goes on."""
        ...


class SharedEngine:
    def __init__(self, owner: EngineOwner, lock: StepLock) -> None:
        self._owner, self.lock = owner, lock
        self._arrived: list[Sequence] = []  # since the last step
        self._cancelled: list[Sequence] = []
        self._errors: dict[int, Exception] = {}  # sequences that another thread's step has failed

    def run(self, seqs: Listing[Sequence]) -> None:
        """Run these to their end."""
        self.add(seqs)
        try:
            self.wait(seqs, lambda: all(seq.done for seq in seqs))
        except BaseException:
            self.cancel(seqs)
            raise

    def add(self, seqs: Iterable[Sequence]) -> None:
        """They take part from the next step on."""
        with self.lock.changed:
            self._arrived += seqs

    def cancel(self, seqs: Iterable[Sequence]) -> None:
        """Their slots are free at once, or after the step that another thread is making."""
        with self.lock.changed:
            self._cancelled += [seq for seq in seqs if not seq.done]
            if not self.lock.stepping:
                self._exchange()

    def wait(self, seqs: Listing[Sequence], until: Callable[[], bool]) -> None:
        """Until this is true of the caller's own sequences."""
        while not until():
            with self.lock.changed:
                self.lock.changed.wait_for(lambda: until() or not self.lock.stepping)
                if until():
                    break
                self.lock.take()
            try:
                self._step()
            except BaseException as error:
                self._recover(error, seqs)
                raise
            finally:
                self.lock.release()
        errors = [self._errors.pop(seq.id) for seq in seqs if seq.id in self._errors]
        if errors:
            raise errors[0]

    def _step(self) -> None:
        with self.lock.changed:
            self._exchange()
        if self._owner.engine.busy:
            self._owner.engine.step()

    def _exchange(self) -> None:
        """Between two steps, with the lock held."""
        engine = self._owner.engine
        while self._arrived:
            engine.add(self._arrived.pop(0))
        while self._cancelled:
            engine.cancel(self._cancelled.pop(0))

    def _recover(self, error: BaseException, mine: Listing[Sequence]) -> None:
        """The engine's state is unknown: others' sequences go on in a new one, unless the step itself has failed."""
        engine, own = self._owner.engine, {seq.id for seq in mine}
        running = (*engine.scheduler.running, *engine.scheduler.waiting)
        others = [seq for seq in running if seq.id not in own and not seq.done]
        if isinstance(error, Exception):
            self._errors |= {seq.id: error for seq in others}
            others = []
        self._owner.restart(others)
