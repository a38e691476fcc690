"""The engine's side: one thread that drives the engine, a queue in front of it, messages out of it.

Promise: what `handle` accepts is answered by messages, and `send` never waits, so that no client slows a step. A
cancelled sequence has returned its slots before the next step. A failing step costs the running sequences, not the
engine; a drafter that hangs costs its speed. It knows token ids, not text, and no HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ..backends.machine import thread_settings
from ..engine.trace import Note
from ..engine.watchdog import GivenUp, end_thread
from ..errors import OutriderError
from ..llm import LLM
from ..types import ACCEPTED, REJECTED, Sequence, Step, Verdict
from .messages import (
    INTERNAL,
    Accepted,
    Cancel,
    Command,
    Facts,
    Failed,
    Left,
    Message,
    Progress,
    Started,
    Stats,
    Submit,
)  # fmt: skip
from .notes import StepNotes

log = logging.getLogger("outrider.server")
STATS_INTERVAL = 1.0  # seconds between two `Stats`
DEAD = "The engine could not be restarted after a failure; the log says why."
T = TypeVar("T")


@dataclass(frozen=True)
class HostOptions:
    drafter_seconds: float = 30.0  # a drafter call that takes longer is abandoned
    records: bool = False  # every sequence gets trace lines


@dataclass(eq=False)
class Entry:
    """A sequence in the engine or in front of it."""

    job: int
    seq: Sequence
    notes: StepNotes | None
    sent: int = 0  # tokens that were reported
    slots: tuple[int, int] = (0, 0)  # (reused, preempted), as reported
    started: bool = False


def facts_of(llm: LLM) -> Facts:
    config = llm.config
    ends = frozenset(llm.tokenizer.eos_ids | llm.target.config.eos_ids)
    return Facts(
        llm.name, llm.dtype, llm.device, llm.backend, config.drafter_name, llm.drafters, config.k, config.rule,
        llm.engine.cache.length, llm.target.config.vocab_size, ends, config.max_batch,
    )  # fmt: skip


class EngineHost:
    """Continuous batching: up to the engine's `max_batch` sequences run, the others wait; clients take turns."""

    def __init__(self, llm: LLM, send: Callable[[Message], None], options: HostOptions | None = None) -> None:
        self.llm, self.send, self.options = llm, send, options or HostOptions()
        self.fatal = False  # the engine cannot run again
        self._changed = threading.Condition()
        self._waiting: FairQueue[Entry] = FairQueue()
        self._running: dict[int, Entry] = {}  # by sequence id
        self._cancelled: set[Cancel] = set()  # since the last step
        self._preparing: set[int] = set()  # jobs whose guide is compiled now
        self._stopping = False
        self._reported = 0.0  # when the latest `Stats` were sent
        self._stopped = threading.Event()
        self._enter_thread = thread_settings(llm.target.device)
        self._guides = ThreadPoolExecutor(2, thread_name_prefix="guides")
        self._lines = ThreadPoolExecutor(1, thread_name_prefix="lines")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------ from any thread

    def start(self) -> None:
        self._thread.start()
        threading.Thread(target=self._watch_drafter, name="watchdog", daemon=True).start()

    def handle(self, command: Command) -> None:
        """Do, or begin, what the HTTP side asks for. Compiling a guide takes a while, so that happens elsewhere."""
        if isinstance(command, Submit):
            with self._changed:
                self._preparing.add(command.job)
            if command.params.guide is None:
                self._prepare(command)
            else:
                self._guides.submit(self._prepare, command)
            return
        with self._changed:
            if isinstance(command, Cancel):
                self._cancelled.add(command)
            else:
                self._stopping = True
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the thread after `Stop`; whether it has ended. The watchdog may replace it meanwhile."""
        end = time.monotonic() + seconds
        while (thread := self._thread).is_alive() and time.monotonic() < end:
            thread.join(timeout=0.05)
        self._stopped.set()
        self._guides.shutdown(wait=False, cancel_futures=True)
        self._lines.shutdown(wait=False)
        return not self._thread.is_alive()

    def _prepare(self, command: Submit) -> None:
        """Make sequences and queue them, or send why that cannot be done."""
        try:
            seqs = self._sequences(command)
        except OutriderError as error:
            param = "guide" if isinstance(error, _GuideError) else None
            self._refuse(command, Failed([command.job], 400, str(error), None, param))
            return
        except Exception:
            log.exception("request_failed")
            self._refuse(command, Failed([command.job], *INTERNAL))
            return
        level = "summary" if command.trace == "off" and self.options.records else command.trace
        entries = [Entry(command.job, seq, None if level == "off" else StepNotes(seq, level)) for seq in seqs]
        openings = [seq.tokens[: seq.prompt_len] for seq in seqs] if any(seq.source for seq in seqs) else None
        self.send(Accepted(command.job, [seq.id for seq in seqs], [seq.seed for seq in seqs], openings))
        with self._changed:
            for entry in entries:
                self._waiting.put(command.client, entry)
            self._preparing.discard(command.job)
            self._changed.notify()

    def _refuse(self, command: Submit, failed: Failed) -> None:
        self.send(failed)
        with self._changed:
            self._preparing.discard(command.job)

    def _sequences(self, command: Submit) -> list[Sequence]:
        params, speculate = command.params, command.speculate
        try:
            if params.guide is not None and self.llm.guide_for(params.guide) is None:
                params = replace(params, guide=None)  # any text is allowed
        except OutriderError as error:
            raise _GuideError(str(error)) from error
        each = (self.llm.prepare(ids, params, speculate, command.most_drafted, command.only) for ids in command.prompts)
        seqs = [seq for several in each for seq in several]
        for seq in seqs:
            seq.on_token = None  # text is the HTTP side's
        return seqs

    # ------------------------------------------------------------ on the engine's thread

    def _run(self) -> None:
        with suppress(GivenUp):  # then another thread drives another engine by now
            try:
                self._enter_thread()
                self._resume()
                while self._schedule():
                    if self._running:
                        self._step()
            except Exception as error:  # a bug: nobody would drive the engine any more
                log.critical("engine_failed", exc_info=error)
                self._give_up(INTERNAL)

    def _resume(self) -> None:
        """After another thread was abandoned: report what it did not report, and add its sequences to the new engine.

        How much was drafted in the step that it did not finish is not known any more.
        """
        progress = Progress(why=self.llm.engine.controller.why, counted=False)
        for entry in list(self._running.values()):
            seq, tokens = entry.seq, entry.seq.generated[entry.sent :]
            if tokens or seq.done:
                accepted = seq.origins[entry.sent :].count(ACCEPTED)
                self._report(progress, entry, tokens, accepted, accepted, -1)
        if progress.seqs:
            self.send(progress)
        for entry in list(self._running.values()):
            if not entry.started:
                entry.started = True
                self.send(Started([entry.seq.id], time.monotonic()))
            self.llm.engine.add(entry.seq)

    def _schedule(self) -> bool:
        """Between two steps: end cancelled sequences, admit waiting ones. Waits while idle; False: stop."""
        if not self._running or time.monotonic() - self._reported > STATS_INTERVAL:
            self._send_stats()
        with self._changed:
            while not (self._running or self._waiting or self._stopping or self._cancelled_now()):
                self._changed.wait()
            cancelled, leaving = set(self._cancelled_now()), list[Entry]()
            if cancelled or self._stopping:
                leaving = self._waiting.remove(lambda entry: _names(cancelled, entry))
                leaving += [entry for entry in self._running.values() if self._stopping or _names(cancelled, entry)]
        self._leave(leaving)
        with self._changed:
            self._cancelled -= cancelled  # only now: a thread that replaces this one ends the rest
        if not self._stopping:
            self._admit()
        return not self._stopping

    def _cancelled_now(self) -> list[Cancel]:
        """Those whose jobs have arrived: one may be cancelled while its guide is compiled."""
        return [cancel for cancel in self._cancelled if cancel.job not in self._preparing]

    def _admit(self) -> None:
        with self._changed:
            free = self.llm.config.max_batch - len(self._running)
            admitted = [self._waiting.take() for _ in range(min(free, len(self._waiting)))]
            self._running |= {entry.seq.id: entry for entry in admitted}
        if admitted:
            self.send(Started([entry.seq.id for entry in admitted], time.monotonic()))
        for entry in admitted:
            entry.started = True
        for entry in admitted:
            self.llm.engine.add(entry.seq)

    def _leave(self, entries: list[Entry]) -> None:
        """Take these out of the engine, and free their slots."""
        for entry in entries:
            if entry.started:
                self.llm.engine.cancel(entry.seq)  # a no-op for a finished one; its drafter may hang here
            with self._changed:
                self._running.pop(entry.seq.id, None)
            self.send(Left([entry.seq.id]))

    def _step(self) -> None:
        try:
            step = self.llm.engine.step()
        except Exception as error:
            self._recover(error)
            return
        progress = Progress(clock=step.clock, why=step.why, failed=bool(step.failure))
        for i, verdict in enumerate(step.verdicts):
            entry = self._running.get(step.turns[i].seq.id)
            if entry is not None:
                self._report_turn(progress, entry, step, i, verdict)
        self.send(progress)

    def _report_turn(self, progress: Progress, entry: Entry, step: Step, i: int, verdict: Verdict | None) -> None:
        if verdict is None:
            progress.seqs.append(entry.seq.id)
            progress.counts.append(-1)
            for column in (progress.accepted, progress.drafted, progress.rejected_at):
                column.append(0)
            return
        note = None if entry.notes is None else _note(entry.notes, step, i)
        late = entry.notes is not None and entry.notes.level == "full"
        if late:  # its lines take a while: it gets messages of its own, all in one queue, and the others do not wait
            progress = Progress(clock=step.clock, why=step.why, failed=bool(step.failure), counted=False)
        tree = step.draft.trees[i]
        rejected = _rejected_at(tree.parents, verdict) if REJECTED in verdict.fates else -1
        self._report(progress, entry, verdict.tokens, len(verdict.path), len(tree.tokens), rejected)
        if late:
            self._lines.submit(self._send_late, progress, entry, note)
        elif note is not None:
            progress.lines[entry.seq.id] = note.line()

    def _report(
        self, progress: Progress, entry: Entry, tokens: list[int], accepted: int, drafted: int, rejected_at: int
    ) -> None:
        """Add one sequence to a message; where it has ended it leaves."""
        seq = entry.seq
        progress.seqs.append(seq.id)
        progress.counts.append(len(tokens))
        progress.accepted.append(accepted)
        progress.drafted.append(drafted)
        progress.rejected_at.append(rejected_at)
        progress.tokens += tokens
        entry.sent += len(tokens)
        slots = (seq.stats.reused, seq.stats.preempted)
        if slots != entry.slots:
            entry.slots = progress.slots[seq.id] = slots
        if seq.params.logprobs is not None:
            progress.logprobs[seq.id] = seq.logprobs[entry.sent - len(tokens) : entry.sent]
        if seq.finish is not None:
            progress.ended[seq.id] = seq.finish
            with self._changed:
                self._running.pop(seq.id, None)

    def _send_late(self, progress: Progress, entry: Entry, note: Note | None) -> None:
        try:
            if entry.notes is not None and note is not None:
                progress.lines[entry.seq.id] = entry.notes.line(note)
        except Exception:
            log.exception("note_failed")
        self.send(progress)

    def _send_stats(self) -> None:
        self._reported, engine, count = time.monotonic(), self.llm.engine, len(self._running)
        prices = engine.controller.prices
        price = max(prices.price(count) / count, 0.0) if prices is not None and count else None
        usage = 1 - engine.cache.available / engine.cache.slots
        self.send(Stats(usage, price, self.llm.drift.as_json(), self.llm.learning))

    # ------------------------------------------------------------ failures

    def _recover(self, error: Exception) -> None:
        """After a failed step the engine's state is unknown: restart it, and fail what was running."""
        log.error("step_failed", exc_info=error)
        reason = INTERNAL if not isinstance(error, OutriderError) else (500, str(error), "model_error")
        if not self._restart(self.llm.restart, reason):  # first: a client that retries at once finds an engine
            return
        with self._changed:
            running = list(self._running.values())
            jobs = sorted({entry.job for entry in running})
            self._cancelled |= {Cancel(job) for job in jobs}  # their other sequences may still wait
        self.send(Failed(jobs, *reason))
        self._leave(running)

    def _restart(self, restart: Callable[[], None], reason: tuple[int, str, str]) -> bool:
        """Whether the engine runs again. If not, every job ends with the error."""
        try:
            restart()
        except Exception as worse:
            log.critical("restart_failed", exc_info=worse)
            self._give_up(reason)
        return not self.fatal

    def _give_up(self, reason: tuple[int, str, str]) -> None:
        self.fatal = True
        with self._changed:
            entries = [*self._running.values(), *self._waiting.remove(lambda entry: True)]
        self.send(Failed(None, *reason, fatal=DEAD))
        self._leave(entries)

    # ------------------------------------------------------------ a drafter that hangs, on the watchdog's thread

    def _watch_drafter(self) -> None:
        seconds = self.options.drafter_seconds
        while not self._stopped.wait(min(1.0, seconds / 4)):
            if verb := self.llm.engine.watchdog.give_up(seconds):
                self._abandon_drafter(verb)

    def _abandon_drafter(self, verb: str) -> None:
        """The engine's thread is stuck in a call: end it when possible, and go on in another without a drafter."""
        why = (
            f"The drafter '{self.llm.config.drafter_name}' did not come back from {verb}() within "
            f"{self.options.drafter_seconds:g} s: it is switched off until the server is started again."
        )
        log.error("drafter_hangs", extra={"fields": {"why": why}})
        end_thread(self._thread)
        if not self._restart(lambda: self.llm.give_up_drafter(why), INTERNAL):
            return
        self.send(facts_of(self.llm))
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()


class _GuideError(OutriderError):
    """The request's guide cannot be used."""


def _names(cancelled: set[Cancel], entry: Entry) -> bool:
    return any(c.job == entry.job and (not c.seqs or entry.seq.id in c.seqs) for c in cancelled)


def _note(notes: StepNotes, step: Step, i: int) -> Note | None:
    """The step for a trace. If that fails the text goes on without it."""
    try:
        return notes.note(step, i)
    except Exception:
        log.exception("note_failed")
        return None


def _rejected_at(parents: list[int], verdict: Verdict) -> int:
    """How many accepted nodes are above the first rejected one: a text that is cut before it never reached it."""
    depth = {-1: 0} | {node: i + 1 for i, node in enumerate(verdict.path)}
    return min(depth[parents[node]] for node, fate in enumerate(verdict.fates) if fate == REJECTED)


class FairQueue(Generic[T]):
    """Round robin over clients, first in first out within one. Not thread-safe: the owner locks.

    A client with a hundred items delays another's single item by one place, not by a hundred.
    """

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()  # the first client is served next

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for queue in self._queues.values() for item in queue)

    def put(self, client: str, item: T) -> None:
        self._queues.setdefault(client, deque()).append(item)

    def take(self) -> T:
        client, queue = next(iter(self._queues.items()))
        item = queue.popleft()
        if queue:
            self._queues.move_to_end(client)
        else:
            del self._queues[client]
        return item

    def remove(self, matches: Callable[[T], bool]) -> list[T]:
        """Remove all items that match, and return them."""
        removed = [item for item in self if matches(item)]
        queues = ((client, deque(i for i in queue if not matches(i))) for client, queue in self._queues.items())
        self._queues = OrderedDict((client, queue) for client, queue in queues if queue)
        return removed
