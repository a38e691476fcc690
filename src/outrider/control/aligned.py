"""Budgets for a target that runs passes over whole blocks of positions: no draft reaches into the next block.

A node beyond the block would take a second pass in the same step. The next step takes that pass anyway, with one more
token and a new draft. Like every budget this decides how far a pass reaches, never what is emitted.
"""

from __future__ import annotations

from ..engine.drafter import Prices, Traits
from ..types import Draft, Sequence, Step, Turn
from . import Controller


class BlockAligned:
    """Another controller, whose budgets end where the target's block does."""

    def __init__(self, inner: Controller, block: int) -> None:
        self.inner, self.block = inner, block
        self.why = inner.why

    @property
    def steady(self) -> bool:
        return self.inner.steady

    @property
    def stop_below(self) -> float:
        return self.inner.stop_below

    @property
    def prices(self) -> Prices | None:
        return self.inner.prices

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        return [self._fitted(turn) for turn in self.inner.budget(turns, traits)]

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        pruned = self.inner.prune(turns, draft)
        self.why = self.inner.why
        return pruned

    def dry_turns(self, turns: list[Turn]) -> list[Turn]:
        return self.inner.dry_turns(turns)

    def observe_dry(self, turns: list[Turn], draft: Draft) -> None:
        self.inner.observe_dry(turns, draft)

    def observe(self, step: Step) -> None:
        self.inner.observe(step)

    def end(self, seq: Sequence) -> None:
        self.inner.end(seq)

    def _fitted(self, turn: Turn) -> Turn:
        root = len(turn.seq.tokens) - 1
        left = self.block - 1 - root % self.block
        return turn if turn.budget <= left else turn.allow(left, turn.request_only)
