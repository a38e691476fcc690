"""Asks several drafters in order and takes the first draft that is not empty.

The cheap and precise drafter belongs first: a suffix match costs nothing, and a model drafts where nothing repeats. A
member that raises is reported as a failure, and the others still draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..errors import ConfigError
from ..types import Draft, Sequence, Step, Tree
from . import Drafter, DraftRequest, Memory, Traits, Workspace, make, register


@register("cascade")
class Cascade(Drafter):
    """Options: cascade, a list of drafter names (default suffix, then ngram), and the options of those drafters."""

    traits = Traits(options=("cascade",))

    def __init__(self, workspace: Workspace) -> None:
        super().__init__(workspace)
        members = workspace.option(self.name, default=self._defaults(workspace))
        names = [name.strip() for name in (members.split(",") if isinstance(members, str) else members)]
        if not names or {"cascade", "auto"} & set(names):
            raise ConfigError(f"'{self.name}' needs at least one drafter, and none that chooses among others.")
        self.drafters = [make(name, workspace) for name in names]
        self.free = [drafter for drafter in self.drafters if drafter.traits.dry]
        self.costly = [drafter for drafter in self.drafters if not drafter.traits.dry]
        self._observers = [drafter for drafter in self.drafters if type(drafter).observe is not Drafter.observe]
        self._overlapping = [drafter for drafter in self.drafters if type(drafter).overlap is not Drafter.overlap]
        self._failures: list[str] = []  # of members, in the current draft
        self._merged: list[Traits] = []  # the members' traits that `traits` was made from
        self._merge_traits()

    @classmethod
    def _defaults(cls, workspace: Workspace) -> Iterable[str]:
        return ("suffix", "ngram")

    def _merge_traits(self) -> None:
        """Called after members drafted or observed, when they may have replaced their traits."""
        each = [drafter.traits for drafter in self.drafters]
        if each != self._merged:  # as a rule these are the same objects, which takes no comparison
            self._merged, self.traits = each, self._traits(each)

    def _traits(self, each: list[Traits]) -> Traits:
        drafters = self.drafters  # traits that refer to `self` would keep it beyond its last user
        return Traits(
            taps=tuple(sorted({tap for traits in each for tap in traits.taps})),
            dry=bool(self.free),
            late=all(traits.late for traits in each),
            self_limiting=bool(self.costly) and all(drafter.traits.self_limiting for drafter in self.costly),
            watches=any(traits.watches for traits in each),
            overlaps=any(traits.overlaps for traits in each),
            members=tuple(drafter.name for drafter in self.drafters),
            learning=next((traits.learning for traits in each if traits.learning is not None), None),
            backlog=lambda seq: sum(drafter.traits.backlog(seq) for drafter in drafters),
            memory=lambda: Memory(*map(sum, zip(*(d.traits.memory() for d in drafters), strict=True))),
        )

    def draft(self, request: DraftRequest) -> Draft:
        self._failures = []
        trees, unread = [Tree([], [])] * len(request.seqs), None
        for drafter in self.drafters:
            empty = [i for i, tree in enumerate(trees) if not tree.tokens and may_draft(drafter, request.seqs[i])]
            proposed = self._ask(drafter, request.select(empty)) if empty else None
            if proposed is not None:
                unread = unread if proposed.unread is None else proposed.unread
                for i, tree in zip(empty, proposed.trees, strict=True):
                    trees[i] = tree
        self._merge_traits()
        return Draft.pack(trees, unread, self._failures)

    def _ask(self, drafter: Drafter, request: DraftRequest) -> Draft | None:
        """A member's draft; None if it raised."""
        try:
            draft = drafter.draft(request)
            if len(draft.trees) != len(request.seqs):
                raise ValueError(f"{len(draft.trees)} trees for {len(request.seqs)} sequences")
            return draft
        except Exception as error:
            self._failures.append(f"{drafter.name}: {type(error).__name__}: {error}")
            return None

    def record(self, rounds: Any) -> None:
        self._each(lambda drafter: drafter.record(rounds))
        self._merge_traits()

    def begin(self, seq: Sequence) -> None:
        self._each(lambda drafter: drafter.begin(seq))

    def overlap(self, seqs: list[Sequence], draft: Draft) -> None:
        self._each(lambda drafter: drafter.overlap(seqs, draft), self._overlapping)

    def observe(self, step: Step) -> None:
        self._each(lambda drafter: drafter.observe(step), self._observers)
        self._merge_traits()

    def end(self, seq: Sequence) -> None:
        self._each(lambda drafter: drafter.end(seq))

    def notes(self) -> dict[str, Any]:
        return {name: facts for drafter in self.drafters for name, facts in drafter.notes().items()}

    def inherit(self, old: Drafter) -> None:
        for drafter, before in zip(self.drafters, old.drafters if isinstance(old, Cascade) else (), strict=False):
            drafter.inherit(before)
        self._merge_traits()

    def _each(self, call: Callable[[Drafter], None], members: list[Drafter] | None = None) -> None:
        """Call every member, or some; the first error is raised when all have been called."""
        errors = []
        for drafter in self.drafters if members is None else members:
            try:
                call(drafter)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def may_draft(drafter: Drafter, seq: Sequence) -> bool:
    """Whether the sequence accepts drafts of this drafter."""
    return seq.only in ("", drafter.name)
