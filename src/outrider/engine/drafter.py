"""The contract between the engine and a drafter: one request, one draft, and a few optional verbs.

A drafter proposes token ids of the target that the target has not chosen yet. Its errors cost speed, never
correctness: skipping, delaying, repeating or crashing in any of these calls leaves the text as it is
(`outrider.testing.check_drafter` asserts that). The engine knows a drafter's `Traits`; the drafter knows its
`DraftRequest`. Neither side looks at anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from ..types import Draft, Sequence, Step, Tree


class Prices(Protocol):
    """What the current step costs, in tokens that plain decoding would emit in that time."""

    speed: float  # tokens per second, recently
    limit: float  # the highest price that may be paid: more would risk what has not been earned

    def price(self, rows: int) -> float:
        """The cost of this many more rows in the target's pass."""
        ...


@dataclass(frozen=True)
class DraftRequest:
    """Propose at most budgets[i] nodes after seqs[i].tokens, best first."""

    seqs: list[Sequence]  # [B]
    budgets: list[int]  # [B]
    prices: Prices | None = None  # None: K is fixed
    stop_below: float = 0.0  # a node that survives less often than this is not worth extending
    in_round: bool = False  # a GPU's round takes the draft up later: recorded passes are asked for by unread chains

    def asked(self, unread: Any, source: str) -> Draft:
        """Chains that recorded passes are to draft: as long as the budgets, their tokens unread on the device."""
        trees = (Tree([-1] * budget, list(range(-1, budget - 1)), source=source) for budget in self.budgets)
        return Draft.pack(trees, unread)

    def select(self, indices: Iterable[int]) -> DraftRequest:
        """The same request for some of its sequences, in order."""
        chosen = list(indices)
        if len(chosen) == len(self.seqs):
            return self
        return replace(self, seqs=[self.seqs[i] for i in chosen], budgets=[self.budgets[i] for i in chosen])

    def answer(self, indices: Iterable[int], draft: Callable[[DraftRequest], Draft]) -> Draft:
        """What `draft` proposes for some of the sequences (in order), and an empty tree for each of the others."""
        chosen = list(indices)
        if not chosen:
            return Draft.empty(len(self.seqs))
        if len(chosen) == len(self.seqs):
            return draft(self)
        proposed = draft(self.select(chosen))
        trees = dict(zip(chosen, proposed.trees, strict=True))
        return proposed._replace(trees=tuple(trees.get(i, Tree([], [])) for i in range(len(self.seqs))))


class Memory(NamedTuple):
    """Bytes that a drafter adds to the target's."""

    weights: int = 0
    kv: int = 0


Call = tuple[int, int, float]  # sequences, nodes for each of them, seconds
ORDINARY = 8  # nodes of a call, at most, of which no other number is known


class Forecast(NamedTuple):
    """What is known of a drafter before its first call. Seconds are measured on this machine."""

    survival: tuple[float, ...] = ()  # of its nodes by depth, as its maker measured it
    call: float | None = None  # seconds of an ordinary call
    read: float | None = None  # seconds for each token of a prompt that it must read first
    calls: Collection[Call] = ()  # that were timed before the first request

    @property
    def timed(self) -> Collection[Call]:
        """Calls to begin with; an ordinary one is long enough for several nodes."""
        return self.calls or (() if self.call is None else ((1, 1, self.call), (1, ORDINARY, self.call)))


class Learning(Protocol):
    """A drafter that learns while it serves."""

    def report(self) -> dict[str, Any]:
        """State, reason, counts and times."""
        ...

    def save(self, folder: Path | str, **facts: Any) -> None: ...


@dataclass(frozen=True)
class Traits:
    """What a drafter needs and promises. A drafter whose traits change replaces them as a whole."""

    options: tuple[str, ...] | None = None  # the options it reads; None: any
    taps: tuple[int, ...] = ()  # layers of the target whose hidden states `observe` wants to see
    needs_layers: bool = False  # runs single layers of the target: only the built-in decoder can do that
    dry: bool = False  # drafts on the host in microseconds
    late: bool = False  # drafts chains from tokens alone: they may be verified after more tokens have been emitted
    self_limiting: bool = False  # ends a chain by itself where going on does not pay: takes any budget
    weighs_cost: bool = False  # runs its costly parts only where they pay: may be called in every step
    unread: bool = False  # leaves its tokens on the device: claims no survival and always uses its whole budget
    watches: bool = True  # its `observe` sees every step; False: those in which somebody may draft
    overlaps: bool = False  # does something in `overlap`, so that the target runs in another thread
    mode: str = ""  # drafting mode, where it has several: the cost of each is learnt separately
    members: tuple[str, ...] = ()  # drafters that it wraps; a sequence may select one (`Sequence.only`)
    learning: Learning | None = None
    memory: Callable[[], Memory] = Memory
    backlog: Callable[[Sequence], int] = lambda seq: 0  # tokens that it must read before it can draft for a sequence
    forecast: Forecast | None = None  # None: nothing is known of it
    # Read from the class, before a drafter is built:
    auto: Callable[[Any], bool] | None = None  # workspace -> whether `auto` uses it; None: never
    trial: Callable[[Any], dict[str, Any]] = lambda target: {}  # options with which it runs on any target

    def in_rounds(self, calls: Collection[Call]) -> Traits:
        """Those of a drafter whose passes are recorded in rounds, which time their calls before the first request."""
        return replace(self, late=True, forecast=(self.forecast or Forecast())._replace(calls=calls))


class Drafter:
    """Only `draft` is mandatory. Built with a `drafters.Workspace`."""

    name: ClassVar[str] = ""
    traits: Traits = Traits()

    def __init__(self, workspace: Any) -> None:
        self.space = workspace

    def draft(self, request: DraftRequest) -> Draft:
        """A tree for each sequence of the request; an empty tree is always right."""
        raise NotImplementedError(f"The drafter '{type(self).__name__}' has no method draft(request).")

    def record(self, rounds: Any) -> None:
        """A GPU runs rounds (`backends.cuda.rounds.Rounds`), into which passes and kernels can be recorded.

        A drafter that does so has the traits `Traits.in_rounds` from then on. Where a request says `in_round`, it
        returns an unread chain of the wanted length (`asked`) for each sequence that these passes are to draft for.
        """

    def begin(self, seq: Sequence) -> None:
        """A sequence arrived."""

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        """The target verifies this draft meanwhile: work done here costs no time."""

    def observe(self, step: Step) -> None:
        """The target has verified; the sequences already hold what was emitted. See `Traits.watches`."""

    def end(self, seq: Sequence) -> None:
        """A sequence finished or was cancelled."""

    def notes(self) -> dict[str, Any]:
        """Facts about its work for statistics and traces, under its name."""
        return {}

    def inherit(self, old: Drafter) -> None:
        """Take over what the drafter of an interrupted engine has learnt."""
