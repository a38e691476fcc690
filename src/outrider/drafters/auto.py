"""Choose among drafters, for each sequence and each step, by what they would have got right.

Every free drafter proposes each time; only one proposal is verified, but the verdict scores them all: the emitted
tokens are what each should have said. How much a proposal is worth is its own claim (the sum of its survival) times how
far that drafter's claims came true.

A drafter that costs passes is asked where what it usually brings is worth more than the best free proposal, by at least
what asking takes: a sure match in the text leaves it alone, a weak one does not stand in its way. Prices are the
request's; what asking takes is read off the step's own clock. Where it has not been asked for
long, because it was wrong, it is tried again after a while, and after longer and longer whiles.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from ..types import Draft, Sequence, Step, Tree, Verdict
from . import Drafter, DraftRequest, Prices, Traits, Workspace, lookup, names, register
from ._habit import CLAIM, FIRST, Habit, Wait
from .cascade import Cascade, may_draft

UNASKED, AGAIN = 32, 1024  # steps after which nothing is kept for a drafter that nobody asks, and is kept again
EVERYBODY = 1 << 30  # sequences: more than there are
LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)  # where what a draft claims in all begins to mean something else


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
    """Options: auto, a list of drafter names (default suffix, ngram, a head if there is one; exit, model if given)."""

    traits = Traits(options=("auto",))

    def __init__(self, workspace: Workspace) -> None:
        self.looking = True  # do the costly ones see the layers of the target that they want?
        super().__init__(workspace)
        self.mute = {drafter.name for drafter in self.costly if drafter.traits.unread}  # about their chances
        self.trust: dict[tuple[int, str], Trust] = defaultdict(Trust)
        self.levels: dict[tuple[str, int], Trust] = defaultdict(Trust)  # everybody's, by how much was claimed
        self.habits: dict[str, Habit] = defaultdict(Habit)
        self.waits: dict[tuple[int, str], Wait] = defaultdict(Wait)
        self.proposed: dict[int, dict[str, Tree]] = {}
        self.asked: dict[str, tuple[int, int]] = {}  # costly drafters, in this step -> sequences, tokens to read first
        self.lengths: dict[str, int] = {}  # blind ones, in this step -> tokens drafted for each
        self.unread: Tensor | None = None
        self.prices: Prices | None = None  # of the step at hand
        self.wanted = False  # is one of them expected to pay in this step?
        self.silent = self.largest = 0  # steps since one was, and the most sequences in one of those
        self.crowd = EVERYBODY  # so many sequences are known to keep them silent

    @classmethod
    def _defaults(cls, workspace: Workspace) -> list[str]:
        """Every registered drafter whose traits say so for these options, the free ones first.

        Of two equal drafts the first is taken: suffix comes before ngram.
        """
        known = {name: lookup(name).traits for name in reversed(names())}
        used = [name for name, traits in known.items() if traits.auto is not None and traits.auto(workspace)]
        return sorted(used, key=lambda name: not known[name].dry)

    def _traits(self, each: list[Traits]) -> Traits:
        merged = super()._traits(each)
        taps = merged.taps if self.looking else ()
        return replace(merged, taps=taps, self_limiting=False, weighs_cost=bool(self.costly))

    def draft(self, request: DraftRequest) -> Draft:
        seqs, budget = request.seqs, request.budgets
        self.proposed, self.asked, self.unread = {seq.id: {} for seq in seqs}, {}, None
        self.wanted, self.lengths, self.prices, self._failures = False, {}, request.prices, []
        for drafter in self.free:
            wanted = [i for i, seq in enumerate(seqs) if may_draft(drafter, seq)]
            if wanted:
                self._propose(drafter, request.select(wanted))
        for drafter in self.costly if not request.dry else ():
            asked = self._whom_for(drafter, seqs, budget)
            if asked:
                self.asked[drafter.name] = len(asked), sum(drafter.backlog(seqs[i]) for i in asked)
                part = request.select(asked)
                if drafter.name in self.mute:
                    self.lengths[drafter.name] = longest = self._length(drafter.name, max(part.budgets), len(asked))
                    part = replace(part, budgets=[min(room, longest) for room in part.budgets])
                self._propose(drafter, part)
        if request.dry:  # free proposals only; what becomes of them is counted all the same
            for seq in seqs:
                for drafter in self.costly if not self.proposed[seq.id] else ():
                    self.waits[seq.id, drafter.name].idle += 1
        self._merge_traits()
        return Draft.pack((self._best(seq) for seq in seqs), self.unread, self._failures)

    def observe(self, step: Step) -> None:
        if self.asked and not any(turn.feed > 1 for turn in step.turns):  # reading a prompt is not what asking takes
            for name, (sequences, unread) in self.asked.items():
                habit, length = self.habits[name], self.lengths.get(name, 0)
                habit.longest = max(habit.longest, length)
                habit.took(step.clock["draft"] / len(self.asked) / max(length, 1), sequences, unread)
        for name, habit in self.habits.items():
            if name not in self.asked:
                habit.rested()
        self._look_away(len(step.turns))
        self.asked = {}
        for turn, read, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None:
                for name, tree in self.proposed.pop(turn.seq.id, {}).items():
                    self._score(turn.seq, name, tree, read, verdict)
        super().observe(step)

    def _score(self, seq: Sequence, name: str, tree: Tree, verified: Tree, verdict: Verdict) -> None:
        """How far a proposal would have been right, whoever's was verified."""
        if tree.tokens[0] < 0:  # unread when it was proposed: if it was not verified, nobody knows what it said
            if not verified.tokens or verified.source != (tree.source or name):
                return
            tree = verified
        tree = self._weighed(name, tree)
        hits = agreement(tree, verdict.tokens)
        known = sum(settled(tree, verdict.tokens, hits))
        self.trust[seq.id, name].add(known, hits)
        self.levels[name, level(tree)].add(known, hits)
        if hits:
            self.waits.pop((seq.id, name), None)
        if name in self.mute and tree.tokens == verified.tokens:
            self.habits[name].told.add(verified, verdict.path, verdict.fates)

    def _look_away(self, sequences: int) -> None:
        """Showing layers takes the target time, and keeping them takes ours: not for drafters that nobody asks.

        Where there are fewer sequences than those that kept them silent, they are looked at again, and after a long
        while. What they have missed of a sequence costs acceptance there.
        """
        self.silent, self.largest = self.silent + 1, max(self.largest, sequences)
        if self.wanted:  # not only tried
            self.crowd = max(self.crowd, sequences + 1)
        elif self.looking and self.silent >= UNASKED:
            self.crowd = max(min(self.crowd, self.largest), 2)
        elif self.silent >= AGAIN:
            self.crowd = EVERYBODY
        looking = sequences < self.crowd or not any(drafter.traits.taps for drafter in self.drafters)
        if self.wanted or looking != self.looking:
            self.silent = self.largest = 0
        if looking != self.looking:
            self.looking, self._merged = looking, []
        self.wanted = False

    def end(self, seq: Sequence) -> None:
        for memory in (self.trust, self.waits):
            for key in [key for key in memory if key[0] == seq.id]:
                del memory[key]
        super().end(seq)

    def _whom_for(self, drafter: Drafter, seqs: list[Sequence], budget: list[int]) -> list[int]:
        """The sequences that a costly drafter is asked for: those that want nobody else, and those that it pays for."""
        named = [i for i, seq in enumerate(seqs) if seq.only == drafter.name]  # nothing to weigh
        others = [i for i, seq in enumerate(seqs) if not seq.only]
        worthy = self._worth_asking(drafter, [seqs[i] for i in others], [budget[i] for i in others]) if others else []
        self.wanted |= bool(named)
        return sorted(named + [others[i] for i in worthy])

    def _worth_asking(self, drafter: Drafter, seqs: list[Sequence], budget: list[int]) -> list[int]:
        """Which of the sequences to ask a costly drafter for; they share what a call takes."""
        prices, habit = self.prices, self.habits[drafter.name]
        speed = 0.0 if prices is None else prices.speed
        gains = [self._gain(drafter, seq, room, len(seqs)) for seq, room in zip(seqs, budget, strict=True)]
        hopeful = [i for i, gain in enumerate(gains) if gain > 0]
        length = self._length(drafter.name, max(budget), len(hopeful)) if drafter.name in self.mute else 1
        if hopeful and sum(gains[i] for i in hopeful) > speed * habit.price(len(hopeful)) * length:
            self.wanted = True
            return hopeful
        if not self.looking:  # it sees nothing: a trial would prove nothing
            return []
        return self._trial(drafter, [i for i, seq in enumerate(seqs) if not self.proposed[seq.id]], seqs, speed)

    def _trial(self, drafter: Drafter, silent: list[int], seqs: list[Sequence], speed: float) -> list[int]:
        """Nobody is worth asking for. Those that have waited longest are tried, where that is paid for by now."""
        name, habit, due = drafter.name, self.habits[drafter.name], []
        for i in silent:
            wait = self.waits[seqs[i].id, name]
            wait.idle += 1
            if wait.over:
                due.append(i)
        # One at a time, the one that takes least: a batch must not read all its prompts to learn one thing.
        due = sorted(due, key=lambda i: drafter.backlog(seqs[i]))[:1]
        cost = habit.price(1) * (FIRST if name in self.mute else 1)
        cost += sum((habit.reading or 0.0) * drafter.backlog(seqs[i]) for i in due)
        if not habit.may_try(speed * cost, len(seqs)):
            return []
        for i in due:
            self.waits[seqs[i].id, name].again()
            habit.made = 0.0
        return due

    def _gain(self, drafter: Drafter, seq: Sequence, room: int, many: int) -> float:
        """Tokens that a costly drafter is expected to bring beyond the best that is there, rows and reading paid.

        Rows are priced as if all of so many sequences had as many.
        """
        habit, prices = self.habits[drafter.name], self.prices
        speed = 0.0 if prices is None else prices.speed

        def price(rows: int) -> float:
            return 0.0 if prices is None else prices.price(rows * many) / many

        best, here = self._best(seq), 0.0
        if best.tokens:  # a weak claim is often worth less than its share of what strong ones brought
            author = self._author(seq, best)
            best = self._weighed(author, best)
            share = min(self.trust[seq.id, author].share, self.levels[author, level(best)].share)
            here = value(claims(best), share, price)
        reading = speed * habit.reading_price(drafter.backlog(seq), seq.room)
        room = self._length(drafter.name, room, many) if drafter.name in self.mute else room
        return value(habit.usual(room), self.trust[seq.id, drafter.name].share, price) - here - reading

    def _length(self, name: str, room: int, many: int) -> int:
        """Tokens to ask of a blind drafter for each of so many: it never leaves off, so somebody must know where.

        What it takes is counted by the token. Beyond twice what was ever tried there is only hope.
        """
        prices, habit = self.prices, self.habits[name]
        seconds = habit.price(many)  # of each token, for all of them
        best, gain, tokens = 1, -math.inf, 0.0
        for k, chance in enumerate(habit.usual(min(room, 2 * habit.longest or FIRST)), start=1):
            tokens += chance
            cost = 0.0 if prices is None else (prices.price(k * many) + prices.speed * seconds * k) / max(many, 1)
            if tokens - cost > gain:
                best, gain = k, tokens - cost
        return best

    def _weighed(self, name: str, tree: Tree) -> Tree:
        """One that says nothing of its chances is believed what became of its drafts."""
        if tree.survival is not None or name not in self.mute:
            return tree
        return tree._replace(survival=self.habits[name].usual(len(tree.tokens)))

    def _propose(self, drafter: Drafter, request: DraftRequest) -> None:
        draft = self._ask(drafter, request)
        if draft is None:
            return
        self.unread = self.unread if draft.unread is None else draft.unread
        for seq, tree in zip(request.seqs, draft.trees, strict=True):
            if tree.tokens:
                self.proposed[seq.id][drafter.name] = tree
                if drafter in self.costly and drafter.name not in self.mute:
                    self.habits[drafter.name].heard(sorted(claims(tree), reverse=True))

    def _best(self, seq: Sequence) -> Tree:
        offers = self.proposed[seq.id]
        if not offers:
            return Tree([], [])
        worth = {
            name: sum(claims(self._weighed(name, tree))) * self.trust[seq.id, name].share
            for name, tree in offers.items()
        }
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
