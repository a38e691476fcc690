"""The shared-memory queue between the engine and the worker that drafts for it, and the engine's side of it.

Each sequence has a lane. Its tokens are written once; only its length moves. A request names lanes, the draft under
verification of each (the trunk) and the number of forks at each index of it. A response has a row for each outcome and
grows one token deeper with each pass. There are no locks: readers compare request numbers, and data read in the middle
of a write is a bad draft, which costs speed and nothing else. Bytes over pipes only mean "look again".
"""

from __future__ import annotations

import math
import os
import pickle
import select
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...types import Sequence
from .forks import NO_TILT, SUPPORT, DraftDistribution, Tilt

MAX_TRUNK, MAX_DEPTH, SETTINGS_BYTES = 64, 32, 4096  # drafted tokens, tokens of a prepared chain
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class QueueSizes:
    """What a queue has room for."""

    lanes: int  # sequences
    length: int  # tokens of each
    rows: int  # outcomes of a response, all sequences together

    def fields(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        one, each = (1,), (self.lanes,)
        return {
            # written by the engine
            "request": ("i8", one),  # number of the last request
            "depth": ("i4", one),
            "just_in_time": ("i4", one),  # 1: nothing is being verified; the one fork is the draft's first token
            "tilt": ("f8", (2,)),  # `forks.Tilt`
            "trunk_length": ("i4", each),  # -1: not in this request
            "trunk": ("i4", (self.lanes, MAX_TRUNK)),
            "forks": ("i4", (self.lanes, MAX_TRUNK + 1)),
            "sequence": ("i8", each),  # id, -1: free
            "version": ("i8", each),  # rises when a lane is given to another text
            "length": ("i4", each),
            "tokens": ("i4", (self.lanes, self.length)),
            "settings": ("u1", (self.lanes, SETTINGS_BYTES)),
            # written by the worker
            "answered": ("i8", one),  # number of the request that it works on
            "published": ("i4", one),  # tokens of every chain that can be read; -1: not even the outcomes
            "count": ("i4", one),  # rows in use
            "keys": ("i4", (self.rows, 3)),  # `Outcome`
            "probability": ("f4", (self.rows,)),  # of the outcome's token, according to the draft model
            "chains": ("i4", (self.rows, MAX_DEPTH)),
            "survival": ("f4", (self.rows, MAX_DEPTH)),
            # Draft distributions of the outcome's token and of the chain. Pages never written take no memory.
            "q_ids": ("i4", (self.rows, MAX_DEPTH + 1, SUPPORT)),
            "q": ("f8", (self.rows, MAX_DEPTH + 1, SUPPORT)),  # 0: no token
            "heartbeat": ("i8", one),  # passes run in total
            "recorded": ("i8", one),  # passes captured in total; each takes as long as dozens of replays
            "ready": ("i4", one),
            "seconds": ("f8", (3,)),  # of the round so far, of its first pass, of one more depth
            "times": ("f8", (MAX_DEPTH + 2,)),  # of the start, of the outcomes, of each depth
            "bytes": ("i8", (2,)),  # weights, K/V
        }

    @property
    def bytes(self) -> int:
        return sum(_field_bytes(*field) for field in self.fields().values())


def _field_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Rounded up to whole cache lines, so that engine and worker never write to the same one."""
    return -(-np.dtype(dtype).itemsize * math.prod(shape) // 64) * 64


class Outcome(NamedTuple):
    """What a verdict may leave behind: the key of a prepared draft."""

    lane: int
    accepted: int
    token: int


class SharedQueue:
    """The fields by name, over any buffer."""

    def __init__(self, sizes: QueueSizes, buffer: Any) -> None:
        self.sizes, offset = sizes, 0
        self.fields: dict[str, Array] = {}
        for name, (dtype, shape) in sizes.fields().items():
            flat = np.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=offset)
            self.fields[name] = flat.reshape(shape)
            offset += _field_bytes(dtype, shape)

    def __getitem__(self, name: str) -> Array:
        return self.fields[name]

    def scalar(self, name: str) -> int:
        return int(self.fields[name][0])

    def reset_worker(self) -> None:
        """The state before a worker starts."""
        for name in ("answered", "heartbeat", "recorded", "ready", "count"):
            self.fields[name][0] = 0
        self.fields["published"][0] = -1

    def find(self, outcome: Outcome) -> tuple[int | None, int | None, int]:
        """The row of an outcome, its rank (from 1) among the forks after as many accepted tokens, and their number."""
        keys = self["keys"][: self.scalar("count")]
        rows = np.flatnonzero((keys[:, :2] == outcome[:2]).all(1))
        hits = np.flatnonzero(keys[rows, 2] == outcome.token)
        return (int(rows[hits[0]]), int(hits[0]) + 1, len(rows)) if hits.size else (None, None, len(rows))

    def write_q(self, row: int, index: int, q: DraftDistribution | None) -> None:
        """What a row's token was sampled from (index 0: the outcome's token); None: it was not sampled."""
        if q is not None:
            count = len(q.ids)
            self["q"][row, index] = 0.0
            self["q_ids"][row, index, :count] = q.ids.numpy()
            self["q"][row, index, :count] = q.probabilities.numpy()

    def read_q(self, row: int, indices: range, vocabulary: int) -> Tensor:
        """The same for several tokens, over all ids. [n, V] float64"""
        part = slice(indices.start, indices.stop)
        ids, q = (torch.from_numpy(self[name][row, part].copy()) for name in ("q_ids", "q"))  # [n, SUPPORT]
        return torch.zeros(len(indices), vocabulary, dtype=torch.float64).scatter_add_(1, ids.long(), q)


class PipeEnd:
    """One end of a pipe over which one side wakes the other."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        if sys.platform != "win32":  # where `setup` refuses to draft ahead: its pipes cannot be waited for
            os.set_blocking(fd, False)

    def notify(self) -> None:
        """Never blocks: a full pipe is a notification already, and the other side may have closed it."""
        with suppress(OSError):
            os.write(self.fd, b".")

    def wait(self, seconds: float | None) -> bool:
        """Wait for a notification (None: without a limit). False: the other side has closed the pipe."""
        if sys.platform != "win32":
            poll = select.poll()
            poll.register(self.fd, select.POLLIN)
            if not poll.poll(None if seconds is None else max(seconds, 0.0) * 1e3):
                return True
        try:
            return bool(os.read(self.fd, 65536))
        except OSError as error:
            return isinstance(error, BlockingIOError)


@dataclass
class Lane:
    """What has been written of a text, and where."""

    index: int
    tokens: list[int]  # the sequence's own list, which only grows
    written: int = 0
    tail: list[int] | None = None  # the last tokens written


@dataclass(frozen=True)
class OutcomeRequest:
    """Prepare for the outcomes of this draft."""

    seq: Sequence
    trunk: list[int]
    forks: list[int]  # [len(trunk) + 1]


@dataclass(frozen=True)
class SentRequest:
    """A request as it was written: enough to tell which outcome occurred."""

    lane: int
    root: int  # tokens of the text
    trunk: list[int]

    def outcome(self, tokens: list[int]) -> Outcome | None:
        """The outcome that led to this text; None where none of the possible ones did."""
        new = tokens[self.root :]
        accepted = len(new) - 1
        if not 0 <= accepted <= len(self.trunk) or new[:accepted] != self.trunk[:accepted]:
            return None
        return Outcome(self.lane, accepted, new[-1])


class Channel:
    """Writes sequences and requests to a queue; the lane that was used least recently is given away first."""

    def __init__(self, queue: SharedQueue) -> None:
        self.queue = queue
        self.lanes: dict[int, Lane] = {}  # by sequence id, least recently used first
        self.free = list(range(queue.sizes.lanes))
        self.version = 0
        queue["sequence"][:] = -1
        queue["trunk_length"][:] = -1

    def write(self, seq: Sequence) -> int | None:
        """Bring a sequence's lane up to date; returns its index, or None where its text or settings do not fit."""
        tokens, queue = seq.tokens, self.queue
        if len(tokens) > queue.sizes.length:
            return None
        lane = self.lanes.get(seq.id)
        if lane and (tokens is not lane.tokens or tokens[max(lane.written - 8, 0) : lane.written] != lane.tail):
            self.drop(seq.id)  # the text was replaced
        lane = self.lanes.pop(seq.id, None) or self._open(seq)
        if lane is None:
            return None
        self.lanes[seq.id] = lane
        queue["tokens"][lane.index, lane.written : len(tokens)] = tokens[lane.written :]
        queue["length"][lane.index] = len(tokens)
        lane.written, lane.tail = len(tokens), tokens[-8:]
        return lane.index

    def drop(self, sequence: int) -> None:
        lane = self.lanes.pop(sequence, None)
        if lane is not None:
            self.queue["sequence"][lane.index] = -1
            self.free.append(lane.index)

    def request(
        self, requests: list[OutcomeRequest], depth: int, just_in_time: bool = False, tilt: Tilt = NO_TILT
    ) -> dict[int, SentRequest]:
        """Write a request, which `WorkerHost.submit` sends. Returns what was written, by sequence id."""
        queue, sent = self.queue, {}
        queue["just_in_time"][0], queue["tilt"][:] = just_in_time, tilt
        queue["trunk_length"][:] = -1
        queue["depth"][0] = depth
        for request in requests:
            lane = self.write(request.seq)
            if lane is not None:
                trunk = request.trunk[:MAX_TRUNK]
                queue["trunk"][lane, : len(trunk)] = trunk
                queue["forks"][lane, : len(trunk) + 1] = request.forks[: len(trunk) + 1]
                queue["trunk_length"][lane] = len(trunk)
                sent[request.seq.id] = SentRequest(lane, len(request.seq.tokens), trunk)
        return sent

    def _open(self, seq: Sequence) -> Lane | None:
        names = ("params", "seed", "ends", "bad_words", "rule", "prompt_len")  # what a drafter needs besides the tokens
        settings = pickle.dumps({name: getattr(seq, name) for name in names})
        if len(settings) > SETTINGS_BYTES:
            return None
        if not self.free:
            self.drop(next(iter(self.lanes)))
        index, queue = self.free.pop(), self.queue
        self.version += 1
        queue["length"][index] = 0
        queue["settings"][index, : len(settings)] = memoryview(settings)
        queue["sequence"][index], queue["version"][index] = seq.id, self.version
        return Lane(index, seq.tokens)
