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

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..types import Draft, Sequence, Step, Tree, Verdict
from . import Drafter, Market, Workspace, register
from ._habit import CLAIM, FIRST, Habit, Wait
from .cascade import Cascade, may_draft
from .head.drafter import chosen

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

    takes = ("auto", "head", "adapter", "draft_model", "assistant_model")
    option_name = "auto"

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.paced, self.frugal = False, bool(self.costly)
        self.mute = {drafter.name for drafter in self.costly if drafter.blind}  # about their chances
        self.trust: dict[tuple[int, str], Trust] = defaultdict(Trust)
        self.levels: dict[tuple[str, int], Trust] = defaultdict(Trust)  # everybody's, by how much was claimed
        self.habits: dict[str, Habit] = defaultdict(Habit)
        self.waits: dict[tuple[int, str], Wait] = defaultdict(Wait)
        self.proposed: dict[int, dict[str, Tree]] = {}
        self.asked: dict[str, tuple[int, int]] = {}  # costly drafters, in this step -> sequences, tokens to read first
        self.lengths: dict[str, int] = {}  # blind ones, in this step -> tokens drafted for each
        self.unread: Tensor | None = None
        self.needs = self.taps  # what the costly ones want to see of the target, while they are asked
        self.wanted = False  # is one of them expected to pay in this step?
        self.silent = self.largest = 0  # steps since one was, and the most sequences in one of those
        self.crowd = EVERYBODY  # so many sequences are known to keep them silent

    @classmethod
    def defaults(cls, space: Workspace) -> tuple[str, ...]:
        model = space.option("draft_model", "assistant_model", default=None)
        given = {"head": chosen(space), "exit": space.option("adapter", default=None), "model": model}
        return ("suffix", "ngram", *(name for name, what in given.items() if what is not None))

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        self._look_around(seqs, budget)
        for drafter in self.costly:
            asked = self._whom_for(drafter, seqs, budget)
            if asked:
                self.asked[drafter.name] = len(asked), sum(drafter.behind(seqs[i]) for i in asked)
                rooms = [budget[i] for i in asked]
                if drafter.name in self.mute:
                    self.lengths[drafter.name] = longest = self._length(drafter.name, max(rooms), len(asked))
                    rooms = [min(room, longest) for room in rooms]
                self._propose(drafter, [seqs[i] for i in asked], rooms)
        return Draft.pack((self._best(seq) for seq in seqs), self.unread)

    def glance(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        """Free proposals only; what becomes of them is counted all the same."""
        self._look_around(seqs, budget)
        for seq in seqs:
            for drafter in self.costly if not self.proposed[seq.id] else ():
                self.waits[seq.id, drafter.name].idle += 1
        return Draft.pack(self._best(seq) for seq in seqs)

    def _look_around(self, seqs: list[Sequence], budget: list[int]) -> None:
        """A new step: the free drafters' proposals."""
        self.proposed, self.asked, self.unread = {seq.id: {} for seq in seqs}, {}, None
        self.wanted, self.lengths = False, {}
        for drafter in self.free:
            wanted = [i for i, seq in enumerate(seqs) if may_draft(drafter, seq)]
            if wanted:
                self._propose(drafter, [seqs[i] for i in wanted], [budget[i] for i in wanted])

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
        looking = self.taps == self.needs
        self.silent, self.largest = self.silent + 1, max(self.largest, sequences)
        if self.wanted:  # not only tried
            self.crowd = max(self.crowd, sequences + 1)
        elif looking and self.silent >= UNASKED:
            self.crowd = max(min(self.crowd, self.largest), 2)
        elif self.silent >= AGAIN:
            self.crowd = EVERYBODY
        shown = () if sequences >= self.crowd else self.needs
        if self.wanted or shown != self.taps:
            self.silent = self.largest = 0
        self.taps, self.wanted = shown, False

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
        market, habit = self.space.market(), self.habits[drafter.name]
        speed = 0.0 if market is None else market.speed
        gains = [self._gain(drafter, seq, room, len(seqs), market) for seq, room in zip(seqs, budget, strict=True)]
        hopeful = [i for i, gain in enumerate(gains) if gain > 0]
        length = self._length(drafter.name, max(budget), len(hopeful)) if drafter.name in self.mute else 1
        if hopeful and sum(gains[i] for i in hopeful) > speed * habit.price(len(hopeful)) * length:
            self.wanted = True
            return hopeful
        if self.taps != self.needs:  # it sees nothing: a trial would prove nothing
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
        due = sorted(due, key=lambda i: drafter.behind(seqs[i]))[:1]
        cost = habit.price(1) * (FIRST if name in self.mute else 1)
        cost += sum((habit.reading or 0.0) * drafter.behind(seqs[i]) for i in due)
        if not habit.may_try(speed * cost, len(seqs)):
            return []
        for i in due:
            self.waits[seqs[i].id, name].again()
            habit.made = 0.0
        return due

    def _gain(self, drafter: Drafter, seq: Sequence, room: int, many: int, market: Market | None) -> float:
        """Tokens that a costly drafter is expected to bring beyond the best that is there, rows and reading paid.

        Rows are priced as if all of so many sequences had as many.
        """
        habit, speed = self.habits[drafter.name], 0.0 if market is None else market.speed

        def price(rows: int) -> float:
            return 0.0 if market is None else market.price(rows * many) / many

        best, here = self._best(seq), 0.0
        if best.tokens:  # a weak claim is often worth less than its share of what strong ones brought
            author = self._author(seq, best)
            best = self._weighed(author, best)
            share = min(self.trust[seq.id, author].share, self.levels[author, level(best)].share)
            here = value(claims(best), share, price)
        reading = speed * habit.reading_price(drafter.behind(seq), seq.room)
        room = self._length(drafter.name, room, many) if drafter.name in self.mute else room
        return value(habit.usual(room), self.trust[seq.id, drafter.name].share, price) - here - reading

    def _length(self, name: str, room: int, many: int) -> int:
        """Tokens to ask of a blind drafter for each of so many: it never leaves off, so somebody must know where.

        What it takes is counted by the token. Beyond twice what was ever tried there is only hope.
        """
        market, habit = self.space.market(), self.habits[name]
        seconds = habit.price(many)  # of each token, for all of them
        best, gain, tokens = 1, -math.inf, 0.0
        for k, chance in enumerate(habit.usual(min(room, 2 * habit.longest or FIRST)), start=1):
            tokens += chance
            cost = 0.0 if market is None else (market.price(k * many) + market.speed * seconds * k) / max(many, 1)
            if tokens - cost > gain:
                best, gain = k, tokens - cost
        return best

    def _weighed(self, name: str, tree: Tree) -> Tree:
        """One that says nothing of its chances is believed what became of its drafts."""
        if tree.survival is not None or name not in self.mute:
            return tree
        return tree._replace(survival=self.habits[name].usual(len(tree.tokens)))

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
