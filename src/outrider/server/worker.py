"""The one thread that drives the engine. Jobs join and leave between two steps.

Promise: a submitted job gets a delta for every token and its end, or one error. A cancelled job has returned its slots
before the next step. A failing step costs the running choices, not the server; a drafter that hangs costs its speed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence as Listing
from contextlib import suppress
from typing import Any

import torch

from ..engine.trace import Note
from ..engine.watchdog import GivenUp, end_thread
from ..errors import OutriderError
from ..llm import LLM
from ..models.detokenizer import Detokenizer
from ..types import Step
from .errors import ApiError, internal_error, shutting_down
from .jobs import Choice, Delta, FairQueue, Job, Listener

log = logging.getLogger("outrider.server")
STALLED = 60.0  # seconds of one step after which the server is unhealthy


class Worker:
    """Continuous batching: up to the engine's `max_batch` choices run, up to `queue` wait."""

    def __init__(
        self, llm: LLM, queue: int = 128, listeners: Listing[Listener] = (), drafter_seconds: float = 30.0
    ) -> None:
        self.llm, self.queue, self.listeners = llm, queue, list(listeners)
        self.max_running = llm.config.max_batch
        self.fatal = ""  # why the engine cannot run again
        self._changed = threading.Condition()
        self._waiting: FairQueue[Choice] = FairQueue()
        self._running: dict[int, Choice] = {}  # by sequence id
        self._cancelled: set[Job] = set()  # since the last step
        self._drain_deadline = 0.0  # when running choices are ended; 0: not draining
        self._stopping = False
        self._mean_seconds = 1.0  # per choice, moving average
        self._progress = time.monotonic()  # when the latest step began or ended
        self._drafter_seconds = drafter_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------ from any thread

    def start(self) -> None:
        self._thread.start()
        threading.Thread(target=self._watch_drafter, name="watchdog", daemon=True).start()

    def submit(self, job: Job) -> None:
        """Queue a job, or raise the error that its client gets."""
        with self._changed:
            self.check_capacity(len(job.choices))
            for choice in job.choices:
                self._waiting.put(job.client, choice)
            self._changed.notify()

    def check_capacity(self, choices: int) -> None:
        """Raise the error that so many more choices would get now."""
        with self._changed:
            if self.fatal:
                raise ApiError(503, "The engine could not be restarted after a failure.", "engine_dead")
            if self.draining:
                raise shutting_down()
            busy = len(self._waiting) + len(self._running)
            if busy + choices > self.max_running + self.queue:
                wait = round(self._mean_seconds * (busy - self.max_running + 1) / self.max_running)
                wait = min(max(wait, 1), 60)
                message = f"The queue is full ({busy} answers running or waiting); try again in {wait} s."
                raise ApiError(429, message, "queue_full", retry_after=wait)

    def cancel(self, job: Job) -> None:
        """End what still runs of this job before the next step. Does nothing for a job that has ended."""
        with self._changed:
            if any(not choice.ended for choice in job.choices):
                self._cancelled.add(job)
                self._changed.notify()

    def drain(self, seconds: float) -> None:
        """Accept no more jobs. Running choices may go on for `seconds`, then end with an error."""
        with self._changed:
            self._drain_deadline = time.monotonic() + seconds
            self._changed.notify()

    def stop(self) -> None:
        """End all choices and wait for the thread."""
        with self._changed:
            self._stopping, self._drain_deadline = True, time.monotonic()
            self._changed.notify()
        end = time.monotonic() + STALLED
        while (thread := self._thread).is_alive() and time.monotonic() < end:  # the watchdog may replace it
            thread.join(timeout=0.05)
        self._stopped.set()

    @property
    def draining(self) -> bool:
        return self._drain_deadline > 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def unhealthy(self) -> str:
        """Why this server should be replaced; empty while it is healthy."""
        if self.fatal:
            return self.fatal
        idle = time.monotonic() - self._progress
        return f"The engine has not moved for {idle:.0f} s." if self._running and idle > STALLED else ""

    # ------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        with suppress(GivenUp):  # then another thread drives another engine by now
            torch.set_num_threads(torch.get_num_threads())  # OpenMP keeps the count per calling thread
            if self.llm.device.startswith("cuda"):
                torch.cuda.set_device(self.llm.device)
            self._resume()
            while self._schedule():
                if self._running:
                    self._step()

    def _resume(self) -> None:
        """After another thread was abandoned: send what it did not send, and add its choices to the new engine."""
        for choice in list(self._running.values()):
            self._publish(choice, None)
        for choice in list(self._running.values()):
            choice.started = choice.started or time.monotonic()
            self.llm.engine.add(choice.seq)

    def _schedule(self) -> bool:
        """Between two steps: end cancelled choices, admit waiting ones. Waits while idle; False: stop."""
        with self._changed:
            while not (self._running or self._waiting or self._cancelled or self._stopping):
                self._changed.wait()
            cancelled = set(self._cancelled)
            leaving = self._waiting.remove(lambda choice: choice.job in cancelled)
            leaving += [choice for choice in self._running.values() if choice.job in cancelled]
            expired = self.draining and time.monotonic() >= self._drain_deadline
        for choice in leaving:
            self._end(choice, "cancelled")
        with self._changed:
            self._cancelled -= cancelled  # only now: a thread that replaces this one ends the rest
        if expired:
            self._fail(shutting_down())
        self._admit()
        return not self._stopping

    def _admit(self) -> None:
        with self._changed:
            free = self.max_running - len(self._running)
            admitted = [self._waiting.take() for _ in range(min(free, len(self._waiting)))]
            self._running |= {choice.seq.id: choice for choice in admitted}
        for choice in admitted:
            choice.started = time.monotonic()
            self.llm.engine.add(choice.seq)

    def _step(self) -> None:
        self._progress = time.monotonic()
        try:
            step = self.llm.engine.step()
        except Exception as error:
            self._recover(error)
            return
        finally:
            self._progress = time.monotonic()
        self._notify((listener.on_step for listener in self.listeners), step)  # before the ends of this step
        for i, seq in enumerate(step.seqs):
            if (choice := self._running.get(seq.id)) is not None:
                self._publish(choice, self._note(choice, step, i))

    def _note(self, choice: Choice, step: Step, i: int) -> Note | None:
        """The step for the choice's own trace. If that fails the text goes on without it."""
        try:
            return None if choice.notes is None else choice.notes.note(step, i)
        except Exception:
            log.exception("note_failed")
            return None

    def _publish(self, choice: Choice, note: Note | None) -> None:
        """Send what is new in a choice, where its job streams or the choice has ended."""
        seq, sent = choice.seq, choice.sent
        new = len(seq.origins) - sent
        if new:
            choice.latest = time.monotonic()
            choice.first = choice.first or choice.latest
        if not seq.done and not (new and choice.job.streams):
            return
        if seq.done:
            self.llm.close(seq)  # releases text that was held back
        assert isinstance(seq.on_token, Detokenizer)
        texts, choice.sent = seq.on_token.texts[sent:], sent + new
        tokens, logprobs = seq.generated[sent:], seq.logprobs[sent:]
        delta = Delta(choice.index, "".join(texts), tokens, logprobs, seq.finish, texts, note)
        if seq.done:
            self._end(choice, seq.finish or "")
        choice.job.events.put(delta)

    def _end(self, choice: Choice, finish: str) -> None:
        """End a choice, whatever the reason, and free its slots."""
        if choice.ended:
            return
        choice.ended, choice.finish = time.monotonic(), finish
        self.llm.close(choice.seq)
        with self._changed:
            self._running.pop(choice.seq.id, None)
        self._notify((listener.on_end for listener in self.listeners), choice)
        if choice.started:
            self._mean_seconds += 0.1 * (choice.ended - choice.started - self._mean_seconds)
            self.llm.engine.cancel(choice.seq)  # no-op for a finished one; last, because its drafter may hang

    def _fail(self, error: ApiError, choices: list[Choice] | None = None) -> None:
        """End these choices with an error; None: all, the waiting ones included."""
        if choices is None:
            with self._changed:
                choices = [*self._running.values(), *self._waiting.remove(lambda choice: True)]
        for choice in choices:
            self._end(choice, "error")
        for job in {choice.job for choice in choices}:
            job.events.put(error)

    def _recover(self, error: Exception) -> None:
        """After a failed step the engine's state is unknown: restart it, and fail what was running."""
        log.error("step_failed", exc_info=error)
        sent = internal_error() if not isinstance(error, OutriderError) else ApiError(500, str(error), "model_error")
        fatal = "The engine failed and could not be started again; the log says why."
        if not self._restart(self.llm.restart, fatal, sent):  # first: a client that retries at once finds an engine
            return
        with self._changed:
            running = list(self._running.values())
            self._cancelled |= {choice.job for choice in running}  # their other choices may still wait
        self._fail(sent, running)

    def _restart(self, restart: Callable[[], None], fatal: str, error: ApiError) -> bool:
        """Whether the engine runs again. If not, `fatal` says why and every choice ends with the error."""
        try:
            restart()
        except Exception as worse:
            log.critical("restart_failed", exc_info=worse)
            self.fatal = fatal
            self._fail(error)
        return not self.fatal

    def _notify(self, callbacks: Iterable[Callable[[Any], None]], event: Any) -> None:
        for callback in callbacks:
            try:
                callback(event)
            except Exception:
                log.exception("watcher_failed")

    # ------------------------------------------------------------ a drafter that hangs, on the watchdog's thread

    def _watch_drafter(self) -> None:
        while not self._stopped.wait(min(1.0, self._drafter_seconds / 4)):
            if verb := self.llm.engine.watchdog.give_up(self._drafter_seconds):
                self._abandon_drafter(verb)

    def _abandon_drafter(self, verb: str) -> None:
        """The engine's thread is stuck in a call: end it when possible, and go on in another without a drafter."""
        why = (
            f"The drafter '{self.llm.config.drafter_name}' did not come back from {verb}() within "
            f"{self._drafter_seconds:g} s: it is switched off until the server is started again."
        )
        log.error("drafter_hangs", extra={"fields": {"why": why}})
        end_thread(self._thread)
        fatal = "The drafter hangs, and the engine could not be started without it; the log says why."
        if not self._restart(lambda: self.llm.give_up_drafter(why), fatal, internal_error()):
            return
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
