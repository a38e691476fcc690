"""Where drafting ahead happens, and what happens when whoever drafts there dies or hangs.

The promise: no call here waits longer than it was told, whatever the worker does, and nothing is left behind when the
engine goes. A worker that dies is started anew after a while, and after longer and longer whiles. One that does not
answer in time is bypassed until it does; one that has not moved for long is ended and started anew.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from .forks import Forker
from .shared_queue import Bell, Mail, Sizes
from .worker import Worker

BACKOFF, LONGEST = 0.25, 30.0  # seconds before a dead worker is started anew: the first time, and at most
HANGS = 10.0  # seconds without a pass, while there is something to do, after which a worker is ended
LOADING = 600.0  # the same while it reads its model
SPARED = 60.0  # seconds of good work after which earlier deaths are forgotten


class Place(ABC):
    """A worker somewhere. Subclasses know how to start one, whether it lives, and how to end it."""

    kind = ""

    def __init__(self, mail: Mail, clock: Callable[[], float] = time.perf_counter) -> None:
        self.mail, self.clock = mail, clock
        self.number, self.posted = 0, 0.0  # of the last request, and when it was sent
        self.starts = self.deaths = self.bypassed = 0  # ever
        self.trouble = ""  # why the last worker ended, in its own words
        self.bell: Bell | None = None  # to ring
        self.ear: Bell | None = None  # to listen at
        self._late = False  # did not answer in time, and has not since
        self._backoff, self._again = BACKOFF, 0.0
        self._moved, self._beat = 0.0, -1  # when it last did something, and what
        self._before = 0  # the last request before it was started: none of its business

    # ------------------------------------------------------------ for the drafter

    @property
    def ready(self) -> bool:
        """Whether it is worth asking: it lives, has read its model and answers in time."""
        if self._late and self.mail.one("answered") == self.number and self.mail.one("published") >= 0:
            self._late = False
        return self.bell is not None and not self._late and self.mail.one("ready") == 1

    def tend(self) -> None:
        """Start, restart or end a worker as needed; never waits. To be called now and then."""
        now = self.clock()
        if self.bell is None:
            if now >= self._again:
                self._begin(now)
        elif not self._alive():
            self._buried(now, self._last_words())
        elif self._stuck(now):
            self._buried(now, f"it had not moved for {HANGS:g} seconds and was ended")
        elif self.deaths and self.mail.one("ready") and now - self._born > SPARED:
            self._backoff = BACKOFF

    def post(self) -> int:
        """What the mailbox asks is a request now; returns its number."""
        if self._idle:
            self._moved = self.clock()
        self.number += 1
        self.posted = self.clock()
        self.mail["number"][0] = self.number
        if self.bell is not None:
            self.bell.ring()
        return self.number

    def wait(self, depth: int, seconds: float) -> bool:
        """Until the last request's answer is so deep (0: its outcomes are known). False: not in time."""
        until = self.clock() + seconds
        while not self.has(depth):
            left = until - self.clock()
            if left <= 0 or self.ear is None or not self.ear.heard(left):
                if self.has(depth):
                    break
                self._late = True
                self.bypassed += 1
                return False
        return True

    def has(self, depth: int) -> bool:
        return self.mail.one("answered") == self.number and self.mail.one("published") >= depth

    def ready_within(self, seconds: float, deaths: int | None = None) -> bool:
        """Wait for a worker to have read its model, or to have died so often: before serving, never in the middle."""
        until = time.perf_counter() + seconds
        while not self.ready and self.deaths != deaths and time.perf_counter() < until:
            self.tend()
            time.sleep(0.01)
        return self.ready

    def close(self) -> None:
        """End the worker; nothing of it stays."""
        self._end()
        self.bell = self.ear = None
        self._again = float("inf")

    # ------------------------------------------------------------ inside

    def _begin(self, now: float) -> None:
        self.mail.clear()
        self.starts += 1
        self._born = self._moved = now
        self._late, self._beat, self._before = False, -1, self.number
        try:
            self.bell, self.ear = self._start()
        except OSError as error:
            self._buried(now, str(error))

    def _buried(self, now: float, words: str) -> None:
        self.deaths += 1
        self.trouble = words
        self._end()
        self.bell = self.ear = None
        self.mail.clear()
        self._again, self._backoff = now + self._backoff, min(2 * self._backoff, LONGEST)

    @property
    def _idle(self) -> bool:
        return self.number in (self._before, self.mail.one("answered")) and not self._late

    def _stuck(self, now: float) -> bool:
        """Has it neither run a pass since we last looked, nor had nothing to do?"""
        beat, loading = self.mail.one("beat"), not self.mail.one("ready")
        if beat != self._beat or (self._idle and not loading):
            self._beat, self._moved = beat, now
        return now - self._moved > (LOADING if loading else HANGS)

    @abstractmethod
    def _start(self) -> tuple[Bell, Bell]:
        """Start a worker; how to ring it, and where it rings."""

    @abstractmethod
    def _alive(self) -> bool:
        """Whether it is still there."""

    @abstractmethod
    def _last_words(self) -> str:
        """Why it ended, as far as it said."""

    @abstractmethod
    def _end(self) -> None:
        """End it, if it has not."""


class Thread(Place):
    """In this process: for models that are only here, and for the target's own GPU, in a stream beside the target's."""

    def __init__(self, sizes: Sizes, make: Callable[[], Forker], device: torch.device | None = None) -> None:
        super().__init__(Mail(sizes, mmap.mmap(-1, sizes.bytes)))
        self.make, self.device = make, device or torch.device("cpu")
        self.kind = "stream" if self.device.type == "cuda" else "thread"
        self._thread: threading.Thread | None = None
        self._pipes: list[int] = []
        self._failed: list[str] = []  # by the worker
        self._release = weakref.finalize(self, _shut, self._pipes)

    def _start(self) -> tuple[Bell, Bell]:
        (heard, ring), (told, tell) = os.pipe(), os.pipe()
        self._pipes[:] = [ring, told]
        self._failed = []
        mail, make, failed, device = self.mail, self.make, self._failed, self.device

        def run() -> None:  # knows nothing of this place, so that dropping it ends the thread
            try:
                with own_stream(device):
                    Worker(mail, make()).serve(Bell(heard), Bell(tell))
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")
            finally:
                _shut([heard, tell])

        self._thread = threading.Thread(target=run, name="ahead", daemon=True)
        self._thread.start()
        return Bell(ring), Bell(told)

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _last_words(self) -> str:
        return self._failed[-1] if self._failed else "it ended"

    def _end(self) -> None:
        _shut(self._pipes)


class Process(Place):
    """A process of its own, which reads the draft model from its file: other cores, or another GPU."""

    kind = "process"

    def __init__(self, sizes: Sizes, spec: dict[str, Any]) -> None:
        self.memory = _memory(sizes.bytes)
        super().__init__(Mail(sizes, mmap.mmap(self.memory.fileno(), sizes.bytes)))
        self.spec = spec | {"sizes": (sizes.lines, sizes.length, sizes.rows)}
        self._running: list[subprocess.Popen[bytes]] = []
        self._words: IO[bytes] | None = None
        self._release = weakref.finalize(self, _kill, self._running)  # also when the interpreter ends

    @property
    def pid(self) -> int | None:
        return self._running[0].pid if self._running else None

    def _start(self) -> tuple[Bell, Bell]:
        home = str(Path(__file__).resolve().parents[3])
        paths = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
        env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(self.spec["threads"])}
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process lives
        fd = self.memory.fileno()
        command = [sys.executable, "-m", "outrider.drafters.ahead.worker", str(fd), json.dumps(self.spec)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            pass_fds=(fd,),
            env=env,
            bufsize=0,
        )
        self._running[:] = [process]
        assert process.stdin is not None
        assert process.stdout is not None
        return Bell(process.stdin.fileno()), Bell(process.stdout.fileno())

    def _alive(self) -> bool:
        return bool(self._running) and self._running[0].poll() is None

    def _last_words(self) -> str:
        """The last line it wrote: an exception says there what went wrong."""
        if self._words is None:
            return "it ended"
        self._words.seek(max(os.fstat(self._words.fileno()).st_size - 2000, 0))
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with status {self._running[0].returncode if self._running else '?'}"

    def _end(self) -> None:
        _kill(self._running)
        if self._words is not None:
            self._words.close()
            self._words = None


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """What this thread starts on a GPU runs beside what others start there; on a CPU there is nothing to do."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=0)  # the least: captured passes of the engine go first
    stream.wait_stream(torch.cuda.default_stream(device))  # weights may still be on their way
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def _shut(pipes: list[int]) -> None:
    for fd in pipes:
        os.close(fd)
    pipes.clear()


def _kill(running: list[subprocess.Popen[bytes]]) -> None:
    """End it now, stopped or not (it has nothing to save), and wait for it: no zombie stays."""
    for process in running:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    running.clear()


def _memory(size: int) -> IO[bytes]:
    """Memory without a name, so that nobody has to remember to remove it."""
    shared = "/dev/shm"
    where = shared if os.access(shared, os.W_OK) else None
    file = tempfile.TemporaryFile(dir=where)  # noqa: SIM115 - as long as its place
    file.truncate(size)
    return file
