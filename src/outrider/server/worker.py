"""The one thread that drives the engine. Requests join and leave between two steps; nobody else touches it.

Promise: a submitted job is told of every token and of its end, or gets one problem; a cancelled one has given its slots
back before the next step; a failing step costs the answers under way, not the server; a drafter that does not come back
costs its speed. What a step does is the engine's business, and who reads the answers is not known here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence as Listing
from contextlib import suppress
from typing import Protocol

import torch

from ..engine.trace import Note
from ..engine.watchdog import GivenUp, end_thread
from ..errors import OutriderError
from ..llm import LLM
from ..models.detokenizer import Detokenizer
from ..types import Step
from .job import Answer, Job, Words
from .problems import Problem, broken, leaving
from .queue import FairQueue

log = logging.getLogger("outrider.server")
STALLED = 60.0  # seconds of one step after which something is wrong


class Watcher(Protocol):
    """Hears of steps and ends, on the engine's thread; what it raises is logged and forgotten."""

    def observed(self, step: Step) -> None: ...

    def ended(self, answer: Answer) -> None: ...


class Worker:
    """Continuous batching: as many answers as the engine's batch holds are under way, up to `queue` wait."""

    def __init__(
        self, llm: LLM, queue: int = 128, watchers: Listing[Watcher] = (), drafter_seconds: float = 30.0
    ) -> None:
        self.llm, self.queue, self.watchers = llm, queue, list(watchers)
        self.places = llm.config.max_batch
        self.dead = ""  # why there is no engine any more
        self._changed = threading.Condition()
        self._waiting: FairQueue[Answer] = FairQueue()
        self._running: dict[int, Answer] = {}  # by sequence
        self._gone: set[Job] = set()  # cancelled since the last step
        self._last_moment = 0.0  # when what is still under way is ended; 0: not draining
        self._stopping = False
        self._seconds = 1.0  # an answer takes, of late
        self._beat = time.monotonic()  # when the latest step began or ended
        self._drafter_seconds = drafter_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)

    # ------------------------------------------------------------ from any thread

    def start(self) -> None:
        self._thread.start()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def submit(self, job: Job) -> None:
        """Take a job on, or raise the problem that stands against it."""
        with self._changed:
            self.insist_on_room(len(job.answers))
            for answer in job.answers:
                self._waiting.put(job.client, answer)
            self._changed.notify()

    def insist_on_room(self, answers: int) -> None:
        """Raise the problem that so many more would have right now."""
        with self._changed:
            if self.dead:
                raise Problem(503, "The engine could not be restarted after a failure.", "engine_dead")
            if self.draining:
                raise leaving()
            busy = len(self._waiting) + len(self._running)
            if busy + answers > self.places + self.queue:
                raise self._full(busy)

    def cancel(self, job: Job) -> None:
        """Its client has gone, or has all it wanted: whatever is still under way ends before the next step."""
        with self._changed:
            if any(not answer.ended for answer in job.answers):
                self._gone.add(job)
                self._changed.notify()

    def drain(self, seconds: float) -> None:
        """Take nothing on any more; what is under way may go on for so long, and then ends with a problem."""
        with self._changed:
            self._last_moment = time.monotonic() + seconds
            self._changed.notify()

    def stop(self) -> None:
        """End everything and wait for the thread."""
        with self._changed:
            self._stopping, self._last_moment = True, time.monotonic()
            self._changed.notify()
        end = time.monotonic() + STALLED
        while (thread := self._thread).is_alive() and time.monotonic() < end:  # it may be replaced meanwhile
            thread.join(timeout=0.05)
        self._over.set()

    @property
    def draining(self) -> bool:
        return self._last_moment > 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def ill(self) -> str:
        """Why this server should be replaced; empty when it is well."""
        if self.dead:
            return self.dead
        still = time.monotonic() - self._beat
        return f"The engine has not moved for {still:.0f} s." if self._running and still > STALLED else ""

    def _full(self, busy: int) -> Problem:
        wait = min(max(round(self._seconds * (busy - self.places + 1) / self.places), 1), 60)
        words = f"{busy} answers are under way or waiting, which is all this server takes; try again in {wait} s."
        return Problem(429, words, "queue_full", retry_after=wait)

    # ------------------------------------------------------------ the engine's thread

    def _live(self) -> None:
        with suppress(GivenUp):  # then another thread drives another engine by now
            self._go_on()

    def _go_on(self) -> None:
        torch.set_num_threads(torch.get_num_threads())  # OpenMP counts threads for each thread that asks
        if self.llm.device.startswith("cuda"):
            torch.cuda.set_device(self.llm.device)
        self._take_over()
        while self._turn():
            if self._running:
                self._step()

    def _turn(self) -> bool:
        """Between two steps: who leaves, who joins. Waits where there is nothing to do; False: the end."""
        with self._changed:
            while not (self._running or self._waiting or self._gone or self._stopping):
                self._changed.wait()
            gone = set(self._gone)
            left = self._waiting.remove(lambda answer: answer.job in gone)
            left += [answer for answer in self._running.values() if answer.job in gone]
            late = self.draining and time.monotonic() >= self._last_moment
        for answer in left:
            self._end(answer, "cancelled")
        with self._changed:
            self._gone -= gone  # only now: whoever has to take over ends those that are left
        if late:
            self._end_all(leaving())
        self._admit()
        return not self._stopping

    def _admit(self) -> None:
        with self._changed:
            free = self.places - len(self._running)
            fresh = [self._waiting.take() for _ in range(min(free, len(self._waiting)))]
            self._running |= {answer.seq.id: answer for answer in fresh}
        for answer in fresh:
            answer.started = time.monotonic()
            self.llm.engine.add(answer.seq)

    def _step(self) -> None:
        self._beat = time.monotonic()
        try:
            step = self.llm.engine.step()
        except Exception as error:
            self._recover(error)
            return
        finally:
            self._beat = time.monotonic()
        for watcher in self.watchers:  # before the ends that come with this step
            self._guarded(watcher.observed, step)
        for i, seq in enumerate(step.seqs):
            if (answer := self._running.get(seq.id)) is not None:
                self._tell(answer, self._noted(answer, step, i))

    def _noted(self, answer: Answer, step: Step, i: int) -> Note | None:
        """What the answer's own client asked to be told of this step: if that fails, the text goes on without it."""
        try:
            return None if answer.tape is None else answer.tape.note(step, i)
        except Exception:
            log.exception("note_failed")
            return None

    def _tell(self, answer: Answer, note: Note | None) -> None:
        seq, said = answer.seq, answer.told
        more = len(seq.origins) - said
        if more:
            answer.latest = time.monotonic()
            answer.first = answer.first or answer.latest
        if not seq.done and not (more and answer.job.streams):
            return
        if seq.done:
            self.llm.close(seq)  # lets go of text that was held back
        assert isinstance(seq.watch, Detokenizer)
        texts, answer.told = seq.watch.texts[said:], said + more
        tokens, logprobs = seq.generated[said:], seq.logprobs[said:]
        words = Words(answer.index, "".join(texts), tokens, logprobs, seq.finish, texts, note)
        if seq.done:
            self._end(answer, seq.finish or "")
        answer.job.mailbox.put(words)

    def _end(self, answer: Answer, finish: str) -> None:
        """The answer is over, whatever the reason; its slots are free."""
        if answer.ended:
            return
        answer.ended, answer.finish = time.monotonic(), finish
        self.llm.close(answer.seq)
        with self._changed:
            self._running.pop(answer.seq.id, None)
        for watcher in self.watchers:
            self._guarded(watcher.ended, answer)
        if answer.started:
            self._seconds += 0.1 * (answer.ended - answer.started - self._seconds)
            self.llm.engine.cancel(answer.seq)  # nothing to do where it has finished; last: it may not come back

    def _end_all(self, problem: Problem) -> None:
        with self._changed:
            every = [*self._running.values(), *self._waiting.remove(lambda answer: True)]
        for answer in every:
            self._end(answer, "error")
        for job in {answer.job for answer in every}:
            job.mailbox.put(problem)

    def _recover(self, error: Exception) -> None:
        """A step has failed: nobody knows what it left behind. Those under way are told, and the engine starts anew."""
        log.error("step_failed", exc_info=error)
        problem = broken() if not isinstance(error, OutriderError) else Problem(500, str(error), "model_error")
        try:
            self.llm.restart()  # first: whoever asks again at once should find an engine
        except Exception as worse:
            log.critical("restart_failed", exc_info=worse)
            self.dead = "The engine failed and could not be started again; the log says why."
            self._end_all(problem)
            return
        with self._changed:
            every = list(self._running.values())
            self._gone |= {answer.job for answer in every}  # those of their answers that still wait
        for answer in every:
            self._end(answer, "error")
        for job in {answer.job for answer in every}:
            job.mailbox.put(problem)

    # ------------------------------------------------------------ a drafter that does not come back

    def _watch(self) -> None:
        """On a thread of its own, for as long as the worker lives."""
        while not self._over.wait(min(1.0, self._drafter_seconds / 4)):
            if verb := self.llm.engine.watchdog.give_up(self._drafter_seconds):
                self._leave_behind(verb)

    def _leave_behind(self, verb: str) -> None:
        """The engine's thread is stuck in a call: it ends when it can, and another one goes on without a drafter."""
        why = (
            f"The drafter '{self.llm.config.drafter_name}' did not come back from {verb}() within "
            f"{self._drafter_seconds:g} s: it is switched off until the server is started again."
        )
        log.error("drafter_hangs", extra={"facts": {"why": why}})
        end_thread(self._thread)
        try:
            self.llm.give_up_drafter(why)
        except Exception as worse:
            log.critical("restart_failed", exc_info=worse)
            self.dead = "The drafter hangs, and the engine could not be started without it; the log says why."
            self._end_all(broken())
            return
        self._beat = time.monotonic()
        self._thread = threading.Thread(target=self._live, name="engine", daemon=True)
        self._thread.start()

    def _take_over(self) -> None:
        """What a thread before this one has left: words that nobody was told, and answers that go on."""
        for answer in list(self._running.values()):
            self._tell(answer, None)
        for answer in list(self._running.values()):
            answer.started = answer.started or time.monotonic()
            self.llm.engine.add(answer.seq)

    def _guarded(self, hear: object, told: object) -> None:
        try:
            hear(told)  # type: ignore[operator]
        except Exception:
            log.exception("watcher_failed")
