"""What one HTTP request asks of the engine: one or more answers, and a mailbox for what becomes of them.

The engine's thread puts events in, the request's coroutine takes them out. Neither waits for the other.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from ..engine.trace import Line, Note
from ..types import Sequence, Step, TokenLogprob
from .problems import Problem


@dataclass(frozen=True)
class Words:
    """What was added to one of the answers since it was last told of; the last one says why the text ended."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob]  # empty unless they were asked for
    finish: str | None  # stop or length; None while it goes on
    texts: list[str] = field(default_factory=list)  # what each of the tokens released: `text`, apart
    note: Note | None = None  # of the step, where its trace was asked for


class Taping(Protocol):
    """Whoever keeps what a sequence does, for its own client to see."""

    def note(self, step: Step, i: int) -> Note | None: ...

    def line(self, note: Note) -> Line: ...


class Mailbox:
    """Made by a coroutine; filled from any thread, and read where it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Words | Problem] = asyncio.Queue()

    def put(self, event: Words | Problem) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody is left to read
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def get(self, seconds: float) -> Words | Problem | None:
        """The next event; None if there is none for so long."""
        if not self._events.empty():
            return self._events.get_nowait()  # waiting with a limit costs a task
        try:
            return await asyncio.wait_for(self._events.get(), max(seconds, 0.0))
        except TimeoutError:
            return None


@dataclass(eq=False)
class Answer:
    """One of a job's answers. Times are `time.monotonic`; 0 where it has not happened."""

    job: Job
    index: int
    seq: Sequence
    tape: Taping | None = None  # where its trace was asked for
    told: int = 0  # tokens that the client knows of
    started: float = 0.0  # it got a place in the batch
    first: float = 0.0  # its first token
    latest: float = 0.0  # its latest one
    ended: float = 0.0
    finish: str = ""  # stop, length, cancelled, error


@dataclass(eq=False)
class Job:
    """`client` is whose turn it is when clients take turns; `streams`: every step is told, not only the end."""

    id: str
    client: str
    streams: bool
    mailbox: Mailbox
    arrived: float = field(default_factory=time.monotonic)
    answers: list[Answer] = field(default_factory=list)

    def add(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.answers.append(Answer(self, len(self.answers), seq))
