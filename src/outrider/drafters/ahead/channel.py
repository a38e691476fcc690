"""The engine's side of a mailbox: sequences on lines, requests, and what was asked of whom.

Tokens are the truth: a line whose text turns out to be another one is written anew. It knows ids; who answers, and how,
is `place`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...types import Sequence
from .laws import STRAIGHT, Tilt
from .shared_queue import SETTINGS, TRUNK, Mail, Outcome
from .worker import settings_of


@dataclass
class Line:
    """What of a text was written, and where."""

    number: int
    tokens: list[int]  # the sequence's own list, which only grows
    written: int = 0
    last: list[int] | None = None  # of what was written

    def fits(self, tokens: list[int]) -> bool:
        return tokens is self.tokens and tokens[max(self.written - 8, 0) : self.written] == self.last


@dataclass(frozen=True)
class Wish:
    """Prepare for what may become of this draft."""

    seq: Sequence
    trunk: list[int]
    forks: list[int]  # [len(trunk) + 1]


@dataclass(frozen=True)
class Asked:
    """The same, as it was asked: enough to tell which outcome came true."""

    line: int
    root: int  # tokens of the text
    trunk: list[int]

    def outcome(self, tokens: list[int]) -> Outcome | None:
        """What became of it, now that the text is this; None if it went another way, or not on at all."""
        new = tokens[self.root :]
        accepted = len(new) - 1
        if not 0 <= accepted <= len(self.trunk) or new[:accepted] != self.trunk[:accepted]:
            return None
        return Outcome(self.line, accepted, new[-1])


class Lines:
    """Sequences and their lines; the one that was used longest ago makes room."""

    def __init__(self, mail: Mail) -> None:
        self.mail = mail
        self.of: dict[int, Line] = {}  # by sequence, least recently used first
        self.free = list(range(mail.sizes.lines))
        self.edition = 0
        mail["owner"][:] = -1
        mail["asked"][:] = -1

    def write(self, seq: Sequence) -> int | None:
        """Bring a sequence's line up to date; None where it is too long, or its parameters are, to be told."""
        tokens, mail = seq.tokens, self.mail
        if len(tokens) > mail.sizes.length:
            return None
        line = self.of.pop(seq.id, None)
        if line is not None and not line.fits(tokens):
            self._release(line)
            line = None
        if line is None:
            line = self._open(seq)
            if line is None:
                return None
        self.of[seq.id] = line
        mail["tokens"][line.number, line.written : len(tokens)] = tokens[line.written :]
        mail["length"][line.number] = len(tokens)
        line.written, line.last = len(tokens), tokens[-8:]
        return line.number

    def drop(self, name: int) -> None:
        line = self.of.pop(name, None)
        if line is not None:
            self._release(line)

    def ask(self, wishes: list[Wish], depth: int, now: bool = False, tilt: Tilt = STRAIGHT) -> dict[int, Asked]:
        """Write a request; `place.post` sends it. By sequence: those that can be asked for.

        `now`: nothing is being verified; the wish's one fork is the first token of a draft.
        """
        mail, asked = self.mail, {}
        mail["now"][0], mail["tilt"][:] = now, tilt
        mail["asked"][:] = -1
        mail["depth"][0] = depth
        for wish in wishes:
            line = self.write(wish.seq)
            if line is not None:
                trunk = wish.trunk[:TRUNK]
                mail["trunk"][line, : len(trunk)] = trunk
                mail["forks"][line, : len(trunk) + 1] = wish.forks[: len(trunk) + 1]
                mail["asked"][line] = len(trunk)
                asked[wish.seq.id] = Asked(line, len(wish.seq.tokens), trunk)
        return asked

    def _open(self, seq: Sequence) -> Line | None:
        settings = settings_of(seq)
        if len(settings) > SETTINGS:
            return None
        if not self.free:
            self.drop(next(iter(self.of)))
        number, mail = self.free.pop(), self.mail
        self.edition += 1
        mail["length"][number] = 0
        mail["settings"][number, : len(settings)] = memoryview(settings)
        mail["owner"][number], mail["edition"][number] = seq.id, self.edition
        return Line(number, seq.tokens)

    def _release(self, line: Line) -> None:
        self.mail["owner"][line.number] = -1
        self.free.append(line.number)
