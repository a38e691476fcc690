"""Rounds: what a device does that drafts, verifies and appends by itself, and how the host keeps pace with it.

The host starts a round before it has read the last one and reads late; what it reads are `RoundResult`s. It does not
know how a device runs a round (`backends.cuda.rounds`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Listing
from typing import NamedTuple, Protocol

from ..types import Sequence, TokenLogprob, Tree, Turn
from .cache import Row


class RoundResult(NamedTuple):
    """What a round did for one sequence."""

    row: Row  # the sequence's, when the round was started
    length: int  # tokens before the round
    drafted: list[int]  # tokens that were verified
    source: str  # of the draft
    late_from: int | None  # a host draft: how many of its tokens had been emitted already
    survival: list[float] | None  # of the nodes, where the device knows it
    parents: list[int] | None  # of a tree's nodes; None: a chain
    path: list[int]  # accepted nodes
    tokens: list[int]  # the accepted ones and the target's own; empty while part of a prompt is pending
    sound: bool  # False: some logit was NaN or infinite
    logprobs: list[TokenLogprob] | None = None  # of the choices at the root and at each node, where requested


def is_asked(tree: Tree) -> bool:
    """Whether a tree stands for a draft that recorded passes are to make in the round."""
    return bool(tree.tokens) and tree.tokens[0] < 0


class PendingRound(Protocol):
    """A running round."""

    @property
    def seconds(self) -> dict[str, float]:
        """By phase, after `wait`."""
        ...

    def wait(self) -> list[RoundResult]: ...


class Rounds(Protocol):
    """A loop on a device: rounds are started before earlier ones are read."""

    def start(self, turns: Listing[Turn], late: Listing[Tree]) -> PendingRound:
        """Draft, run the pass, choose, compare and append, all on the device. late[i] follows what the host has read of
        sequence i; the device verifies the rest of it, if the beginning is what it has emitted meanwhile."""
        ...

    def drives(self, seq: Sequence) -> bool:
        """Whether the device alone can continue this sequence."""
        ...

    def forget_lines(self) -> None:
        """Steps outside of rounds have continued the sequences."""
        ...


class HostPace:
    """For how many sequences host drafters are called while a round runs: a late draft costs less than a late round.

    The time for planning drafts grows while the host waits for rounds to end, and shrinks as soon as it does not. What
    takes time whatever is drafted (budgets, prices) comes first: where it is not there, rounds are plain.
    """

    SLACK = 0.1  # of a round's time that the host should be left waiting
    GROWTH, CUT = 0.3, 0.6  # of the time that it waits longer; of the time for drafting when it does not
    FORGET = 0.999  # of what planning or a draft took, for each round without it: no busy moment ends it for ever
    FIRST = 0.0002  # seconds of a sequence's first draft, which reads its prompt
    UNREAD = 3e-6  # seconds that a draft takes longer for each round without one: it reads the text since the last

    def __init__(self) -> None:
        self.seconds = 0.001  # for planning one round
        self.fixed = 0.0005  # of planning without drafts, moving average
        self.each = self.FIRST  # of one sequence's draft, moving average
        self._drafting = 0.0  # seconds of drafts in the round that is being planned
        self._called = False  # whether something was drafted since the last round was read
        self._turn = 0  # sequences take turns

    @property
    def plans(self) -> bool:
        """Whether there is time to plan drafts at all."""
        return self.seconds >= self.fixed

    def drafted(self, sequences: int, seconds: float) -> None:
        self._drafting, self._called = seconds, True
        self.each += 0.2 * (seconds / sequences - self.each)

    def planned(self, seconds: float) -> None:
        """A round was planned in this time, drafts included."""
        fixed, self._drafting = max(seconds - self._drafting, 0.0), 0.0
        self.fixed += 0.2 * (min(fixed, 3 * self.fixed) - self.fixed)  # clipped: an outlier is not a cost

    def waited(self, seconds: float, device: dict[str, float]) -> None:
        """The host waited so long for a round with these device times."""
        total = sum(device.values())
        if not total:
            self.seconds = math.inf  # a device without a clock
            return
        if not self.plans:
            self.fixed *= self.FORGET
        if not self._called:
            self.each = max(self.each, min(self.each + self.UNREAD, self.FIRST))
        self._called = False
        if seconds < self.SLACK * total:
            self.seconds = min(self.CUT * self.seconds, total)
        else:
            self.seconds = min(self.seconds + self.GROWTH * (seconds - self.SLACK * total), total)

    def affordable(self, wanted: list[int]) -> list[int]:
        """As many of these as there is time for, others the next time."""
        most = int(min(max(self.seconds - self.fixed, 0.0) / self.each, len(wanted)))
        if most == len(wanted):
            return wanted
        if not most:
            self.each *= self.FORGET
        start = self._turn % len(wanted)
        self._turn += most
        return sorted((wanted[start:] + wanted[:start])[:most])
