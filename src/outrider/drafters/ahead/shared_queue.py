"""Ids and lengths between an engine and whoever drafts for it, in plain memory that both see.

Tokens of a text are written once, where they stay: a line is a sequence, and only its length moves. A request says
which lines to prepare, from which draft, with how many forks at each place; an answer has a row for each outcome, and
grows deeper while it is read. No tensor of the vocabulary's size crosses over: a law is a few ids and their chances.

Whoever reads checks the request's number; what is read in the middle of a write is a bad draft, which costs a little
speed and nothing else. Bytes over pipes only say "look again": they are never waited for by whoever writes them.
"""

from __future__ import annotations

import math
import os
import select
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .laws import SHORT, Law

TRUNK, DEPTH, SETTINGS = 64, 32, 4096  # drafted tokens, tokens of a prepared chain, bytes of a request's parameters
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sizes:
    """What a mailbox holds."""

    lines: int  # sequences at once
    length: int  # tokens of each
    rows: int  # outcomes of an answer, all sequences together

    def fields(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        one, many = (1,), (self.lines,)
        return {
            # the engine writes
            "number": ("i8", one),
            "depth": ("i4", one),
            "now": ("i4", one),  # 1: nothing is being verified, a draft is asked for
            "tilt": ("f8", (2,)),  # of what is drawn: `laws.Tilt`
            "asked": ("i4", many),  # trunk length of each line, -1: not asked
            "trunk": ("i4", (self.lines, TRUNK)),
            "forks": ("i4", (self.lines, TRUNK + 1)),
            "owner": ("i8", many),  # sequence id, -1: nobody
            "edition": ("i8", many),  # rises when a line is written anew
            "length": ("i4", many),
            "tokens": ("i4", (self.lines, self.length)),
            "settings": ("u1", (self.lines, SETTINGS)),
            # the worker writes
            "answered": ("i8", one),
            "published": ("i4", one),  # tokens of every chain that are there; -1: not even the outcomes
            "count": ("i4", one),
            "keys": ("i4", (self.rows, 3)),  # line, accepted length, token
            "odds": ("f4", (self.rows,)),  # how likely the drafter thinks that token
            "chains": ("i4", (self.rows, DEPTH)),
            "survival": ("f4", (self.rows, DEPTH)),
            # Of what was drawn: the outcome's own token, then the chain. Memory that is never written costs nothing.
            "law_ids": ("i4", (self.rows, DEPTH + 1, SHORT)),
            "law": ("f8", (self.rows, DEPTH + 1, SHORT)),  # 0: no such token
            "beat": ("i8", one),  # passes run, ever
            "recorded": ("i8", one),  # passes captured, ever: each takes as long as dozens
            "ready": ("i4", one),
            "seconds": ("f8", (3,)),  # of the round so far; of its first pass; of one more depth
            "times": ("f8", (DEPTH + 2,)),  # when it began, when the outcomes were known, when each depth was there
            "bytes": ("i8", (2,)),  # weights, K/V
        }

    @property
    def bytes(self) -> int:
        return sum(_room(*field) for field in self.fields().values())


class Mail:
    """The fields by name, over any buffer."""

    def __init__(self, sizes: Sizes, buffer: Any) -> None:
        self.sizes, at = sizes, 0
        self.of: dict[str, Array] = {}
        for name, (kind, shape) in sizes.fields().items():
            count = math.prod(shape)
            self.of[name] = np.frombuffer(buffer, dtype=kind, count=count, offset=at).reshape(shape)
            at += _room(kind, shape)

    def __getitem__(self, name: str) -> Array:
        return self.of[name]

    def one(self, name: str) -> int:
        return int(self.of[name][0])

    def clear(self) -> None:
        """As nobody had ever answered: for a worker that starts."""
        for name in ("answered", "beat", "recorded", "ready", "count"):
            self.of[name][0] = 0
        self.of["published"][0] = -1


class Outcome(NamedTuple):
    """What a verdict may leave behind: the key of the cache of outcomes."""

    line: int
    accepted: int
    token: int


def find(mail: Mail, outcome: Outcome) -> int | None:
    """The row that was prepared for this outcome."""
    rows = np.flatnonzero((mail["keys"][: mail.one("count")] == outcome).all(1))
    return int(rows[0]) if rows.size else None


def rank(mail: Mail, outcome: Outcome) -> tuple[int | None, int]:
    """Which of the forks at its place an outcome was (from 1), and how many there were."""
    keys = mail["keys"][: mail.one("count")]
    here = keys[(keys[:, 0] == outcome.line) & (keys[:, 1] == outcome.accepted), 2]
    hits = np.flatnonzero(here == outcome.token)
    return (int(hits[0]) + 1 if hits.size else None), len(here)


def write_law(mail: Mail, row: int, place: int, law: Law | None) -> None:
    """What the place-th token of a row was drawn from (0: the outcome's own); nothing where it was not drawn."""
    if law is not None:
        count = len(law.ids)
        mail["law"][row, place] = 0.0
        mail["law_ids"][row, place, :count] = law.ids.numpy()
        mail["law"][row, place, :count] = law.chances.numpy()


def read_laws(mail: Mail, row: int, places: range, vocabulary: int) -> Tensor:
    """The same for so many places, over all ids. [n, V] float64"""
    at = slice(places.start, places.stop)
    ids, chances = (torch.from_numpy(mail[name][row, at].copy()) for name in ("law_ids", "law"))  # [n, SHORT]
    return torch.zeros(len(places), vocabulary, dtype=torch.float64).scatter_add_(1, ids.long(), chances)


class Bell:
    """A pipe that wakes the other side."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        os.set_blocking(fd, False)

    def ring(self) -> bool:
        """False when nobody is there any more. A full pipe has rung already."""
        try:
            os.write(self.fd, b".")
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def heard(self, seconds: float | None) -> bool:
        """Wait so long (None: for ever) for a ring; False: the other side is gone."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        if not poll.poll(None if seconds is None else max(seconds, 0.0) * 1e3):
            return True
        try:
            return bool(os.read(self.fd, 65536))
        except BlockingIOError:
            return True
        except OSError:
            return False


def _room(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a field, to the next cache line: two writers never share one."""
    return -(-np.dtype(kind).itemsize * math.prod(shape) // 64) * 64
