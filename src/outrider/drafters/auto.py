"""Picks a drafter per sequence and step from their recent acceptance.

Free drafters (`Traits.dry`) propose in every step. One proposal is verified, but the verdict scores them all: the
emitted tokens show how many nodes of each would have been accepted. A proposal is worth its claim (the sum of its
survival) times the recent ratio of accepted to claimed nodes of its drafter.

Costly drafters run passes. One is called where its expected draft beats the best free proposal by more than the call
costs. Prices of rows come with the request; the cost of a call is measured with the step's clock. A drafter that is
not worth a call is tried again with exponential backoff.

This module sees trees, counts and seconds; it does not know how a drafter drafts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..control.acceptance import AcceptanceStats
from ..control.backoff import Backoff
from ..control.ema import Ema, moved
from ..types import Draft, Sequence, Step, Tree, Verdict
from . import Drafter, DraftRequest, Prices, Traits, Workspace, lookup, names, register
from .cascade import Cascade, may_draft

TAPS_OFF_AFTER, TAPS_ON_AFTER = 32, 1024  # steps without a worthwhile call until taps are switched off, and on again
NO_LIMIT = 1 << 30  # sequences
LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)  # edges of the classes of claims that are scored separately
DEFAULT_CONFIDENCE = 0.5  # of each node, where a drafter claims no survival
DECAY = 0.99  # of a call's cost for each step without a call
READ_PER_CALL = 4  # unread tokens of each sequence at an ordinary call: those of the last steps
REMAINING_STEPS = 32  # that an answer is expected to last, if its limit allows
FIRST_LENGTH = 4  # tokens of the first draft of a drafter that does not stop by itself
TRIAL_SHARE = 0.02  # of the tokens emitted since the last trial that the next one may cost


@dataclass
class Trust:
    """Accepted nodes per claimed node of a drafter, recent steps first."""

    claimed: float = 2.0
    accepted: float = 1.6

    def add(self, claimed: float, accepted: int) -> None:
        self.claimed = 0.95 * self.claimed + claimed
        self.accepted = 0.95 * self.accepted + accepted

    @property
    def share(self) -> float:
        return self.accepted / self.claimed


@dataclass
class CostStatistics:
    """What a costly drafter usually claims, and the seconds of a call, or of each drafted token if it claims nothing.

    Reading tokens that the drafter has not seen (at first a whole prompt) is counted apart: it serves many steps.
    """

    claims: list[float] = field(default_factory=lambda: [DEFAULT_CONFIDENCE**i for i in range(1, 5)])  # mean, by depth
    call_seconds: dict[int, float] = field(default_factory=dict)  # by the bit length of the number of sequences
    read_seconds: Ema = field(default_factory=lambda: Ema(0.3))  # for each token read
    drafts: int = 0
    outcomes: AcceptanceStats = field(default_factory=AcceptanceStats)  # of drafts without claims
    longest: int = 0  # tokens of such a draft so far
    since_trial: float = 0.0  # tokens emitted

    def add_claims(self, claims: list[float]) -> None:
        """The claims of its latest draft, likeliest first; a depth that it did not draft counts as 0."""
        self.drafts += 1
        rate = max(0.05, 1 / (self.drafts + 2))  # the first drafts count most
        self.claims += [0.0] * (len(claims) - len(self.claims))
        for depth, mean in enumerate(self.claims):
            claim = claims[depth] if depth < len(claims) else 0.0
            self.claims[depth] = mean + rate * (claim - mean)

    def expected_survival(self, depths: int) -> list[float]:
        """By depth: its usual claims, or the outcomes of its drafts where it claims nothing."""
        return self.outcomes.chain_survival(depths) if self.outcomes.added else self.claims[:depths]

    def add_call(self, seconds: float, sequences: int, unread: int) -> None:
        """A call for this many sequences, which had `unread` tokens in all."""
        size, late = sequences.bit_length(), unread - READ_PER_CALL * sequences
        if late > 0:
            each = max(seconds - self.call_cost(sequences), 0.0) / (late if self.call_seconds else unread)
            self.read_seconds.add(each)
        else:
            self.call_seconds[size] = moved(self.call_seconds.get(size, seconds), seconds, rate=0.1)

    def decay(self) -> None:
        """A step without a call: a cost measured in a busy moment must not rule the drafter out for ever."""
        for size in self.call_seconds:
            self.call_seconds[size] *= DECAY

    def call_cost(self, sequences: int) -> float:
        """Seconds of a call for this many sequences, or else for the nearest known number; 0 before the first call."""
        size = sequences.bit_length()
        if size not in self.call_seconds and self.call_seconds:
            size = min(self.call_seconds, key=lambda known: (abs(known - size), known))
        return self.call_seconds.get(size, 0.0)

    def read_cost(self, unread: int, room: int) -> float:
        """Seconds of reading per step, spread over the steps that an answer with this much room should last."""
        late = max(unread - READ_PER_CALL, 0)
        return (self.read_seconds.value or 0.0) * late / max(min(room, REMAINING_STEPS), 1)


class NoPrices:
    """Of a request with a fixed K: nothing costs anything."""

    speed = 0.0

    def price(self, rows: int) -> float:
        return 0.0


@register("auto")
class Auto(Cascade):
    """Options: auto, a list of drafter names (default suffix, ngram, a head if there is one; exit, model if given)."""

    traits = Traits(options=("auto",))

    def __init__(self, workspace: Workspace) -> None:
        self.taps_on = True  # whether the target shows costly drafters the layers that they tap
        super().__init__(workspace)
        self.without_claims = {drafter.name for drafter in self.costly if drafter.traits.unread}
        self.trust: dict[tuple[int, str], Trust] = defaultdict(Trust)  # by sequence and drafter
        self.trust_at: dict[tuple[str, int], Trust] = defaultdict(Trust)  # by drafter and level, over all sequences
        self.costs: dict[str, CostStatistics] = defaultdict(CostStatistics)
        self.backoffs: dict[tuple[int, str], Backoff] = defaultdict(Backoff)
        self.proposed: dict[int, dict[str, Tree]] = {}  # this step, by sequence and drafter
        self.calls: dict[str, tuple[int, int]] = {}  # costly drafter -> sequences, tokens that it had to read
        self.lengths: dict[str, int] = {}  # drafter without claims -> tokens drafted for each sequence
        self.unread: Tensor | None = None
        self.prices: Prices = NoPrices()
        self.worthwhile = False  # whether a costly drafter is expected to pay, not only tried
        self.idle_steps = self.largest_batch = 0  # since the last worthwhile call
        self.batch_limit = NO_LIMIT  # sequences from which on no call is expected to pay

    @classmethod
    def _defaults(cls, workspace: Workspace) -> list[str]:
        """Drafters whose traits say so, free ones first. Of equal drafts the first is taken: suffix before ngram."""
        known = {name: lookup(name).traits for name in reversed(names())}
        used = [name for name, traits in known.items() if traits.auto is not None and traits.auto(workspace)]
        return sorted(used, key=lambda name: not known[name].dry)

    def _traits(self, each: list[Traits]) -> Traits:
        merged = super()._traits(each)
        taps = merged.taps if self.taps_on else ()
        return replace(merged, taps=taps, self_limiting=False, weighs_cost=bool(self.costly))

    def draft(self, request: DraftRequest) -> Draft:
        seqs = request.seqs
        self.proposed, self.calls, self.unread = {seq.id: {} for seq in seqs}, {}, None
        self.worthwhile, self.lengths, self._failures = False, {}, []
        self.prices = NoPrices() if request.prices is None else request.prices
        for drafter in self.free:
            allowed = [i for i, seq in enumerate(seqs) if may_draft(drafter, seq)]
            if allowed:
                self._propose(drafter, request.select(allowed))
        for drafter in self.costly:
            if not request.dry:
                self._call(drafter, request)
                continue
            for seq in seqs:
                if not self.proposed[seq.id]:
                    self.backoffs[seq.id, drafter.name].idle += 1
        self._merge_traits()
        return Draft.pack((self._best(seq)[1] for seq in seqs), self.unread, self._failures)

    def _propose(self, drafter: Drafter, request: DraftRequest) -> None:
        draft = self._ask(drafter, request)
        if draft is None:
            return
        self.unread = self.unread if draft.unread is None else draft.unread
        for seq, tree in zip(request.seqs, draft.trees, strict=True):
            if tree.tokens:
                self.proposed[seq.id][drafter.name] = tree
                if drafter in self.costly and drafter.name not in self.without_claims:
                    self.costs[drafter.name].add_claims(sorted(claims(tree), reverse=True))

    def _best(self, seq: Sequence) -> tuple[str, Tree]:
        """The most valuable proposal and its drafter's name; an empty tree if there is none."""
        proposed = self.proposed[seq.id]
        if not proposed:
            return "", Tree([], [])
        worth = {
            name: sum(claims(self._with_survival(name, tree))) * self.trust[seq.id, name].share
            for name, tree in proposed.items()
        }
        name = max(proposed, key=lambda n: worth[n])
        tree = proposed[name]
        return name, tree if tree.source else tree._replace(source=name)

    def _with_survival(self, name: str, tree: Tree) -> Tree:
        """A tree without claims gets the survival that its drafter's outcomes suggest."""
        if tree.survival is not None or name not in self.without_claims:
            return tree
        return tree._replace(survival=self.costs[name].expected_survival(len(tree.tokens)))

    def _call(self, drafter: Drafter, request: DraftRequest) -> None:
        """Let a costly drafter propose for the sequences that ask for it by name, and for those where it pays."""
        seqs, name = request.seqs, drafter.name
        named = [i for i, seq in enumerate(seqs) if seq.only == name]
        others = [i for i, seq in enumerate(seqs) if not seq.only]
        self.worthwhile |= bool(named)
        chosen = sorted(named + [others[i] for i in self._worth_calling(drafter, request.select(others))])
        if not chosen:
            return
        self.calls[name] = len(chosen), sum(drafter.backlog(seqs[i]) for i in chosen)
        part = request.select(chosen)
        if name in self.without_claims:
            self.lengths[name] = longest = self._length(name, max(part.budgets), len(chosen))
            part = replace(part, budgets=[min(budget, longest) for budget in part.budgets])
        self._propose(drafter, part)

    def _worth_calling(self, drafter: Drafter, request: DraftRequest) -> list[int]:
        """The sequences to call a costly drafter for; they share the cost of the call."""
        seqs, budgets, name = request.seqs, request.budgets, drafter.name
        gains = [self._gain(drafter, seq, budget, len(seqs)) for seq, budget in zip(seqs, budgets, strict=True)]
        gaining = [i for i, gain in enumerate(gains) if gain > 0]
        if gaining:
            length = self._length(name, max(budgets), len(gaining)) if name in self.without_claims else 1
            cost = self.prices.speed * self.costs[name].call_cost(len(gaining)) * length
            if sum(gains[i] for i in gaining) > cost:
                self.worthwhile = True
                return gaining
        return self._trial(drafter, seqs) if seqs and self.taps_on else []  # without taps a trial proves nothing

    def _trial(self, drafter: Drafter, seqs: list[Sequence]) -> list[int]:
        """No call is expected to pay: try the drafter where its backoff is over, if the trial is affordable."""
        name, stats, due = drafter.name, self.costs[drafter.name], []
        for i, seq in enumerate(seqs):
            if not self.proposed[seq.id]:
                backoff = self.backoffs[seq.id, name]
                backoff.idle += 1
                if backoff.due:
                    due.append(i)
        # One sequence, the cheapest: a batch must not read all its prompts for one trial.
        due = sorted(due, key=lambda i: drafter.backlog(seqs[i]))[:1]
        cost = stats.call_cost(1) * (FIRST_LENGTH if name in self.without_claims else 1)
        cost += sum((stats.read_seconds.value or 0.0) * drafter.backlog(seqs[i]) for i in due)
        stats.since_trial += len(seqs)
        if self.prices.speed * cost > TRIAL_SHARE * stats.since_trial:
            return []
        for i in due:
            self.backoffs[seqs[i].id, name].tried()
            stats.since_trial = 0.0
        return due

    def _gain(self, drafter: Drafter, seq: Sequence, budget: int, sequences: int) -> float:
        """Tokens that a costly drafter should add to the best free proposal, net of rows and reading."""
        stats, prices, name = self.costs[drafter.name], self.prices, drafter.name

        def price(rows: int) -> float:
            return prices.price(rows * sequences) / sequences  # as if every sequence had as many

        free_name, free = self._best(seq)
        free_value = 0.0
        if free.tokens:  # weak claims often come true less than the drafter's average
            free = self._with_survival(free_name, free)
            share = min(self.trust[seq.id, free_name].share, self.trust_at[free_name, level(free)].share)
            free_value = value(claims(free), share, price)
        reading = prices.speed * stats.read_cost(drafter.backlog(seq), seq.room)
        length = self._length(name, budget, sequences) if name in self.without_claims else budget
        return value(stats.expected_survival(length), self.trust[seq.id, name].share, price) - free_value - reading

    def _length(self, name: str, budget: int, sequences: int) -> int:
        """Tokens to draft for each sequence with a drafter without claims, which never stops by itself."""
        prices, stats = self.prices, self.costs[name]
        seconds = stats.call_cost(sequences)  # of one token for all sequences
        best, gain, tokens = 1, -math.inf, 0.0
        longest = min(budget, 2 * stats.longest or FIRST_LENGTH)
        for k, survival in enumerate(stats.expected_survival(longest), start=1):
            tokens += survival
            cost = (prices.price(k * sequences) + prices.speed * seconds * k) / max(sequences, 1)
            if tokens - cost > gain:
                best, gain = k, tokens - cost
        return best

    def observe(self, step: Step) -> None:
        prefill = any(turn.feed > 1 for turn in step.turns)  # its time is no part of the cost of a call
        for name, (sequences, unread) in self.calls.items() if not prefill else ():
            stats, length = self.costs[name], self.lengths.get(name, 0)
            stats.longest = max(stats.longest, length)
            stats.add_call(step.clock["draft"] / len(self.calls) / max(length, 1), sequences, unread)
        for name, stats in self.costs.items():
            if name not in self.calls:
                stats.decay()
        self._switch_taps(len(step.turns))
        self.calls = {}
        for turn, verified, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None:
                for name, tree in self.proposed.pop(turn.seq.id, {}).items():
                    self._score(turn.seq, name, tree, verified, verdict)
        super().observe(step)

    def _score(self, seq: Sequence, name: str, tree: Tree, verified: Tree, verdict: Verdict) -> None:
        """How much of a proposal was right, whichever proposal was verified."""
        if tree.tokens[0] < 0:  # unread when it was proposed: its tokens are known only if it was verified
            if not verified.tokens or verified.source != (tree.source or name):
                return
            tree = verified
        tree = self._with_survival(name, tree)
        hits = agreement(tree, verdict.tokens)
        claimed = sum(settled(tree, verdict.tokens, hits))
        self.trust[seq.id, name].add(claimed, hits)
        self.trust_at[name, level(tree)].add(claimed, hits)
        if hits:
            self.backoffs.pop((seq.id, name), None)
        if name in self.without_claims and tree.tokens == verified.tokens:
            self.costs[name].outcomes.add(verified, verdict.path, verdict.fates)

    def _switch_taps(self, sequences: int) -> None:
        """Taps cost the target time and the drafters memory: switch them off while no call is worthwhile.

        They are on again in smaller batches than those without a worthwhile call, and after TAPS_ON_AFTER steps. What
        a drafter missed of a sequence costs acceptance there.
        """
        self.idle_steps, self.largest_batch = self.idle_steps + 1, max(self.largest_batch, sequences)
        if self.worthwhile:
            self.batch_limit = max(self.batch_limit, sequences + 1)
        elif self.taps_on and self.idle_steps >= TAPS_OFF_AFTER:
            self.batch_limit = max(min(self.batch_limit, self.largest_batch), 2)
        elif self.idle_steps >= TAPS_ON_AFTER:
            self.batch_limit = NO_LIMIT
        taps_on = sequences < self.batch_limit or not any(drafter.traits.taps for drafter in self.drafters)
        if self.worthwhile or taps_on != self.taps_on:
            self.idle_steps = self.largest_batch = 0
        if taps_on != self.taps_on:
            self.taps_on, self._merged = taps_on, []
        self.worthwhile = False

    def end(self, seq: Sequence) -> None:
        for memory in (self.trust, self.backoffs):
            for key in [key for key in memory if key[0] == seq.id]:
                del memory[key]
        super().end(seq)


def value(survival: list[float], trust: float, price: Callable[[int], float]) -> float:
    """Expected tokens of the best prefix of a draft, net of the price of its rows; 0 where no prefix pays."""
    best = tokens = 0.0
    for rows, chance in enumerate(survival, start=1):
        tokens += trust * chance
        best = max(best, tokens - price(rows))
    return best


def claims(tree: Tree) -> list[float]:
    """The survival of each node according to its drafter, or a default."""
    if tree.survival is not None:
        return tree.survival
    survival: list[float] = []
    for parent in tree.parents:
        survival.append(DEFAULT_CONFIDENCE * (survival[parent] if parent >= 0 else 1.0))
    return survival


def level(tree: Tree) -> int:
    """The class of a draft by what it claims in all."""
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
    """The claims whose outcome is known: all, unless the tree agrees with all emitted tokens and goes deeper."""
    survival = claims(tree)
    if hits < len(tokens):
        return survival
    depths: list[int] = []
    for parent in tree.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return [claim for claim, depth in zip(survival, depths, strict=True) if depth <= len(tokens)]
