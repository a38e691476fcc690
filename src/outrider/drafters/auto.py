"""Picks a drafter per sequence and step from their recent acceptance.

Free drafters propose in every step: those that say so (`Traits.dry`), until their calls turn out to be slow. One
proposal is verified, but the verdict scores them all: the emitted tokens show how many nodes of each would have been
accepted. A proposal is worth its claim (the sum of its survival) times the recent ratio of accepted to claimed nodes of
its drafter.

Costly drafters run passes. One is called where its expected draft beats the best free proposal by more than the call
costs. Prices of rows come with the request; the cost of a call is measured with the step's clock. A drafter that is
not worth a call is tried again with exponential backoff.

This module sees trees, counts and seconds; it does not know how a drafter drafts.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..control.acceptance import AcceptanceStats
from ..control.costs import DraftCosts
from ..types import Draft, Sequence, Step, Tree, Verdict
from . import Drafter, DraftRequest, Forecast, Prices, Traits, Workspace, lookup, names, register
from .cascade import Cascade, may_draft

TAPS_OFF_AFTER, TAPS_ON_AFTER = 32, 1024  # steps without a worthwhile call until taps are switched off, and on again
NO_LIMIT = 1 << 30  # sequences
LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)  # edges of the classes of claims that are scored separately
DEFAULT_CONFIDENCE = 0.5  # of each node, where a drafter claims no survival
DECAY = 0.99  # of a call's cost for each step without a call
FIRST_READ = 2  # sequences of a batch whose prompts are read at first
NEW_ROWS = 32  # unread tokens from which on a sequence is a new one to a drafter: more than any step emits
READ_PER_CALL = 4  # unread tokens of each sequence at an ordinary call: those of the last steps
READ_GUESS = 0.05  # price of reading a token, in rows of the target, before any was read
REMAINING_STEPS = 32  # that an answer is expected to last, if its limit allows
FORESEEN = 8  # drafts that a forecast counts as
NEW = 8.0  # claimed nodes that the trust left by other sequences counts as in a new one
FIRST_LENGTH = 2  # tokens of the first draft of a drafter that does not stop by itself
FIRST_PAUSE, LONGEST_PAUSE = 24, 384  # steps between trials of a drafter that is not worth a call
SLOW = 0.25  # share of a token's time from which on a free drafter's call for a sequence is not free
TRIAL_SHARE = 0.02  # of the tokens emitted since the last trial that the next one may cost; of the time of a prompt and
# the answers that reading for a first one may take


class Ema:
    """A moving average of positive samples; one counts as at most CLIP times the average: outliers do little."""

    CLIP = 3.0

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.value: float | None = None  # None: no sample yet

    def add(self, x: float) -> None:
        mean = x if self.value is None else self.value
        self.value = mean + self.rate * (min(x, self.CLIP * mean) - mean)


class Backoff:
    """Of trials: one is due after `pause` idle steps. Each trial doubles the pause, up to LONGEST_PAUSE."""

    def __init__(self) -> None:
        self.idle, self.pause = 0, FIRST_PAUSE

    @property
    def due(self) -> bool:
        return self.idle >= self.pause

    def tried(self) -> None:
        """A trial starts."""
        self.idle, self.pause = 0, min(2 * self.pause, LONGEST_PAUSE)


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
    """What a costly drafter usually claims or, where it claims nothing, achieves, and the seconds of its calls.

    Reading tokens that the drafter has not seen (at first a whole prompt) is counted apart: it serves many steps.
    """

    claims: list[float] = field(default_factory=lambda: [DEFAULT_CONFIDENCE])  # mean, by depth
    calls: DraftCosts = field(default_factory=DraftCosts)
    read_seconds: Ema = field(default_factory=lambda: Ema(0.3))  # for each token read
    drafts: int = 0
    outcomes: AcceptanceStats = field(default_factory=AcceptanceStats)  # of drafts without claims
    idle: int = 0  # steps since the last call
    since_trial: float = 0.0  # tokens emitted

    def begin(self, forecast: Forecast) -> None:
        """Start from what is known: acceptance counts as FORESEEN drafts."""
        if forecast.survival:
            self.claims, self.drafts = list(forecast.survival), FORESEEN
            self.outcomes.foresee(forecast.survival, FORESEEN)
        for call in forecast.timed:
            self.calls.add(*call, foreseen=True)
        if forecast.read is not None:
            self.read_seconds.add(forecast.read)

    def add_claims(self, claims: list[float], length: int) -> None:
        """The claims of its latest draft of up to `length` tokens, likeliest first; what it left out counts as 0."""
        self.drafts += 1
        rate = max(0.05, 1 / (self.drafts + 2))  # the first drafts count most
        claims = claims + [0.0] * (length - len(claims))
        self.claims += claims[len(self.claims) :]
        for depth, claim in enumerate(claims):
            self.claims[depth] += rate * (claim - self.claims[depth])

    def expected_survival(self, depths: int) -> list[float]:
        """By depth: its usual claims, or the outcomes of its drafts where it claims nothing. Beyond the depths that it
        has drafted, each survives as often as the last known ones do given the ones before."""
        if self.outcomes.added:  # beginning with what was foreseen
            return self.outcomes.expected_survival(depths)
        last = self.claims[-1]
        rate = min(last, 1.0) ** (1 / len(self.claims))
        return (self.claims + [last * rate**i for i in range(1, depths - len(self.claims) + 1)])[:depths]

    def add_call(self, seconds: float, sequences: int, k: int, unread: int) -> None:
        """A call for k tokens of this many sequences, which had `unread` tokens in all."""
        self.idle = 0
        if unread > READ_PER_CALL * sequences:
            self.read_seconds.add(max(seconds - self.call_cost(sequences, k), 0.0) / unread)
        else:
            self.calls.add(sequences, k, seconds)

    @property
    def tried(self) -> bool:
        """Whether its calls have been timed, and it has been called or its acceptance is stated."""
        return self.known and self.calls.count + self.drafts > 0

    @property
    def known(self) -> bool:
        """Whether a call has been timed."""
        return len(self.calls.lines) > 0

    def call_cost(self, sequences: int, k: int) -> float:
        """Seconds of a call; 0 before the first. It decays without calls: a cost measured in a busy moment must not
        rule the drafter out for ever."""
        return self.calls.line(sequences)(k) * DECAY**self.idle if self.known else 0.0

    def read_cost(self, unread: int, room: int) -> float:
        """Seconds of reading per step, spread over the steps that an answer with this much room should last."""
        late = max(unread - READ_PER_CALL, 0)
        return (self.read_seconds.value or 0.0) * late / max(min(room, REMAINING_STEPS), 1)


class NoPrices:
    """Of a request with a fixed K: nothing costs anything."""

    speed, limit = 0.0, math.inf

    def price(self, rows: int) -> float:
        return 0.0


@register("auto")
class Auto(Cascade):
    """Options: auto, a list of drafter names (default suffix, ngram, a head if there is one; exit, model if given)."""

    traits = Traits(options=("auto",))

    def __init__(self, workspace: Workspace) -> None:
        self.taps_on = True  # whether the target shows costly drafters the layers that they tap
        super().__init__(workspace)
        self.trust: dict[tuple[int, str], Trust] = {}  # by sequence and drafter
        self.trust_in: dict[str, Trust] = defaultdict(Trust)  # by drafter, over all sequences: that of a new one
        self.trust_at: dict[tuple[str, int], Trust] = defaultdict(Trust)  # by drafter and level, over all sequences
        self.costs: dict[str, CostStatistics] = defaultdict(CostStatistics)
        self.backoffs: dict[tuple[int, str], Backoff] = defaultdict(Backoff)
        self.now: Callable[[], float] = time.perf_counter
        self.free_seconds: dict[str, Ema] = defaultdict(lambda: Ema(0.1))  # of a free drafter's call for each sequence
        self.proposed: dict[int, dict[str, Tree]] = {}  # this step, by sequence and drafter
        self.lengths_then: dict[int, int] = {}  # tokens of each sequence when these were proposed
        self.calls: dict[str, tuple[int, int]] = {}  # costly drafter -> sequences, tokens that it had to read
        self.lengths: dict[str, int] = {}  # costly drafter -> tokens drafted for each sequence
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
        forecast = next((traits.forecast for traits in each if traits.forecast is not None), None)
        return replace(merged, taps=taps, self_limiting=False, weighs_cost=bool(self.costly), forecast=forecast)

    def draft(self, request: DraftRequest) -> Draft:
        seqs = request.seqs
        self.proposed, self.calls, self.unread = {seq.id: {} for seq in seqs}, {}, None
        self.worthwhile, self.lengths, self._failures = False, {}, []
        self.lengths_then = {seq.id: len(seq.tokens) for seq in seqs}
        self.prices = NoPrices() if request.prices is None else request.prices
        for drafter in self.free:
            allowed = [i for i, seq in enumerate(seqs) if may_draft(drafter, seq)]
            if allowed:
                begin = self.now()
                self._propose(drafter, request.select(allowed))
                self.free_seconds[drafter.name].add((self.now() - begin) / len(allowed))
        for drafter in self.costly:
            self._call(drafter, request)
        self._merge_traits()
        return Draft.pack((self._best(seq)[1] for seq in seqs), self.unread, self._failures)

    def _demote_slow(self, plain: float) -> None:
        """A free drafter whose call takes a good part of a pass is a costly one. `plain`: seconds of a token."""
        slow = [drafter for drafter in self.free if (self.free_seconds[drafter.name].value or 0.0) > SLOW * plain]
        for drafter in slow:
            self.free.remove(drafter)
            self.costly.append(drafter)

    def _propose(self, drafter: Drafter, request: DraftRequest) -> None:
        draft = self._ask(drafter, request)
        if draft is None:
            return
        self.unread = self.unread if draft.unread is None else draft.unread
        for seq, tree in zip(request.seqs, draft.trees, strict=True):
            if tree.tokens:
                self.proposed[seq.id][drafter.name] = tree
                if drafter in self.costly and tree.survival is not None:
                    length = self.lengths.get(drafter.name, len(tree.tokens))
                    self.costs[drafter.name].add_claims(sorted(claims(tree), reverse=True), length)

    def _best(self, seq: Sequence) -> tuple[str, Tree]:
        """The most valuable proposal and its drafter's name; an empty tree if there is none."""
        proposed = self.proposed[seq.id]
        if not proposed:
            return "", Tree([], [])

        def worth(name: str) -> tuple[float, float]:
            """Beyond its rows: a long draft of weak claims is worth less than a short one of strong claims."""
            survival, share = claims(self._with_survival(name, proposed[name])), self._trust(seq, name).share
            return value(survival, share, self._row_price), share * sum(survival)

        name = max(proposed, key=worth) if len(proposed) > 1 else next(iter(proposed))
        tree = self._with_survival(name, proposed[name])
        return name, tree if tree.source else tree._replace(source=name)

    def _row_price(self, rows: int) -> float:
        """Of so many rows of a sequence, as if every sequence had as many."""
        count = len(self.proposed)
        return self.prices.price(rows * count) / count

    def _trust(self, seq: Sequence, name: str) -> Trust:
        """That in a drafter for a sequence; of a new one, a little of what others have left."""
        if (seq.id, name) not in self.trust:
            self.trust[seq.id, name] = Trust(NEW, NEW * self.trust_in[name].share)
        return self.trust[seq.id, name]

    def _with_survival(self, name: str, tree: Tree) -> Tree:
        """A costly drafter's tree without claims gets the survival that the outcomes of earlier ones suggest."""
        if tree.survival is not None or not self._is_costly(name):
            return tree
        return tree._replace(survival=self.costs[name].expected_survival(len(tree.tokens)))

    def _is_costly(self, name: str) -> bool:
        return any(drafter.name == name for drafter in self.costly)

    def _call(self, drafter: Drafter, request: DraftRequest) -> None:
        """Let a costly drafter propose for the sequences that ask for it by name, and for those where it pays."""
        seqs, name = request.seqs, drafter.name
        named = [i for i, seq in enumerate(seqs) if seq.only == name]
        others = [i for i, seq in enumerate(seqs) if not seq.only]
        self.worthwhile |= bool(named)
        chosen = sorted(named + [others[i] for i in self._worth_calling(drafter, request.select(others))])
        if not chosen:
            return
        self.calls[name] = len(chosen), sum(drafter.traits.backlog(seqs[i]) for i in chosen)
        part = request.select(chosen)
        self.lengths[name] = longest = self._length(drafter, max(part.budgets), len(chosen))
        if longest < max(part.budgets):
            part = replace(part, budgets=[min(budget, longest) for budget in part.budgets])
        self._propose(drafter, part)

    def _worth_calling(self, drafter: Drafter, request: DraftRequest) -> list[int]:
        """The sequences to call a costly drafter for; they share the cost of the call."""
        seqs, budgets, stats = request.seqs, request.budgets, self.costs[drafter.name]
        if not seqs:
            return []
        if drafter.traits.forecast is not None:
            self._foresee(drafter.name, drafter.traits.forecast)
        if not stats.tried and self.prices.speed:
            return self._first_call(drafter, seqs) if self.taps_on else []
        length = self._length(drafter, max(budgets), len(seqs))
        gains = [self._gain(drafter, seq, min(b, length)) for seq, b in zip(seqs, budgets, strict=True)]
        gaining = [i for i, gain in enumerate(gains) if gain > 0]
        cost = self.prices.speed * stats.call_cost(len(gaining), length)
        if gaining and sum(gains[i] for i in gaining) > cost and cost <= self.prices.limit:
            self.worthwhile = True
            return self._few_new(drafter, seqs, gaining)
        return self._trial(drafter, seqs) if self.taps_on else []  # without taps a trial proves nothing

    def _few_new(self, drafter: Drafter, seqs: list[Sequence], gaining: list[int]) -> list[int]:
        """Those whose prompts it has read, and as many others: a batch is read while the evidence doubles."""
        new = [i for i in gaining if drafter.traits.backlog(seqs[i]) > NEW_ROWS]
        most = max(len(gaining) - len(new), FIRST_READ)
        late = set(sorted(new, key=lambda i: drafter.traits.backlog(seqs[i]))[most:])
        return [i for i in gaining if i not in late]

    def _foresee(self, name: str, forecast: Forecast) -> None:
        """Start from what is known of a drafter: a few unlucky drafts weigh less than many that were measured."""
        if not self.costs[name].known:
            self.costs[name].begin(forecast)
            if forecast.survival:
                self.trust_in[name] = Trust(FORESEEN, 0.9 * FORESEEN)

    def _first_call(self, drafter: Drafter, seqs: list[Sequence]) -> list[int]:
        """For one sequence, that with least to read, where reading should take a small share of the batch's time: a
        batch must not read all its prompts, nor a short answer pay for a drafter that it will not use."""
        at = min(range(len(seqs)), key=lambda i: drafter.traits.backlog(seqs[i]))
        prompt = self.prices.price(1) * drafter.traits.backlog(seqs[at])  # of the target's own reading, in tokens
        answers = sum(seq.room for seq in seqs)
        return [at] if READ_GUESS * prompt <= TRIAL_SHARE * (prompt + answers) else []

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
        due = sorted(due, key=lambda i: drafter.traits.backlog(seqs[i]))[:1]
        cost = stats.call_cost(1, FIRST_LENGTH)
        cost += sum((stats.read_seconds.value or 0.0) * drafter.traits.backlog(seqs[i]) for i in due)
        stats.since_trial += len(seqs)
        if self.prices.speed * cost > TRIAL_SHARE * stats.since_trial:
            return []
        for i in due:
            self.backoffs[seqs[i].id, name].tried()
            stats.since_trial = 0.0
        return due

    def _gain(self, drafter: Drafter, seq: Sequence, budget: int) -> float:
        """Tokens that a costly drafter should add to the best free proposal, net of rows and reading."""
        stats, prices, name = self.costs[drafter.name], self.prices, drafter.name
        free_name, free = self._best(seq)
        free_value = 0.0
        if free.tokens:  # weak claims often come true less than the drafter's average
            share = min(self._trust(seq, free_name).share, self.trust_at[free_name, level(free)].share)
            free_value = value(claims(free), share, self._row_price)
        reading = prices.speed * stats.read_cost(drafter.traits.backlog(seq), seq.room)
        share = self._trust(seq, name).share
        return value(stats.expected_survival(budget), share, self._row_price) - free_value - reading

    def _length(self, drafter: Drafter, budget: int, sequences: int) -> int:
        """Tokens to draft for each sequence: those that are worth most beyond their rows and the call. A drafter that
        stops by itself takes any budget."""
        prices, stats = self.prices, self.costs[drafter.name]
        if drafter.traits.self_limiting or not prices.speed:
            return budget
        if not stats.known:
            return min(budget, FIRST_LENGTH - stats.drafts % 2)  # two lengths show what one more token costs
        best, gain, tokens, limit = 1, -math.inf, 0.0, prices.limit
        for k, survival in enumerate(stats.expected_survival(budget), start=1):
            tokens += survival
            cost = prices.price(k * sequences) + prices.speed * stats.call_cost(sequences, k)
            if cost > limit:
                break
            if tokens - cost / sequences > gain:
                best, gain = k, tokens - cost / sequences
        return best

    def observe(self, step: Step) -> None:
        prefill = any(turn.feed > 1 for turn in step.turns)  # its time is no part of the cost of a call
        for name, (sequences, unread) in self.calls.items() if not prefill else ():
            self.costs[name].add_call(step.clock["draft"] / len(self.calls), sequences, self.lengths[name], unread)
        for stats in self.costs.values():
            stats.idle += 1
        self._switch_taps(len(step.turns))
        self.calls = {}
        if self.proposed:  # else nothing was requested
            self._score_all(step)
        super().observe(step)

    def _score_all(self, step: Step) -> None:
        if self.prices.speed and not step.in_round:  # else the host drafts while the device runs
            self._demote_slow(1 / self.prices.speed)
        for turn, verified, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            seq = turn.seq
            emitted = seq.tokens[self.lengths_then.get(seq.id, len(seq.tokens)) :]  # more than the verdict's in a round
            if verdict is not None and emitted:
                for name, tree in self.proposed.pop(seq.id, {}).items():
                    self._score(seq, name, tree, emitted, verified, verdict)

    def _score(
        self, seq: Sequence, name: str, tree: Tree, emitted: list[int], verified: Tree, verdict: Verdict
    ) -> None:
        """How much of a proposal was right, whichever proposal was verified."""
        own = bool(verified.tokens) and verified.source == (tree.source or name)
        if tree.tokens[0] < 0 and not own:  # unread when it was proposed: its tokens are known only if it was verified
            return
        if tree.survival is None and own and self._is_costly(name):
            stats, emitted = self.costs[name], verdict.tokens
            tree = verified._replace(survival=stats.expected_survival(len(verified.tokens)))
            stats.outcomes.add(verified, verdict.fates)
        hits = agreement(tree, emitted)
        claimed = sum(settled(tree, emitted, hits))
        self._trust(seq, name).add(claimed, hits)
        self.trust_in[name].add(claimed, hits)
        self.trust_at[name, level(tree)].add(claimed, hits)
        if hits:
            self.backoffs.pop((seq.id, name), None)

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
    best, tokens, all_tokens = 0.0, 0.0, trust * sum(survival)
    for rows, chance in enumerate(survival, start=1):
        tokens, cost = tokens + trust * chance, price(rows)
        best = max(best, tokens - cost)
        if all_tokens - cost <= best:
            break  # more rows never cost less
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
