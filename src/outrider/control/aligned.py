"""Budgets for a target that runs passes over whole blocks of positions: no draft reaches into the next block.

A node beyond the block would take a second pass in the same step. The next step takes that pass anyway, with one more
token and a fresh draft. Like every budget this decides how far a pass reaches, never what is said.
"""

from __future__ import annotations

from typing import Any

from ..types import Draft, Sequence, Step, Turn
from .adaptive import Controller


class Aligned:
    """Another controller, whose budgets end where the target's block does."""

    def __init__(self, inner: Controller, block: int) -> None:
        self.inner, self.block = inner, block

    @property
    def why(self) -> str:
        return self.inner.why

    @property
    def steady(self) -> bool:
        return self.inner.steady

    @property
    def stop_below(self) -> float:
        return self.inner.stop_below

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # `now` and the like: whatever else it tells is as true here

    def budget(self, turns: list[Turn]) -> list[Turn]:
        return [self._fitted(turn) for turn in self.inner.budget(turns)]

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        return self.inner.prune(turns, draft)

    def glance(self, turns: list[Turn]) -> list[Turn]:
        return self.inner.glance(turns)

    def glanced(self, turns: list[Turn], draft: Draft) -> None:
        self.inner.glanced(turns, draft)

    def observe(self, step: Step) -> None:
        self.inner.observe(step)

    def end(self, seq: Sequence) -> None:
        self.inner.end(seq)

    def _fitted(self, turn: Turn) -> Turn:
        root = len(turn.seq.tokens) - 1
        left = self.block - 1 - root % self.block
        return turn if turn.budget <= left else turn.allow(left, turn.own)
