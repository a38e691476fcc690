"""The worker that answers requests, and its hosts, which run it in a thread or a process and supervise it.

The worker publishes a response one depth at a time. A new request replaces the current one, which is abandoned after
the pass in progress. Promises: no call waits longer than its deadline, whatever the worker does, and no worker outlives
the engine. A worker that dies is restarted with exponential backoff. One that misses a deadline is bypassed until it
answers. One that makes no progress for HANG_TIMEOUT is ended and restarted. All times are in seconds.

    python -m outrider.drafters.ahead.worker FD JSON   # as `ProcessHost` starts it: shared memory, and what to load
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from ...backends import Model, Part
from ...backends.cuda.capture import Driver
from ...backends.loaded_weights import weight_bytes
from ...types import Sequence
from .forks import Forker, ForkPlan, Tilt
from .shared_queue import MAX_DEPTH, PipeEnd, QueueSizes, SharedQueue

BACKOFF, MAX_BACKOFF = 0.25, 30.0  # before a dead worker is restarted: the first time, and at most
BACKOFF_RESET = 60.0  # after so long without a failure the backoff starts over
HANG_TIMEOUT = 10.0  # without a pass while a request is pending
LOAD_TIMEOUT = 600.0  # the same while the model is read


@dataclass
class Worker:
    """Answers requests with a draft model."""

    queue: SharedQueue
    forker: Forker
    lanes: dict[int, tuple[int, Sequence]] = field(default_factory=dict)  # version and sequence, as last read

    def serve(self, from_engine: PipeEnd, to_engine: PipeEnd) -> None:
        """Answer requests until the engine closes its pipe."""
        queue, last = self.queue, 0
        self.forker.before_pass = self._beat
        queue["bytes"][1] = self.forker.plane.bytes
        queue["ready"][0] = 1
        to_engine.notify()
        while from_engine.wait(None):
            number = queue.scalar("request")
            if number != last:
                last = number
                self._answer(number, to_engine)

    def _beat(self) -> None:
        self.queue["heartbeat"][0] += 1

    def _answer(self, number: int, to_engine: PipeEnd) -> None:
        queue, begin = self.queue, time.perf_counter()
        queue["published"][0] = -1
        queue["answered"][0] = number
        for lane in [lane for lane in self.lanes if queue["sequence"][lane] < 0]:
            self._drop(lane)
        limit, (forks, share) = min(queue.scalar("depth"), MAX_DEPTH), queue["tilt"].tolist()
        self.forker.tilt = Tilt(int(forks), share)
        lanes = np.flatnonzero(queue["trunk_length"] >= 0)
        plans = [plan for lane in lanes if (plan := self._plan(int(lane))) is not None]
        first, queue["times"][0] = 0.0, begin
        for depth in self.forker.grow(plans, limit):
            queue["times"][depth + 1] = now = time.perf_counter()
            seconds = now - begin
            first = first if depth else seconds
            queue["seconds"][:] = seconds, first, (seconds - first) / max(depth, 1)
            self._publish(plans, depth)
            to_engine.notify()
            if queue.scalar("request") != number:
                return

    def _publish(self, plans: list[ForkPlan], depth: int) -> None:
        queue, row = self.queue, 0
        for plan in plans:
            for branch in plan.branches:
                if row == queue.sizes.rows:
                    break
                queue.write_q(row, depth, branch.q[depth])
                if not depth:
                    queue["keys"][row] = plan.lane, branch.accepted, branch.token
                    queue["probability"][row] = branch.probability
                else:
                    queue["chains"][row, depth - 1] = branch.chain[-1]
                    queue["survival"][row, depth - 1] = branch.survival[-1]
                row += 1
        queue["count"][0], queue["recorded"][0] = row, len(getattr(self.forker.passes, "passes", ()))
        queue["published"][0] = depth

    def _plan(self, lane: int) -> ForkPlan | None:
        """A lane's part of the request, with its sequence brought up to date."""
        queue = self.queue
        version, length = int(queue["version"][lane]), int(queue["length"][lane])
        read, seq = self.lanes.get(lane, (-1, None))
        if seq is None or read != version or length < len(seq.tokens):
            self._drop(lane)
            try:
                settings = pickle.loads(queue["settings"][lane].tobytes())
            except Exception:  # read in the middle of a write: the next request reads it again
                return None
            seq = Sequence(id=lane, tokens=[], **settings)
            seq.tokens = queue["tokens"][lane, :length].tolist()
            self.lanes[lane] = version, seq
            self.forker.open(seq, int(queue["sequence"][lane]))
        else:
            self.forker.extend(seq, queue["tokens"][lane, len(seq.tokens) : length].tolist())
        drafted = int(queue["trunk_length"][lane])
        trunk, forks = queue["trunk"][lane, :drafted].tolist(), queue["forks"][lane, : drafted + 1].tolist()
        return ForkPlan(seq, trunk, forks, lane, bool(queue.scalar("just_in_time"))) if seq.tokens else None

    def _drop(self, lane: int) -> None:
        if lane in self.lanes:
            self.forker.close(self.lanes.pop(lane)[1])


def build_forker(model: Model, spec: dict[str, Any]) -> Forker:
    """On a GPU it runs captured passes in the current stream and records the usual ones at once."""
    skip = frozenset(spec["skip_layers"])
    part = Part(skip_attention=skip, skip_mlp=skip)
    forker = Forker(model, spec["slots"], spec["lanes"], spec["length"], part, spec["vocabulary"])
    forker.target_noise = spec["target_noise"]
    if model.device.type == "cuda":
        from ...backends.cuda.graphs import Graphs  # needs triton, which is not installed everywhere
        from ...backends.cuda.state import DeviceState

        forker.passes = Graphs(model, forker.plane, DeviceState(forker.cache, Driver(model.device), spec["lanes"]))
        forker.warm_up()
    return forker


class WorkerHost(ABC):
    """One worker and its queue. Subclasses start it (returning the pipes to it and from it), check and stop it."""

    kind = ""

    def __init__(self, queue: SharedQueue, clock: Callable[[], float] = time.perf_counter) -> None:
        self.queue, self.clock = queue, clock
        self.request, self.submitted = 0, 0.0  # number of the last request, and when it was sent
        self.starts = self.deaths = self.bypassed = 0  # in total
        self.trouble = ""  # why the last worker ended
        self.to_worker: PipeEnd | None = None  # None: there is no worker
        self.from_worker: PipeEnd | None = None
        self._late = False  # has missed a deadline and not answered since
        self._backoff, self._restart_at = BACKOFF, 0.0
        self._started = self._progress_at = 0.0
        self._heartbeat = -1
        self._ignored = 0  # the last request before the worker was started, which it never answers

    @property
    def ready(self) -> bool:
        """Whether a worker lives, has read its model and answers in time."""
        if self._late and self.has(0):
            self._late = False
        return self.to_worker is not None and not self._late and self.queue.scalar("ready") == 1

    def supervise(self) -> None:
        """Start, restart or end a worker as needed. Never waits; to be called in every step."""
        now = self.clock()
        if self.to_worker is None:
            if now >= self._restart_at:
                self._launch(now)
        elif not self._alive():
            self._failed(now, self._exit_reason())
        elif self._hangs(now):
            self._failed(now, f"it made no progress for {HANG_TIMEOUT:g} seconds and was ended")
        elif self.deaths and self.queue.scalar("ready") and now - self._started > BACKOFF_RESET:
            self._backoff = BACKOFF

    def submit(self) -> None:
        """Send what the queue's request fields hold as a new request."""
        if self._idle:
            self._progress_at = self.clock()
        self.request += 1
        self.submitted = self.clock()
        self.queue["request"][0] = self.request
        if self.to_worker is not None:
            self.to_worker.notify()

    def has(self, depth: int) -> bool:
        """Whether the last request's response is this deep; 0: its outcomes are known."""
        return self.queue.scalar("answered") == self.request and self.queue.scalar("published") >= depth

    def wait(self, depth: int, seconds: float) -> bool:
        """Wait until `has(depth)`. False: not within this time; the worker is then bypassed until it answers."""
        deadline = self.clock() + seconds
        while not self.has(depth):
            left = deadline - self.clock()
            if left <= 0 or self.from_worker is None or not self.from_worker.wait(left):
                if self.has(depth):
                    break
                self._late = True
                self.bypassed += 1
                return False
        return True

    def wait_ready(self, seconds: float, deaths: int | None = None) -> bool:
        """Wait until a worker is ready, or this many have died. For start-up, not for a step."""
        deadline = time.perf_counter() + seconds
        while not self.ready and self.deaths != deaths and time.perf_counter() < deadline:
            self.supervise()
            time.sleep(0.01)
        return self.ready

    def close(self) -> None:
        """End the worker for good."""
        self._stop()
        self.to_worker = self.from_worker = None
        self._restart_at = float("inf")

    def _launch(self, now: float) -> None:
        self.queue.reset_worker()
        self.starts += 1
        self._started = self._progress_at = now
        self._late, self._heartbeat, self._ignored = False, -1, self.request
        try:
            self.to_worker, self.from_worker = self._start()
        except OSError as error:
            self._failed(now, str(error))

    def _failed(self, now: float, reason: str) -> None:
        self.deaths += 1
        self.trouble = reason
        self.close()
        self.queue.reset_worker()
        self._restart_at, self._backoff = now + self._backoff, min(2 * self._backoff, MAX_BACKOFF)

    @property
    def _idle(self) -> bool:
        return self.request in (self._ignored, self.queue.scalar("answered")) and not self._late

    def _hangs(self, now: float) -> bool:
        """Whether it has work and has run no pass for too long."""
        heartbeat, loading = self.queue.scalar("heartbeat"), not self.queue.scalar("ready")
        if heartbeat != self._heartbeat or (self._idle and not loading):
            self._heartbeat, self._progress_at = heartbeat, now
        return now - self._progress_at > (LOAD_TIMEOUT if loading else HANG_TIMEOUT)

    @abstractmethod
    def _start(self) -> tuple[PipeEnd, PipeEnd]: ...

    @abstractmethod
    def _alive(self) -> bool: ...

    @abstractmethod
    def _exit_reason(self) -> str: ...

    @abstractmethod
    def _stop(self) -> None: ...


class ThreadHost(WorkerHost):
    """A thread of this process: for models in memory, and for the target's own GPU, in a second stream."""

    def __init__(self, sizes: QueueSizes, make: Callable[[], Forker], device: torch.device | None = None) -> None:
        super().__init__(SharedQueue(sizes, mmap.mmap(-1, sizes.bytes)))
        self.make, self.device = make, device or torch.device("cpu")
        self.kind = "stream" if self.device.type == "cuda" else "thread"
        self._thread: threading.Thread | None = None
        self._pipes: list[int] = []
        self._errors: list[str] = []
        self._release = weakref.finalize(self, _close_all, self._pipes)

    def _start(self) -> tuple[PipeEnd, PipeEnd]:
        (from_engine, to_worker), (from_worker, to_engine) = os.pipe(), os.pipe()
        self._pipes[:] = [to_worker, from_worker]
        self._errors = []
        queue, make, errors, device = self.queue, self.make, self._errors, self.device

        def run() -> None:  # holds no reference to the host, so that dropping the host ends the thread
            try:
                with own_stream(device):
                    Worker(queue, make()).serve(PipeEnd(from_engine), PipeEnd(to_engine))
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            finally:
                _close_all([from_engine, to_engine])

        self._thread = threading.Thread(target=run, name="ahead", daemon=True)
        self._thread.start()
        return PipeEnd(to_worker), PipeEnd(from_worker)

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _exit_reason(self) -> str:
        return self._errors[-1] if self._errors else "it ended"

    def _stop(self) -> None:
        _close_all(self._pipes)


class ProcessHost(WorkerHost):
    """A process that reads the draft model from its file: for other cores, or another GPU."""

    kind = "process"

    def __init__(self, sizes: QueueSizes, spec: dict[str, Any]) -> None:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.memory = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - as long as the host lives
        self.memory.truncate(sizes.bytes)
        super().__init__(SharedQueue(sizes, mmap.mmap(self.memory.fileno(), sizes.bytes)))
        self.spec = spec | {"sizes": (sizes.lanes, sizes.length, sizes.rows)}
        self._running: list[subprocess.Popen[bytes]] = []
        self._stderr: IO[bytes] | None = None
        self._release = weakref.finalize(self, _kill_all, self._running)  # also when the interpreter ends

    def _start(self) -> tuple[PipeEnd, PipeEnd]:
        package_root = str(Path(__file__).resolve().parents[3])
        paths = os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH"))))
        env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(self.spec["threads"])}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        fd = self.memory.fileno()
        command = [sys.executable, "-m", "outrider.drafters.ahead.worker", str(fd), json.dumps(self.spec)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._stderr, pass_fds=(fd,), env=env, bufsize=0
        )
        self._running[:] = [process]
        assert process.stdin is not None
        assert process.stdout is not None
        return PipeEnd(process.stdin.fileno()), PipeEnd(process.stdout.fileno())

    def _alive(self) -> bool:
        return bool(self._running) and self._running[0].poll() is None

    def _exit_reason(self) -> str:
        """The last line of its stderr, where Python writes an exception's message; else its exit status."""
        if self._stderr is None:
            return "it ended"
        self._stderr.seek(max(os.fstat(self._stderr.fileno()).st_size - 2000, 0))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with status {self._running[0].returncode if self._running else '?'}"

    def _stop(self) -> None:
        _kill_all(self._running)
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """On a GPU, run this thread's work in a new stream, beside the engine's; on a CPU do nothing."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device, priority=0)  # the lowest: the engine's captured passes go first
    stream.wait_stream(torch.cuda.default_stream(device))  # weights may still be copied there
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()


def _kill_all(running: list[subprocess.Popen[bytes]]) -> None:
    """SIGKILL also ends a stopped process, and a worker has nothing to save; waiting for it leaves no zombie."""
    for process in running:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    running.clear()


def main(memory: int, spec: dict[str, Any]) -> None:
    """The worker process: `spec` says which file to load, and how."""
    from ...backends.load import load_model
    from ...backends.machine import choose_device, prepare
    from ...models.checkpoint import open_checkpoint

    to_engine = PipeEnd(os.dup(1))
    os.dup2(2, 1)  # what libraries print must not go into the pipe
    torch.set_num_threads(spec["threads"])
    sizes = QueueSizes(*spec["sizes"])
    queue = SharedQueue(sizes, mmap.mmap(memory, sizes.bytes))
    prepare()
    device = choose_device(spec["device"])
    model = load_model(open_checkpoint(spec["model"]), spec["dtype"], spec["length"], device=device)
    forker = build_forker(model, spec)
    queue["bytes"][0] = weight_bytes(model)
    Worker(queue, forker).serve(PipeEnd(0), to_engine)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
