"""One engine for several threads: their sequences run in one batch, and one of the threads steps it for all.

Promise: a call gets what it waits for as soon as a step, whoever made it, has brought it; sequences are read only
between steps. No thread is started: the first that waits makes the steps until it has what it waits for, then the next
takes over. A failing step fails the calls whose sequences were running; an interrupted one (Ctrl-C) only the call that
it interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence as Listing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..types import Sequence
from .step import Engine

T = TypeVar("T")


class StepLock:
    """At most one thread steps the engines of a target: they share its buffers."""

    def __init__(self, enter_thread: Callable[[], None]) -> None:
        """`enter_thread` prepares a thread that has not stepped last: OpenMP and CUDA keep settings for each."""
        self.changed = threading.Condition()  # after every step
        self.stepping = False
        self._enter_thread, self._last = enter_thread, threading.get_ident()

    def take(self) -> None:
        """Called with `changed` held while no thread steps: this thread steps from now on."""
        self.stepping = True
        if self._last != threading.get_ident():
            self._last = threading.get_ident()
            self._enter_thread()


class EngineOwner(Protocol):
    """Builds the engine, and a new one after a step that failed or was interrupted."""

    @property
    def engine(self) -> Engine: ...

    def restart(self, keep: Listing[Sequence] = ()) -> None:
        """Build a new engine. What was running is cancelled, except `keep`, which continues."""
        ...


@dataclass(eq=False)
class Call:
    """A thread that waits, and what it gets."""

    seqs: Listing[Sequence]
    poll: Callable[[], Any]  # between steps; None: not yet
    value: Any = None
    error: BaseException | None = None

    @property
    def ready(self) -> bool:
        return self.value is not None or self.error is not None

    def try_now(self) -> None:
        if not self.ready:
            try:
                self.value = self.poll()
            except Exception as error:  # the caller's, not that of the thread that steps
                self.error = error


class SharedEngine:
    def __init__(self, owner: EngineOwner, lock: StepLock) -> None:
        self._owner, self.lock = owner, lock
        self._arrived: list[Sequence] = []  # since the last step
        self._cancelled: list[Sequence] = []
        self._calls: list[Call] = []
        self._failed: dict[int, Exception] = {}  # running sequences of a step that failed, with nobody waiting for them

    def run(self, seqs: Listing[Sequence]) -> None:
        """Run these to their end."""
        self.add(seqs)
        try:
            self.wait(seqs, lambda: all(seq.done for seq in seqs) or None)
        except BaseException:
            self.cancel(seqs)
            raise

    def add(self, seqs: Iterable[Sequence]) -> None:
        """They take part from the next step on."""
        with self.lock.changed:
            self._arrived += seqs

    def cancel(self, seqs: Iterable[Sequence]) -> None:
        """Their slots are free at once, or after the step that another thread is running."""
        with self.lock.changed:
            self._cancelled += seqs
            if not self.lock.stepping:
                self._exchange()

    def wait(self, seqs: Listing[Sequence], poll: Callable[[], T | None]) -> T:
        """Step until `poll()`, which reads the caller's own sequences, returns something; return that."""
        call = Call(seqs, poll)
        with self.lock.changed:
            self._calls.append(call)
        try:
            while not self._is_ready(call):
                self._step_for_all(call)
        finally:
            with self.lock.changed:
                self._calls.remove(call)
        if call.error is not None:
            raise call.error
        value: T = call.value
        return value

    def _is_ready(self, call: Call) -> bool:
        """Whether the call has ended. If not, this thread steps from now on."""
        lock = self.lock
        with lock.changed:
            lock.changed.wait_for(lambda: call.ready or not lock.stepping)
            if not lock.stepping:
                self._fail_calls()
                call.try_now()
            if not call.ready:
                lock.take()
            return call.ready

    def _step_for_all(self, call: Call) -> None:
        try:
            with self.lock.changed:
                self._exchange()
            if self._owner.engine.busy:
                self._owner.engine.step()
        except BaseException as error:
            call.error = error
            self._recover(error, call.seqs)
        finally:
            with self.lock.changed:
                self._fail_calls()
                for waiting in self._calls:
                    waiting.try_now()
                self.lock.stepping = False
                self.lock.changed.notify_all()

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
            self._failed |= {seq.id: error for seq in others}
            others = []
        self._owner.restart(others)

    def _fail_calls(self) -> None:
        for call in self._calls if self._failed else ():
            errors = [self._failed.pop(seq.id) for seq in call.seqs if seq.id in self._failed]
            call.error = call.error or next(iter(errors), None)
