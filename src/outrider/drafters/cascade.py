"""Several drafters in a row: each sequence takes the first draft that is not empty.

Put the cheap and sure one first: a suffix match costs nothing, and a model drafts where nothing repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from ..errors import ConfigError
from ..types import Draft, Sequence, Step, Tree
from . import Drafter, Memory, Workspace, make, register

FREE = ("suffix", "ngram", "prediction")  # drafters that cost microseconds


@register("cascade")
class Cascade(Drafter):
    """Options: cascade, a list of drafter names (default suffix, then ngram), and whatever those drafters take."""

    takes: ClassVar[tuple[str, ...] | None] = ("cascade",)
    option_name = "cascade"

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        given = space.option(self.option_name, default=self.defaults(space))
        names = [name.strip() for name in (given.split(",") if isinstance(given, str) else given)]
        if not names or {"cascade", "auto"} & set(names):
            raise ConfigError(f"'{self.option_name}' needs at least one drafter, and none that chooses among others.")
        self.drafters = [make(name, space) for name in names]
        self.free = [drafter for drafter in self.drafters if drafter.name in FREE]
        self.costly = [drafter for drafter in self.drafters if drafter.name not in FREE]
        self.paced = bool(self.costly) and all(drafter.paced for drafter in self.costly)
        self.taps = tuple(sorted({tap for drafter in self.drafters for tap in drafter.taps}))

    @classmethod
    def defaults(cls, space: Workspace) -> tuple[str, ...]:
        return ("suffix", "ngram")

    @property
    def overlaps(self) -> bool:
        return any(drafter.overlaps for drafter in self.drafters)

    @property
    def glances(self) -> bool:
        return any(drafter.glances for drafter in self.free)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(drafter.name for drafter in self.drafters)

    @property
    def added_memory(self) -> Memory:
        every = [drafter.added_memory for drafter in self.drafters]
        return Memory(sum(one.weights for one in every), sum(one.kv for one in every))

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        return self._first(self.drafters, seqs, budget)

    def glance(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        return self._first(self.free, seqs, budget)

    def _first(self, drafters: list[Drafter], seqs: list[Sequence], budget: list[int]) -> Draft:
        trees, unread = [Tree([], [])] * len(seqs), None
        for drafter in drafters:
            open_ = [i for i, tree in enumerate(trees) if not tree.tokens and may_draft(drafter, seqs[i])]
            if not open_:
                continue
            drafter.stop_below = self.stop_below
            try:
                answer = drafter.draft([seqs[i] for i in open_], [budget[i] for i in open_])
            except Exception:  # one that fails must not silence the others
                continue
            unread = unread if answer.unread is None else answer.unread
            for i, tree in zip(open_, answer.trees, strict=True):
                trees[i] = tree
        return Draft.pack(trees, unread)

    def load(self) -> None:
        self._each(lambda drafter: drafter.load())

    def begin(self, seq: Sequence) -> None:
        self._each(lambda drafter: drafter.begin(seq))

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        self._each(lambda drafter: drafter.overlap(seqs, draft))

    def observe(self, step: Step) -> None:
        self._each(lambda drafter: drafter.observe(step))

    def end(self, seq: Sequence) -> None:
        self._each(lambda drafter: drafter.end(seq))

    def notes(self) -> dict[str, Any]:
        return {name: told for drafter in self.drafters for name, told in drafter.notes().items()}

    def inherit(self, old: Drafter) -> None:
        for mine, its in zip(self.drafters, getattr(old, "drafters", ()), strict=False):
            mine.inherit(its)

    def _each(self, call: Callable[[Drafter], None]) -> None:
        failure = None
        for drafter in self.drafters:
            try:
                call(drafter)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure


def may_draft(drafter: Drafter, seq: Sequence) -> bool:
    """Whether it is one that the sequence wants to hear."""
    return seq.only in ("", drafter.name)
