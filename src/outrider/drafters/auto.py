"""Choose among drafters, for each sequence and each step, by what they would have got right.

Every free drafter proposes each time; only one proposal is verified, but the verdict scores them all: the emitted
tokens are what each should have said. A drafter that costs passes is asked only where the free ones are silent. How
much a proposal is worth is its own claim (the sum of its survival) times how far that drafter's claims came true.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import Tensor

from ..types import Draft, Sequence, Step, Tree
from . import Drafter, Workspace, register
from .cascade import Cascade

FREE = ("suffix", "ngram", "prediction")  # drafters that cost microseconds
CLAIM = 0.5  # the survival of a node whose drafter says nothing about it, for each depth


@dataclass
class Trust:
    """How far a drafter's claims come true: accepted nodes per claimed one, the recent past first."""

    claimed: float = 2.0
    accepted: float = 1.6

    def add(self, claimed: float, accepted: int) -> None:
        self.claimed = 0.95 * self.claimed + claimed
        self.accepted = 0.95 * self.accepted + accepted

    @property
    def share(self) -> float:
        return self.accepted / self.claimed


@register("auto")
class Auto(Cascade):
    """Options: auto, a list of drafter names (default suffix and ngram; head, exit and model where they are given)."""

    takes = ("auto", "head", "adapter", "draft_model", "assistant_model")
    option_name = "auto"

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.free = [drafter for drafter in self.drafters if drafter.name in FREE]
        self.costly = [drafter for drafter in self.drafters if drafter.name not in FREE]
        self.trust: dict[tuple[int, str], Trust] = defaultdict(Trust)
        self.proposed: dict[int, dict[str, Tree]] = {}
        self.unread: Tensor | None = None

    @classmethod
    def defaults(cls, space: Workspace) -> tuple[str, ...]:
        model = space.option("draft_model", "assistant_model", default=None)
        given = {"head": space.option("head", default=None), "exit": space.option("adapter", default=None)}
        given["model"] = model
        return ("suffix", "ngram", *(name for name, what in given.items() if what is not None))

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        self.proposed, self.unread = {seq.id: {} for seq in seqs}, None
        for drafter in self.free:
            self._propose(drafter, seqs, budget)
        for drafter in self.costly:
            silent = [i for i, seq in enumerate(seqs) if not self.proposed[seq.id]]
            if silent:
                self._propose(drafter, [seqs[i] for i in silent], [budget[i] for i in silent])
        return Draft.pack((self._best(seq) for seq in seqs), self.unread)

    def observe(self, step: Step) -> None:
        for turn, read, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None:
                for name, tree in self.proposed.pop(turn.seq.id, {}).items():
                    tree = read if tree.tokens[0] < 0 else tree  # unread when it was proposed
                    self.trust[turn.seq.id, name].add(sum(claims(tree)), agreement(tree, verdict.tokens))
        super().observe(step)

    def end(self, seq: Sequence) -> None:
        for key in [key for key in self.trust if key[0] == seq.id]:
            del self.trust[key]
        super().end(seq)

    def _propose(self, drafter: Drafter, seqs: list[Sequence], budget: list[int]) -> None:
        drafter.stop_below = self.stop_below
        try:
            draft = drafter.draft(seqs, budget)
        except Exception:  # one that fails must not silence the others
            return
        self.unread = self.unread if draft.unread is None else draft.unread
        for seq, tree in zip(seqs, draft.trees, strict=True):
            if tree.tokens:
                self.proposed[seq.id][drafter.name] = tree

    def _best(self, seq: Sequence) -> Tree:
        offers = self.proposed[seq.id]
        if not offers:
            return Tree([], [])
        worth = {name: sum(claims(tree)) * self.trust[seq.id, name].share for name, tree in offers.items()}
        name = max(offers, key=lambda n: worth[n])
        return offers[name] if offers[name].source else offers[name]._replace(source=name)


def claims(tree: Tree) -> list[float]:
    """What the drafter says each node's chance is."""
    if tree.survival is not None:
        return tree.survival
    chances: list[float] = []
    for parent in tree.parents:
        chances.append(CLAIM * (chances[parent] if parent >= 0 else 1.0))
    return chances


def agreement(tree: Tree, tokens: list[int]) -> int:
    """How many nodes of a tree the emitted tokens would have accepted."""
    at = -1
    for depth, token in enumerate(tokens):
        children = [n for n, parent in enumerate(tree.parents) if parent == at and tree.tokens[n] == token]
        if not children:
            return depth
        at = children[0]
    return len(tokens)
