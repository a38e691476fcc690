"""Choose among drafters, for each sequence and each step, by what they would have got right.

Every free drafter proposes each time; only one proposal is verified, but the verdict scores them all: the emitted
tokens are what each should have said. How much a proposal is worth is its own claim (the sum of its survival) times how
far that drafter's claims came true.

A drafter that costs passes is asked where what it usually brings is worth more than the best free proposal, by at least
what asking takes: a sure match in the text leaves it alone, a weak one does not stand in its way. Prices are the
controller's (`Workspace.market`); what asking takes is read off the step's own clock. Where it has not been asked for
long, because it was wrong, it is tried again after a while, and after longer and longer whiles.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..types import Draft, Sequence, Step, Tree
from . import Drafter, Market, Workspace, register
from .cascade import FREE, Cascade, may_draft
from .head import chosen

LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)  # where what a draft claims in all begins to mean something else
CLAIM = 0.5  # the survival of a node whose drafter says nothing about it, for each depth
FORGET = 0.99  # how much of a costly drafter's price is believed a step later, when it was not asked
PATIENCE, LONGEST = 24, 384  # steps before a costly drafter that was not worth asking is tried again


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


@dataclass
class Habit:
    """What a costly drafter usually claims, and what asking it takes."""

    claims: list[float] = field(default_factory=lambda: [CLAIM**i for i in range(1, 5)])  # by depth, over all chains
    seconds: float | None = None  # of a call
    drafts: int = 0  # heard, ever

    def heard(self, chances: list[float]) -> None:
        """These were the claims of its latest draft, likeliest first; what it did not draft counts as nothing."""
        self.drafts += 1
        quick = max(0.05, 1 / (self.drafts + 2))  # the first ones tell most
        self.claims += [0.0] * (len(chances) - len(self.claims))
        for depth, known in enumerate(self.claims):
            claim = chances[depth] if depth < len(chances) else 0.0
            self.claims[depth] = known + quick * (claim - known)

    def took(self, seconds: float) -> None:
        known = seconds if self.seconds is None else self.seconds
        self.seconds = known + 0.1 * (min(seconds, 3 * known) - known)  # a hiccup is not a price

    def rested(self) -> None:
        """It was not asked: a price from a busy moment should not keep it silent for ever."""
        self.seconds = None if self.seconds is None else FORGET * self.seconds


@dataclass
class Wait:
    """How long a costly drafter has been left alone by a sequence, and how long it may be."""

    idle: int = 0
    patience: int = PATIENCE

    def over(self) -> bool:
        """Try again now? If so, the next wait is twice as long."""
        self.idle += 1
        if self.idle < self.patience:
            return False
        self.idle, self.patience = 0, min(2 * self.patience, LONGEST)
        return True


@register("auto")
class Auto(Cascade):
    """Options: auto, a list of drafter names (default suffix, ngram, a head if there is one; exit, model if given)."""

    takes = ("auto", "head", "adapter", "draft_model", "assistant_model")
    option_name = "auto"

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.free = [drafter for drafter in self.drafters if drafter.name in FREE]
        self.paced, self.frugal = False, bool(self.costly)
        self.trust: dict[tuple[int, str], Trust] = defaultdict(Trust)
        self.levels: dict[tuple[str, int], Trust] = defaultdict(Trust)  # everybody's, by how much was claimed
        self.habits: dict[str, Habit] = defaultdict(Habit)
        self.waits: dict[tuple[int, str], Wait] = defaultdict(Wait)
        self.proposed: dict[int, dict[str, Tree]] = {}
        self.asked: list[str] = []  # costly drafters, in this step
        self.unread: Tensor | None = None

    @classmethod
    def defaults(cls, space: Workspace) -> tuple[str, ...]:
        model = space.option("draft_model", "assistant_model", default=None)
        given = {"head": chosen(space), "exit": space.option("adapter", default=None), "model": model}
        return ("suffix", "ngram", *(name for name, what in given.items() if what is not None))

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        self.proposed, self.asked, self.unread = {seq.id: {} for seq in seqs}, [], None
        for drafter in self.free:
            wanted = [i for i, seq in enumerate(seqs) if may_draft(drafter, seq)]
            if wanted:
                self._propose(drafter, [seqs[i] for i in wanted], [budget[i] for i in wanted])
        for drafter in self.costly:
            named = [i for i, seq in enumerate(seqs) if seq.only == drafter.name]  # asked for: nothing to weigh
            others = [i for i, seq in enumerate(seqs) if not seq.only]
            worthy = self._worth_asking(drafter.name, [seqs[i] for i in others], [budget[i] for i in others])
            asked = sorted(named + [others[i] for i in worthy])
            if asked:
                self.asked.append(drafter.name)
                self._propose(drafter, [seqs[i] for i in asked], [budget[i] for i in asked])
        return Draft.pack((self._best(seq) for seq in seqs), self.unread)

    def observe(self, step: Step) -> None:
        if self.asked and not any(turn.feed > 1 for turn in step.turns):  # reading a prompt is not what asking takes
            for name in self.asked:
                self.habits[name].took(step.clock["draft"] / len(self.asked))
        for name in self.habits.keys() - set(self.asked):
            self.habits[name].rested()
        self.asked = []
        for turn, read, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None:
                for name, tree in self.proposed.pop(turn.seq.id, {}).items():
                    tree = read if tree.tokens[0] < 0 else tree  # unread when it was proposed
                    hits = agreement(tree, verdict.tokens)
                    known = sum(settled(tree, verdict.tokens, hits))
                    self.trust[turn.seq.id, name].add(known, hits)
                    self.levels[name, level(tree)].add(known, hits)
                    if hits:
                        self.waits.pop((turn.seq.id, name), None)
        super().observe(step)

    def end(self, seq: Sequence) -> None:
        for memory in (self.trust, self.waits):
            for key in [key for key in memory if key[0] == seq.id]:
                del memory[key]
        super().end(seq)

    def _worth_asking(self, name: str, seqs: list[Sequence], budget: list[int]) -> list[int]:
        """Which of the sequences to ask a costly drafter for; they share what a call takes."""
        market, habit = self.space.market(), self.habits[name]
        gains = [self._gain(name, seq, room, market) for seq, room in zip(seqs, budget, strict=True)]
        hopeful = [i for i, gain in enumerate(gains) if gain > 0]
        cost = 0.0 if market is None or habit.seconds is None else market.speed * habit.seconds
        if sum(gains[i] for i in hopeful) > cost:
            return hopeful
        alone = [i for i, seq in enumerate(seqs) if not self.proposed[seq.id]]
        return [i for i in alone if self.waits[seqs[i].id, name].over()]

    def _gain(self, name: str, seq: Sequence, room: int, market: Market | None) -> float:
        """Tokens that a costly drafter is expected to bring beyond the best that is there, rows paid."""
        price: Callable[[int], float] = (lambda rows: 0.0) if market is None else market.price
        best, here = self._best(seq), 0.0
        if best.tokens:  # a weak claim is often worth less than its share of what strong ones brought
            author = self._author(seq, best)
            share = min(self.trust[seq.id, author].share, self.levels[author, level(best)].share)
            here = value(claims(best), share, price)
        return value(self.habits[name].claims[:room], self.trust[seq.id, name].share, price) - here

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
                if drafter in self.costly:
                    self.habits[drafter.name].heard(sorted(claims(tree), reverse=True))

    def _best(self, seq: Sequence) -> Tree:
        offers = self.proposed[seq.id]
        if not offers:
            return Tree([], [])
        worth = {name: sum(claims(tree)) * self.trust[seq.id, name].share for name, tree in offers.items()}
        name = max(offers, key=lambda n: worth[n])
        return offers[name] if offers[name].source else offers[name]._replace(source=name)

    def _author(self, seq: Sequence, tree: Tree) -> str:
        return next((name for name, offer in self.proposed[seq.id].items() if offer.tokens is tree.tokens), tree.source)


def value(chances: list[float], trust: float, price: Callable[[int], float]) -> float:
    """Tokens that the best beginning of a draft brings, when its rows are paid; 0 where none does."""
    best = tokens = 0.0
    for rows, chance in enumerate(chances, start=1):
        tokens += trust * chance
        best = max(best, tokens - price(rows))
    return best


def claims(tree: Tree) -> list[float]:
    """What the drafter says each node's chance is."""
    if tree.survival is not None:
        return tree.survival
    chances: list[float] = []
    for parent in tree.parents:
        chances.append(CLAIM * (chances[parent] if parent >= 0 else 1.0))
    return chances


def level(tree: Tree) -> int:
    """How much a draft claims, roughly."""
    return bisect_right(LEVELS, sum(claims(tree)))


def agreement(tree: Tree, tokens: list[int]) -> int:
    """How many nodes of a tree the emitted tokens would have accepted."""
    at = -1
    for depth, token in enumerate(tokens):
        children = [n for n, parent in enumerate(tree.parents) if parent == at and tree.tokens[n] == token]
        if not children:
            return depth
        at = children[0]
    return len(tokens)


def settled(tree: Tree, tokens: list[int], hits: int) -> list[float]:
    """The claims whose outcome is known: all, unless the tree agrees with all that was emitted and goes on."""
    chances = claims(tree)
    if hits < len(tokens):
        return chances
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return [chance for chance, depth in zip(chances, depths, strict=True) if depth <= len(tokens)]
