"""The HTTP side of the engine: jobs go in, text comes out. It runs on the event loop and never waits for the engine.

Promise: a submitted job gets a delta for what every step adds and for its end, or one error. A cancelled job costs the
engine no further step. Where the engine is lost, every job gets a sentence that says so at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence as Listing
from dataclasses import replace
from typing import Any

from .errors import ApiError, shutting_down
from .jobs import Choice, Job, Listener, StepReport
from .messages import (
    Accepted,
    Cancel,
    Command,
    EngineLink,
    Facts,
    Failed,
    Left,
    Message,
    Progress,
    Started,
    Stats,
    Stop,
    Submit,
)

log = logging.getLogger("outrider.server")
STALLED = 60.0  # seconds of one step after which the server is unhealthy


class Worker:
    """Up to the engine's `max_batch` choices run, up to `queue` wait, and further ones are refused."""

    def __init__(self, engine: EngineLink, queue: int = 128, listeners: Listing[Listener] = ()) -> None:
        self.engine, self.queue, self.listeners = engine, queue, list(listeners)
        self.max_running = engine.facts.max_batch
        self.fatal = ""  # why the engine cannot run again
        self.stats = Stats(0.0, None)
        self._jobs: dict[int, Job] = {}  # by number, until the engine has nothing of them
        self._unopened: dict[int, Job] = {}  # those that the engine has not accepted yet
        self._waiting: dict[int, Choice] = {}  # by sequence: in the engine's queue
        self._running: dict[int, Choice] = {}  # by sequence: in its batch, until it says that they have left
        self._numbers = itertools.count(1)
        self._draining = False
        self._loop: asyncio.AbstractEventLoop | None = None  # until `start`
        self._mean_seconds = 1.0  # per choice, moving average
        self._latest_message = time.monotonic()  # when the engine sent it
        self._handlers: dict[type, Callable[[Any], None]] = {
            Progress: self._on_progress, Accepted: self._on_accepted, Started: self._on_started, Left: self._on_left,
            Failed: self._on_failed, Stats: self._on_stats, Facts: self._on_facts,
        }  # fmt: skip

    # ------------------------------------------------------------ for requests, on the loop

    def start(self) -> None:
        """Called on the loop that everything here then runs on."""
        self._loop = asyncio.get_running_loop()
        self.engine.connect(self._receive, self._on_lost)

    def submit(self, job: Job) -> None:
        """Queue a job, or raise the error that its client gets. `job.accepted` says what the engine thinks of it."""
        self.check_capacity(len(job.choices))
        job.number = next(self._numbers)
        self._jobs[job.number] = self._unopened[job.number] = job
        self._latest_message = max(self._latest_message, time.monotonic() if self.idle else 0.0)
        request = job.request
        params = replace(request.params, stop=())  # found in the text, here
        prompts = [prompt.ids for prompt in request.prompts]
        speculate, only = not request.plain_reason, request.drafter
        self._post(
            Submit(job.number, job.client, prompts, params, speculate, request.max_draft_tokens, only,
                   request.trace_level)
        )  # fmt: skip

    def check_capacity(self, choices: int) -> None:
        """Raise the error that so many more choices would get now."""
        if self.fatal:
            raise self._dead()
        if self._draining:
            raise shutting_down()
        busy = self.waiting + self.running
        if busy + choices > self.max_running + self.queue:
            wait = round(self._mean_seconds * (busy - self.max_running + 1) / self.max_running)
            wait = min(max(wait, 1), 60)
            message = f"The queue is full ({busy} answers running or waiting); try again in {wait} s."
            raise ApiError(429, message, "queue_full", retry_after=wait)

    def cancel(self, job: Job) -> None:
        """End what still runs of this job before the next step. Does nothing for a job that has ended."""
        job.events.close()
        open_ = [choice for choice in job.choices if not choice.ended]
        if open_ and job.number:
            for choice in open_:
                self._end(choice, "cancelled")
            self._post(Cancel(job.number))

    # ------------------------------------------------------------ for the process, from any thread

    def drain(self, seconds: float) -> None:
        """Accept no more jobs. Running choices may go on for `seconds`, then end with an error."""
        self._draining = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._expire)

    def stop(self) -> None:
        """End all choices, and wait for the engine's end: not on the loop."""
        assert self._loop is not None
        self._draining = True
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self.engine.join(STALLED)

    async def _stop(self) -> None:
        self._expire()
        self._post(Stop())

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + sum(len(job.choices) for job in list(self._unopened.values()))

    @property
    def idle(self) -> bool:
        return not (self._running or self._waiting or self._unopened)

    @property
    def unhealthy(self) -> str:
        """Why this server should be replaced; empty while it is healthy."""
        if self.fatal:
            return self.fatal
        silent = time.monotonic() - self._latest_message
        return f"The engine has not moved for {silent:.0f} s." if not self.idle and silent > STALLED else ""

    # ------------------------------------------------------------ messages of the engine

    def _receive(self, messages: list[Message]) -> None:
        self._latest_message = time.monotonic()
        for message in messages:
            self._handlers[type(message)](message)

    def _on_progress(self, progress: Progress) -> None:
        """One step: text first, then the listeners, then the clients."""
        report, running, now, at = StepReport(progress), self._running, self._latest_message, 0
        moved, emitted = report.choices, report.emitted
        for i, (seq, count) in enumerate(zip(progress.seqs, progress.counts, strict=True)):
            begin, at = at, at + max(count, 0)
            choice = running.get(seq)
            if choice is None or choice.ended:  # what it added beyond its end is dropped
                continue
            self._count_pass(choice, progress)
            if count >= 0:
                kept = choice.advance(progress.tokens[begin:at], progress, i)
                if kept:
                    choice.latest, choice.first = now, choice.first or now
                if progress.lines and (line := choice.trace(progress, kept)) is not None:
                    report.lines.append((choice, line))
                moved.append(choice)
                emitted.append(kept)
                report.drafted.append(progress.drafted[i])
                report.accepted.append(min(progress.accepted[i], kept))
        self._notify((listener.on_step for listener in self.listeners), report)
        for seq in progress.ended:
            self._forget(seq)
        for choice in moved:
            if choice.finish:
                self._close(choice, progress)
            if choice.job.streams or choice.finish:
                choice.job.events.put(choice)

    def _count_pass(self, choice: Choice, progress: Progress) -> None:
        stats = choice.stats
        stats.passes += 1
        stats.why = progress.why
        if progress.failed:
            stats.failures += 1
        if progress.slots and choice.seq in progress.slots:
            stats.reused, stats.preempted = progress.slots[choice.seq]
        if choice.traced:
            for phase, seconds in progress.clock.items():
                stats.seconds[phase] = stats.seconds.get(phase, 0.0) + seconds

    def _close(self, choice: Choice, progress: Progress) -> None:
        """The text of a choice has ended."""
        choice.reader.finish()  # releases text that was held back
        self._end(choice, choice.finish)
        if choice.seq not in progress.ended:  # a stop string: the engine does not know of it
            self._post(Cancel(choice.job.number, (choice.seq,)))

    def _on_accepted(self, message: Accepted) -> None:
        job = self._unopened.pop(message.job, None)
        if job is not None:
            job.open(message)
            self._waiting |= {choice.seq: choice for choice in job.choices}

    def _on_started(self, message: Started) -> None:
        for seq in message.seqs:
            if (choice := self._waiting.pop(seq, None)) is not None:
                choice.started = message.at
                self._running[seq] = choice

    def _on_left(self, message: Left) -> None:
        for seq in message.seqs:
            self._forget(seq)

    def _on_failed(self, message: Failed) -> None:
        self.fatal = message.fatal or self.fatal
        jobs = list(self._jobs) if message.jobs is None else message.jobs
        for job in filter(None, map(self._jobs.get, jobs)):
            if self._unopened.pop(job.number, None) is not None:
                del self._jobs[job.number]  # it was refused: the engine has nothing of it
            self._fail(job, ApiError(message.status, message.message, message.code, message.param))

    def _on_stats(self, message: Stats) -> None:
        self.stats = message if message.break_even is not None else replace(message, break_even=self.stats.break_even)

    def _on_facts(self, message: Facts) -> None:
        self.engine.facts = message

    def _on_lost(self, why: str) -> None:
        """The engine is gone, and nothing that it has will end."""
        if self.fatal:
            return
        self.fatal = why
        log.critical("engine_lost", extra={"fields": {"why": why}})
        jobs = list(self._jobs.values())
        for state in (self._jobs, self._unopened, self._waiting, self._running):
            state.clear()
        for job in jobs:
            self._fail(job, self._dead())

    # ------------------------------------------------------------ details

    def _dead(self) -> ApiError:
        return ApiError(503, self.fatal, "engine_dead")

    def _post(self, command: Command) -> None:
        if not self.fatal or isinstance(command, Stop):
            self.engine.post(command)

    def _expire(self) -> None:
        """The time to drain is over."""
        for job in list(self._jobs.values()):
            if any(not choice.ended for choice in job.choices):
                self._fail(job, shutting_down())
                self._post(Cancel(job.number))

    def _fail(self, job: Job, error: ApiError) -> None:
        open_ = [choice for choice in job.choices if not choice.ended]
        for choice in open_:
            self._end(choice, "error")
        if open_:
            job.fail(error)

    def _forget(self, seq: int) -> None:
        """The engine has this sequence no longer."""
        choice = self._running.pop(seq, None) or self._waiting.pop(seq, None)
        if choice is not None:
            job = choice.job
            if not any(other.seq in self._running or other.seq in self._waiting for other in job.choices):
                self._jobs.pop(job.number, None)

    def _end(self, choice: Choice, finish: str) -> None:
        """End a choice for its client, whatever the reason."""
        choice.ended, choice.finish = time.monotonic(), finish
        self._notify((listener.on_end for listener in self.listeners), choice)
        if choice.started:
            self._mean_seconds += 0.1 * (choice.ended - choice.started - self._mean_seconds)

    def _notify(self, callbacks: Iterable[Callable[[Any], None]], event: Any) -> None:
        for callback in callbacks:
            try:
                callback(event)
            except Exception:
                log.exception("watcher_failed")
