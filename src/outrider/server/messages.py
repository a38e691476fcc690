"""What the HTTP side and the engine tell each other: a few messages, the same in memory and between two processes.

The HTTP side has text; the engine has token ids. One `Progress` reports a whole step, however many sequences ran. A
sequence is in the engine from `Accepted` until `Progress.ended` or `Left` names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..params import SamplingParams
from ..types import TokenLogprob

Line = dict[str, Any]  # of a trace
# Status, message and code for a bug or a fault of the machine; details go to the log only.
INTERNAL = (500, "The server failed while answering; its log says why. Please try again.", "internal_error")


# ------------------------------------------------------------ to the engine


@dataclass(frozen=True, slots=True)
class Submit:
    """Token ids to continue, n answers each. `params` have no stop strings: those belong to the text."""

    job: int
    client: str  # its key in the fair queue
    prompts: list[list[int]]
    params: SamplingParams
    speculate: bool = True
    most_drafted: int | None = None  # per step
    only: str = ""  # the one member drafter that drafts; empty: any
    trace: str = "off"  # level of the lines that are sent back


@dataclass(frozen=True, slots=True)
class Cancel:
    """End what is left of these sequences, or of the whole job where none are named, before the next step."""

    job: int
    seqs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """End everything, and the engine."""


Command = Submit | Cancel | Stop


# ------------------------------------------------------------ from the engine


@dataclass(frozen=True, slots=True)
class Facts:
    """What the HTTP side has to know of the model and its engine. Sent again when a drafter was given up."""

    name: str
    dtype: str
    device: str
    backend: str  # a sentence about what runs the target; empty for the built-in decoder
    drafter: str
    drafters: dict[str, str]  # those a request may name, each with a sentence
    k: int | str
    rule: str
    length: int  # tokens of a prompt and its answer
    vocabulary: int
    ends: frozenset[int]  # the model's end tokens
    max_batch: int

    def drafter_of(self, speculate: bool, only: str) -> str:
        """The name of the drafter of a request."""
        return only or self.drafter if speculate else "off"


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine is loaded. The first message of an engine in another process."""

    facts: Facts
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class Accepted:
    """A job's sequences, those of one prompt adjacent, wait for the batch."""

    job: int
    seqs: list[int]
    seeds: list[int]
    openings: list[list[int]] | None = None  # where the target has an encoder: the tokens that each answer starts after


@dataclass(frozen=True, slots=True)
class Started:
    """These sequences were admitted to the batch at this `time.monotonic`."""

    seqs: list[int]
    at: float


@dataclass(slots=True)
class Progress:
    """One step: the new tokens of all sequences in it, and what was measured. Columns have one entry per sequence.

    Verdicts are whole: a stop string may cut them on the HTTP side. Sequences whose trace lines take a while come in a
    further message for the same step, which is not `counted`.
    """

    seqs: list[int] = field(default_factory=list)  # [B]
    counts: list[int] = field(default_factory=list)  # [B] new tokens; -1: part of the prompt is still pending
    accepted: list[int] = field(default_factory=list)  # [B] how many of them were drafted; they come first
    drafted: list[int] = field(default_factory=list)  # [B]
    rejected_at: list[int] = field(default_factory=list)  # [B] accepted nodes above the first rejected one; -1: none
    tokens: list[int] = field(default_factory=list)  # of all sequences
    ended: dict[int, str] = field(default_factory=dict)  # sequence -> finish
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)  # sequence -> (reused, preempted), where changed
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)  # where requested
    lines: dict[int, Line | None] = field(default_factory=dict)  # where a trace is requested
    clock: dict[str, float] = field(default_factory=dict)  # seconds by phase
    why: str = ""
    failed: bool = False  # the drafter raised
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Left:
    """These sequences have left the engine without an end of their own: cancelled, or failed."""

    seqs: list[int]


@dataclass(frozen=True, slots=True)
class Failed:
    """An error for the clients of these jobs; None: of all. `fatal`: why the engine cannot run again."""

    jobs: list[int] | None
    status: int
    message: str
    code: str | None = None
    param: str | None = None
    fatal: str = ""


@dataclass(frozen=True, slots=True)
class Stats:
    """Numbers for metrics, about once a second and before the engine idles."""

    cache_usage: float  # used share of the slots
    break_even: float | None  # acceptance at which a drafted token pays; None: unknown
    drift: list[dict[str, Any]] = field(default_factory=list)  # by drafter and kind of text, as `Monitor.as_json`
    learning: dict[str, Any] | None = None  # as `LLM.learning`


Message = Facts | Ready | Accepted | Started | Progress | Left | Failed | Stats


class EngineLink(Protocol):
    """An engine, as the HTTP side reaches it."""

    facts: Facts
    tokenizer: Any

    def connect(self, receive: Callable[[list[Message]], None], lost: Callable[[str], None]) -> None:
        """Start; both functions are called on the running loop. `lost` gets a sentence about why the engine is gone."""

    def post(self, command: Command) -> None:
        """Send a command, from the loop, without waiting."""

    def join(self, seconds: float) -> None:
        """After `Stop`: wait for the engine's end, at most so long. Not on the loop."""
