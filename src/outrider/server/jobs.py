"""A request on its way through the engine: its choices, their events, the queue they wait in, their listeners.

The engine's thread writes events, the request's coroutine reads them; neither waits for the other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..engine.trace import Line, Note
from ..types import Sequence, Step, TokenLogprob
from .errors import ApiError

MAX_PENDING_ROWS = 64  # rows of logits that may wait to become trace lines, per choice
T = TypeVar("T")


@dataclass(frozen=True)
class Delta:
    """What was added to one choice since the last delta. The last one has `finish`."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]  # empty unless requested
    finish: str | None  # stop or length; None while it goes on
    texts: list[str] = field(default_factory=list)  # the text that each token released; joined, they are `text`
    note: Note | None = None  # the step, where its trace is streamed


class EventQueue:
    """Created in a coroutine, filled from any thread, read where it was created."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Delta | ApiError] = asyncio.Queue()

    def put(self, event: Delta | ApiError) -> None:
        with suppress(RuntimeError):  # the loop is closed: there is no reader
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def get(self, seconds: float) -> Delta | ApiError | None:
        """The next event; None if there is none within `seconds`."""
        if not self._events.empty():
            return self._events.get_nowait()  # `wait_for` creates a task
        try:
            return await asyncio.wait_for(self._events.get(), max(seconds, 0.0))
        except TimeoutError:
            return None


class StepNotes:
    """Copies one sequence's part of each step, for its own client's trace. It sees no other sequence.

    The engine's thread only copies (`note`); lines are computed by the reader (`line`). For a client that reads too
    slowly the logits are dropped, and its lines lack what the target computed.
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


@dataclass(eq=False)
class Choice:
    """One of a job's answers, as in OpenAI's `choices`. Times are `time.monotonic`; 0: not yet."""

    job: Job
    index: int
    seq: Sequence
    notes: StepNotes | None = None  # where its trace is streamed
    sent: int = 0  # tokens in the deltas so far
    started: float = 0.0  # admitted to the batch
    first: float = 0.0  # first token
    latest: float = 0.0  # latest token
    ended: float = 0.0
    finish: str = ""  # stop, length, cancelled, error


@dataclass(eq=False)
class Job:
    """One HTTP request. `client` is its key in the fair queue; `streams`: a delta per step, not only at the end."""

    id: str
    client: str
    streams: bool
    events: EventQueue
    arrived: float = field(default_factory=time.monotonic)
    choices: list[Choice] = field(default_factory=list)

    def add(self, seqs: list[Sequence], trace_level: str = "off") -> None:
        for seq in seqs:
            notes = StepNotes(seq, trace_level) if trace_level != "off" else None
            self.choices.append(Choice(self, len(self.choices), seq, notes))


class Listener:
    """Called on the engine's thread after each step and when a choice has ended. What it raises is only logged."""

    def on_step(self, step: Step) -> None: ...

    def on_end(self, choice: Choice) -> None: ...


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
