"""Answers by several processes on one device: a small target leaves most of it idle while one host thinks.

Promise: the same answers as one process would have written; a process that dies loses what it had not written, and the
next run asks for it again. Each writes a store of its own, which is absorbed into the whole one at the end, or at the
next start. It knows shares of the work, not how an answer is made.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ..errors import OutriderError
from .answers import Asked, Counted, Store

_GLANCE = 0.5  # seconds between two looks at how far everybody is


class Job(Protocol):
    """What a process does: add to a store what comes from the queue, which is some of what is wanted."""

    def __call__(
        self, wanted: list[Asked], queue: Iterable[Asked], store: Store, counted: Counted, stop: Callable[[], bool]
    ) -> None: ...


def absorb_parts(store: Store) -> None:
    """Take over what an interrupted crowd has left."""
    for path in sorted(store.path.parent.glob(f"{store.path.name}.part*")):
        store.absorb(Store(path, store.header))


def together(
    job: Job, wanted: list[Asked], store: Store, workers: int, counted: Counted, stop: Callable[[], bool]
) -> None:
    """Everybody takes the next answer that nobody has taken; ends when all have ended."""
    spawn = multiprocessing.get_context("spawn")
    halt, counts, taken = spawn.Event(), spawn.Array("q", 2 * workers), spawn.Value("q", 0)
    shared = (job, wanted, store.path, store.header, counts, taken, halt)
    crowd = [spawn.Process(target=_work, args=(i, *shared), daemon=True) for i in range(workers)]
    for process in crowd:
        process.start()
    try:
        while any(process.is_alive() for process in crowd):
            if stop():
                halt.set()
            for process in crowd:
                process.join(_GLANCE / workers)
            counted(sum(counts[::2]), sum(counts[1::2]))
    finally:
        halt.set()
        for process in crowd:
            process.join()
    absorb_parts(store)
    died = [process.exitcode for process in crowd if process.exitcode]
    if died and not stop():
        raise OutriderError(
            f"{len(died)} of {workers} processes that generate answers ended early (exit status {died[0]}; see above). "
            "What they wrote is kept; try again with --resume and fewer --workers."
        )


def _work(
    number: int, job: Job, wanted: list[Asked], path: Path, header: dict[str, Any], counts: Any, taken: Any, halt: Any
) -> None:
    """One process. It must be possible to send all of this to it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    def counted(answers: int, tokens: int) -> None:
        counts[2 * number], counts[2 * number + 1] = answers, tokens

    part = Store(path.with_name(f"{path.name}.part{number}"), header)
    job(wanted, _untaken(wanted, taken), part, counted, halt.is_set)


def _untaken(wanted: list[Asked], taken: Any) -> Iterator[Asked]:
    """What nobody has begun, as long as there is any. `taken` counts for everybody."""
    while True:
        with taken.get_lock():
            at, taken.value = taken.value, taken.value + 1
        if at >= len(wanted):
            return
        yield wanted[at]
