"""What a drafter is, and where drafters are found.

A drafter proposes tokens that the target has not said yet. It speaks target token ids and knows nothing of
the engine. Whatever it does wrong costs speed, never correctness: skipping, delaying, repeating or crashing
in any of these calls leaves the text as it is (`outrider.testing.check_drafter` asserts exactly that).

A new drafter is one file in this folder, or a class anywhere behind `@register("name")`, or an entry point
in the group `outrider.drafters`.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from ..errors import ConfigError
from ..types import Draft, Rows, SamplingParams, Sequence, Step, Tree

if TYPE_CHECKING:
    from torch import Tensor

    from ..backends import Model, Part
    from ..engine.cache import Cache, Plane


class RecordedChains(Protocol):
    """Whole drafts that a device makes on its own."""

    def suits(self, seqs: list[Sequence]) -> bool: ...

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft: ...


class RecordedHeads(Protocol):
    """The same with a trained head. starts[i] is the first true row of each sequence that its plane lacks."""

    def suits(self, seqs: list[Sequence]) -> bool: ...

    def suits_trees(self, seqs: list[Sequence], width: int, depth: int) -> bool: ...

    def chains(self, seqs: list[Sequence], starts: list[int], budget: list[int]) -> Draft: ...

    def rankings(
        self, seqs: list[Sequence], starts: list[int], lengths: list[int], width: int
    ) -> list[list[list[tuple[int, float]]]]: ...

    def trees(
        self, seqs: list[Sequence], starts: list[int], width: int, depth: int
    ) -> Iterable[tuple[list[int], list[int], list[float]]]: ...


class Passes(Protocol):
    """How a model runs on a device that is not driven operation by operation."""

    def logits(self, rows: Rows, part: Part) -> Tensor: ...

    def states(self, rows: Rows, layers: int) -> Tensor:
        """The residual stream of all rows after so many layers: [T, H]."""
        ...

    def chains(self, part: Part, again: int, source: str) -> RecordedChains: ...

    def heads(self, shown: Plane, source: str) -> RecordedHeads: ...


class Market(Protocol):
    """What the step at hand costs, in tokens that would be made meanwhile; the controller tells."""

    speed: float  # tokens per second of late

    def price(self, more: int) -> float:
        """What so many more rows of the target's pass cost."""
        ...


class FirstLayers(Protocol):
    """The target's own first layers, run ahead of the pass that verifies: it need not run them again."""

    def roots(self, seqs: list[Sequence], layers: int) -> Tensor:
        """Over each sequence's last token, where all before it is held: states [B, H]."""
        ...

    def nodes(self, seqs: list[Sequence], tokens: list[int]) -> Tensor:
        """Over one more drafted token of each, after those before it: states [B, H]."""
        ...


@dataclass(frozen=True)
class Workspace:
    """What a drafter may lean on: the target and its K/V, the shared slots, and the options it was given."""

    target: Model
    cache: Cache
    plane: Plane  # the target's own
    options: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None  # the target's, where there is text
    passes: Callable[..., Passes | None] = lambda model, plane, cache=None: None  # None: call the model itself
    market: Callable[[], Market | None] = lambda: None  # None: nobody counts, K is fixed
    begun: FirstLayers | None = None  # None: whoever runs the target runs it whole
    shown: bool = False  # somebody records: trees should carry what else was thought likely (Tree.guesses)

    def option(self, *names: str, default: Any) -> Any:
        """The first of these options that was given: an option may have one name here and another elsewhere."""
        return next((self.options[name] for name in names if self.options.get(name) is not None), default)


class Memory(NamedTuple):
    """Bytes that a drafter adds to the target's."""

    weights: int = 0
    kv: int = 0


class Drafter:
    """A few verbs; only `draft` is mandatory."""

    name: ClassVar[str] = ""
    takes: ClassVar[tuple[str, ...] | None] = None  # the options it reads; None: whatever it is given
    paced: bool = (
        False  # leaves off by itself where going on does not pay: it may be asked for as much as there is room
    )
    inside: ClassVar[bool] = False  # takes the target apart: only the built-in decoder can be
    frugal: bool = False  # weighs what its work costs against what it brings: it may be asked every time
    blind: bool = False  # leaves its drafts on the device: it says nothing of their chances, and never leaves off
    way: str = ""  # how it would draft now, where it has several ways: what each costs is learnt apart
    taps: tuple[int, ...] = ()  # layers of the target whose hidden states `observe` wants to see
    stop_below: float = 0.0  # told before each draft: a node less likely than this is not worth going on from

    def __init__(self, space: Workspace) -> None:
        self.space = space

    @property
    def overlaps(self) -> bool:
        """Whether `overlap` does anything: only then is it worth running the target in a thread."""
        return type(self).overlap is not Drafter.overlap

    @property
    def glances(self) -> bool:
        """Whether `glance` says anything."""
        return type(self).glance is not Drafter.glance

    @property
    def parts(self) -> tuple[str, ...]:
        """Drafters that work together in it, by name: a sequence may ask for one of them alone (`Sequence.only`)."""
        return ()

    @property
    def added_memory(self) -> Memory:
        """What it adds to the target's memory, where that is worth counting."""
        return Memory()

    @classmethod
    def trial_options(cls, target: Model) -> dict[str, Any]:
        """Options with which this drafter can be tried on any target, when nobody has configured it."""
        return {}

    def load(self) -> None:
        """Before the first request of all: wait for what takes long to read, if anything does."""

    def begin(self, seq: Sequence) -> None:
        """A sequence arrived."""

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        """Propose at most budget[i] nodes after seqs[i].tokens, best first; an empty tree is always right."""
        raise NotImplementedError

    def glance(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        """What it would draft without any device: a pass is under way that was started without a draft, and nobody
        will verify this. It only tells whether the next pass had better wait for one."""
        return Draft.pack([Tree([], [])] * len(seqs))

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        """The target is busy with this draft: whatever is done here is hidden."""

    def observe(self, step: Step) -> None:
        """The target has spoken; the sequences already hold what was emitted."""

    def behind(self, seq: Sequence) -> int:
        """Tokens that it would have to read before it could draft for this sequence; none, if it only looks."""
        return 0

    def end(self, seq: Sequence) -> None:
        """A sequence finished or was cancelled."""

    def notes(self) -> dict[str, Any]:
        """What it would tell people about its work, for statistics and traces, under its name."""
        return {}

    def inherit(self, old: Drafter) -> None:
        """An interrupted engine's drafter is replaced by this one: take over what it has learnt."""


_REGISTRY: dict[str, type[Drafter]] = {}
D = TypeVar("D", bound=type[Drafter])


def register(name: str) -> Callable[[D], D]:
    """Class decorator: make a drafter known by name."""

    def add(cls: D) -> D:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def names() -> list[str]:
    """Every drafter that can be asked for."""
    _discover()
    return sorted(_REGISTRY)


def lookup(drafter: str | type[Drafter]) -> type[Drafter]:
    """A drafter's class, by name or as it is."""
    if not isinstance(drafter, str):
        return drafter
    _discover()
    if drafter not in _REGISTRY:
        raise ConfigError(f"There is no drafter called '{drafter}'. Choose one of: {', '.join(names())}.")
    return _REGISTRY[drafter]


def about(drafter: str | type[Drafter]) -> str:
    """What it does, in the first sentence of the file it is in."""
    words = (sys.modules[lookup(drafter).__module__].__doc__ or "").strip()
    return words.partition("\n")[0]


def make(drafter: str | type[Drafter], space: Workspace) -> Drafter:
    """Build a drafter; its options are in the workspace."""
    cls = lookup(drafter)
    if not suits(cls, space.target):
        raise ConfigError(
            f"The drafter '{cls.name}' takes the target's layers one by one, but transformers runs this target as a "
            "whole. Choose suffix, ngram, model, layerskip or head."
        )
    try:
        return cls(space)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"The drafter '{cls.name}' cannot be built with these options: {error}.") from error


def suits(drafter: str | type[Drafter], target: Model) -> bool:
    """Whether a drafter can work with this kind of target at all."""
    return not lookup(drafter).inside or getattr(target, "open", True)


def check_options(drafter: str | type[Drafter], options: Iterable[str]) -> None:
    """Refuse an option that no drafter of ours takes: a misspelt one would silently do nothing."""
    cls = lookup(drafter)
    if cls.takes is None:
        return
    known = {name for other in _REGISTRY.values() for name in other.takes or ()}
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, [*known, *SamplingParams.__dataclass_fields__], 1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"There is no option '{name}'.{hint}")


@cache
def _discover() -> None:
    """Import this folder's drafters and installed plug-ins, once."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for point in entry_points(group="outrider.drafters"):
        try:
            register(point.name)(point.load())
        except Exception as error:  # somebody else's broken plug-in must not take the others along
            warnings.warn(f"The drafter plug-in '{point.name}' ({point.value}) cannot be loaded: {error}", stacklevel=2)
