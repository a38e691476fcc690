"""From a job's mailbox to the wire: events until the end, as server-sent events or collected, and nobody forgotten.

Promise: however a request ends (its last token, a deadline, a client that hangs up, a bug), its job is cancelled, so
that its slots are free. A stream that has begun ends with a clear error or with [DONE].
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .answers import Letter, Told
from .job import Job, Words
from .live import Script
from .problems import Problem
from .worker import Worker

QUIET = 10.0  # seconds of silence after which a stream says that it is alive
END = b"data: [DONE]\n\n"


async def follow(job: Job, worker: Worker, deadline: float) -> AsyncGenerator[Words | None, None]:
    """Everything that becomes of a job until its last answer has ended; None now and then while nothing happens."""
    left = len(job.answers)
    try:
        while left:
            now = time.monotonic()
            event = await job.mailbox.get(min(QUIET, deadline - now))
            if isinstance(event, Problem):
                raise event
            if event is None and time.monotonic() >= deadline:
                words = f"The answer took longer than {deadline - job.arrived:g} s, the time it was given."
                raise Problem(408, words, "deadline_exceeded", "timeout")
            left -= event is not None and event.finish is not None
            yield event
    finally:
        worker.cancel(job)


async def collect(job: Job, worker: Worker, deadline: float) -> list[Told]:
    told = [Told() for _ in job.answers]
    async with aclosing(follow(job, worker, deadline)) as events:
        async for words in events:
            if words is not None:
                told[words.index].add(words)
    return told


async def unless_gone(request: Request, work: Any) -> Any:
    """The work's result; None if the client hangs up first, and then the work is cancelled."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """One chunk per step, the usage if it was asked for, and an end."""

    media_type = "text/event-stream"

    def __init__(self, letter: Letter, worker: Worker, deadline: float, with_usage: bool) -> None:
        self.letter, self.worker, self.deadline, self.with_usage = letter, worker, deadline, with_usage
        answers, asked = letter.job.answers, letter.asked
        self.scripts = [Script(letter.llm, asked, each) for each in answers] if asked.trace != "off" else []
        super().__init__(self._lines(), headers={"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # a generator that is not run to its end is cleaned up at some later time: this is now
            self.worker.cancel(self.letter.job)

    async def _lines(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(follow(self.letter.job, self.worker, self.deadline)) as events:
                async for words in events:
                    yield b": waiting\n\n" if words is None else await self._told(words)
            if self.with_usage:
                yield _line(self.letter.usage_chunk())
        except Problem as problem:
            yield _line(problem.body())
        yield END

    async def _told(self, words: Words) -> bytes:
        """A chunk, with its lines of the trace where they were asked for; the longer work is not the event loop's."""
        if not self.scripts:
            return _line(self.letter.chunk(words))
        lines = self.scripts[words.index].lines
        trace = await asyncio.to_thread(lines, words) if words.note and words.note.rows else lines(words)
        return _line(self.letter.chunk(words, trace))


def _line(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
