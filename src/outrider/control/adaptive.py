"""Controllers: how much to draft. `Fixed` drafts K nodes; `Adaptive` drafts as much as pays.

A plain pass emits one token for each of its B sequences. A draft whose nodes survive with the chances s1, s2, … adds
rows to the pass and seconds of drafting before it. What is to be as high as possible is the speed

    (B + s1 + s2 + …) / (t_draft + t(rows with the draft))          plain decoding: B / t(B)

Over many steps it is highest if every step takes the draft that is worth most, in tokens, at the speed λ that is
reached, and none where none is worth more than a margin:

    worth = s1 + s2 + … − λ · (t(rows with the draft) − t(rows without it) + t_draft)

t and t_draft are measured and corrected (`costs`), survival is learnt from verdicts (`acceptance`); λ is the speed of
plain decoding times the recent lead over it.

`budget` decides before anything is drafted, by what verdicts have shown; `prune` again, by the survival of what was
drafted. That is a drafter's own claim, corrected by verdicts, so where nothing was planned (drafters that are asked
whatever is expected of them) no draft costs more than half of the credit, as if every node were rejected. Where nothing
is expected to pay but a right draft would, the same credit pays for trials of the draft that is expected to lose least;
rows that are not worth their price are not verified in a trial either, and the target's own token shows for nothing
whether the first node was right. The credit also pays for requests of drafters on the host, which cost little and often
find nothing. Nothing here knows whether a step ran on a CPU or in a GPU's round, nor when the host read it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from itertools import accumulate
from operator import add
from typing import NamedTuple

from ..engine.drafter import Forecast, Traits
from ..types import Draft, Sequence, Step, Tree, Turn
from . import Controller
from .acceptance import AcceptanceStats
from .costs import DraftCosts, Line, PassCosts, StepPrices

HOPELESS = "is not used: even a certain draft would lose by its rows, its seconds or reading the prompts"


class Fixed(Controller):
    """Up to K nodes for every sequence in every step. Fixed(0) is plain decoding."""

    def __init__(self, k: int, block: int = 1) -> None:
        self.k, self.block = k, block
        self.why = f"K is fixed at {k}" if k else "speculation is switched off"

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        return [turn.allow(turn.room(self.k, self.block)) for turn in turns] if self.k else turns


class Credit:
    """One account: a first credit for each sequence of the largest batch, and once for a statement of acceptance; SHARE
    of the time of all passes, prompts included; and what drafts gained. Time is counted in tokens that plain decoding
    makes in it.

    Who is always wrong lives on SHARE: once verdicts have shown that, n tokens take no longer than the first credit +
    SHARE · n tokens more than plain decoding, whatever the drafter claims. Reading a prompt is risked where it is
    expected to pay, and leaves half of the first credit.
    """

    FIRST = 0.5  # tokens: two drafts of one token on a CPU, any draft on a GPU; 1 % of an answer of 50 tokens
    STATED = 2.0  # once, besides: with a drafter whose acceptance is stated, three unlucky drafts prove little
    SHARE = 0.01  # half of the two percent that "never slower" allows; the rest is for what no clock of ours sees
    SAVED = 6.0  # tokens for each sequence that are kept at most, so that a run of wrong drafts ends no success
    DEBT = 0.5  # tokens for each sequence: a call that took longer than all that is a mishap, not a habit

    def __init__(self) -> None:
        self.tokens, self.sequences, self.largest = 0.0, 0, 0

    def admit(self, sequences: int, stated: bool) -> None:
        """So many run now, with a drafter whose acceptance may be stated."""
        self.tokens += self.FIRST * max(sequences - self.largest, 0) + self.STATED * (stated and not self.largest)
        self.sequences, self.largest = sequences, max(sequences, self.largest)

    def add(self, gain: float, least: float = -DEBT, most: float = math.inf) -> None:
        """Tokens that were gained or lost. A loss leaves each sequence `least`, gains are saved up to `most` each."""
        count, now = self.sequences, self.tokens
        self.tokens = max(min(now + gain, max(now, most * count)), min(now, least * count))


class Plan(NamedTuple):
    """The same number of nodes for each of some sequences."""

    gain: float  # expected tokens beyond the price
    price: float  # in tokens
    k: int
    sequences: list[int]  # ids


class Adaptive(Controller):
    """Drafts what is worth more than its time, and never risks more than it may lose (see the top of this page)."""

    CHEAP = 0.05  # share of a plain pass below which drafts are requested whatever is expected of them: it takes the
    # search of a host drafter (1 to 4 % on a CPU), and not a pass of a head or model (10 % and more)
    RECENT = 0.05  # weight of a step in `lead`: the last twenty count
    PROBED = 4  # sequences of a batch that are tried together, at least: acceptance is learnt from a few,
    PART = 8  # and this part of a large batch: a few that are right cannot pay for the pass that drafts
    FULL = 64  # prompt rows from which on a pass has no row to spare
    MAX_PAUSE = 16  # steps, at most, before a drafter is looked at again for which there was no use: looking takes time
    LASTS = 16  # steps in which the gain of drafts must pay for the reading of a prompt
    FORESEEN = 8  # drafts that a forecast of acceptance counts as
    FREE_NODES = 512  # requested of a cheap drafter for a whole batch: weighing 1024 takes 1.5 ms, so many half of that

    prices: StepPrices

    def __init__(self, costs: PassCosts, k_max: int = 16, name: str = "the drafter", block: int = 1) -> None:
        self.costs, self.k_max, self.name, self.block = costs, k_max, name, block
        self.overall = AcceptanceStats()
        self.by_sequence: dict[int, AcceptanceStats] = defaultdict(partial(AcceptanceStats, self.overall))
        self.drafting: dict[str, DraftCosts] = defaultdict(DraftCosts)  # by the drafter's mode
        self.reading = Line()  # seconds of calls that read prompts, by their tokens
        self.asked: set[int] = set()  # sequences whose prompts the drafter has read
        self.credit = Credit()
        self.lead = 1.0  # recent speed relative to plain decoding, at least 1
        self.pause = self.pause_batch = 0  # steps without a look at the drafter, for a batch of this size
        self.plain_steps = list[tuple[int, float]]()  # sequences and seconds of those to learn from
        self.is_cheap = False  # whether the drafter is asked whatever is expected of it
        self.offered = 0  # nodes of the largest tree of a step, before pruning
        self.why = "no step yet"
        # Of the step that is being prepared; `observe` reads the mode alone.
        self.turns, self.traits, self.prices = list[Turn](), Traits(), StepPrices([], costs, 1.0, 0.0)

    # ------------------------------------------------------------ before drafting

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        own = [turn.seq.id for turn in turns if turn.seq.has_request_drafts]
        paused = self.pause > 0 and len(turns) == self.pause_batch
        self.pause -= 1
        if (paused and not own) or not turns:
            return turns
        self._learn_plain()
        self.turns, self.traits, self.stop_below, self.is_cheap, self.offered = turns, traits, 0.0, False, 0
        self.credit.admit(len(turns), traits.forecast is not None and bool(traits.forecast.survival))
        self.prices = StepPrices(turns, self.costs, self.lead, self.credit.tokens)
        free = max(2, min(self.k_max, self.FREE_NODES // len(turns)))
        rooms = {} if paused else self._rooms(free)
        own = [seq_id for seq_id in own if seq_id not in rooms]
        rooms |= dict.fromkeys(own, free)
        each = ((turn, rooms.get(turn.seq.id, 0), turn.seq.id in own) for turn in turns)
        return [turn.allow(turn.room(k, self.block), only) for turn, k, only in each] if rooms else turns

    def _rooms(self, free: int) -> dict[int, int]:
        """Sequence -> nodes to request of the drafter. A cheap one is asked for `free` nodes in every step, unless it
        has found little lately (`_learn_request`)."""
        self.why = f"{self.name} has nothing to propose: plain decoding"
        if self.credit.tokens <= 0:
            return self._pause("has gained less than it cost and is paused: plain decoding is faster", 0.0)
        batch, calls = len(self.turns), self.drafting[self.traits.mode]
        known = self.traits.forecast is not None  # such a drafter needs the pass over the prompt before it can draft
        seqs = [turn.seq for turn in self.turns if turn.room(1) and not (known and turn.feed > 1)]
        if self.prices.rows > batch + self.FULL:
            return self._explain(f"{self.name} is not used while prompts fill the pass")
        if seqs and not self.traits.weighs_cost:
            if not self._is_known(calls):
                return self._try(1, [seq.id for seq in seqs[: self._probed(seqs)]])
            line = calls.line(batch)
            if line(self.k_max) > self.CHEAP * self.costs(batch, batch):
                return self._costly_rooms(seqs, line)
        if seqs and not self.prices.can_pay(len(seqs) * free):
            return self._pause(HOPELESS)
        self.is_cheap = True
        return dict.fromkeys((seq.id for seq in seqs), free)

    def _is_known(self, calls: DraftCosts) -> bool:
        """Whether there is enough to plan with, be it from before the first call, which may be slower than others."""
        forecast = self.traits.forecast or Forecast()
        for call in forecast.timed if not calls.lines else ():
            calls.add(*call, foreseen=True)
        if not self.overall.ranks:
            self.overall.foresee(forecast.survival, self.FORESEEN)
        return calls.count > 0 or bool(forecast.timed and forecast.survival)

    def _costly_rooms(self, seqs: list[Sequence], line: Line) -> dict[int, int]:
        """The same where drafting costs time: by the acceptance at each depth."""
        plans = self._plans(seqs, line)
        if not plans:
            return self._pause(HOPELESS)
        best, probed = max(plans), self._probed(seqs)
        count = len(best.sequences)
        break_even = self.prices.price(count, line(2) - line(1)) / count  # survival at which one more node of each pays
        if best.gain > self.prices.margin:
            several = f" for {count}" if len(self.turns) > 1 else ""
            self._expect(f"up to {best.k} nodes{several}", best.gain + best.price)
            self.stop_below = 0.0 if self.traits.self_limiting else break_even
            return dict.fromkeys(best.sequences, self.k_max if self.traits.self_limiting else best.k)
        trial = next((plan for plan in reversed(plans) if len(plan.sequences) <= probed), plans[0])
        if trial.price <= self.prices.limit:
            return self._try(trial.k, trial.sequences)
        odds = _odds(max(self._expected(seq)[0] for seq in seqs), break_even)
        return self._pause(odds, 2 * trial.price / self.lead)

    def _plans(self, seqs: list[Sequence], line: Line) -> list[Plan]:
        """For 1, 2, 4, … of the most promising sequences, and for all: as many nodes as gain most or lose least, of
        the numbers with which something would be gained if all nodes were right."""
        seconds = [line(k) for k in range(1, self.k_max + 1)]
        each = {seq.id: self._outlook(seq) for seq in seqs}
        ranked = sorted(each, key=lambda seq_id: each[seq_id][1][-1] - each[seq_id][0][-1])
        plans, tokens, reading = list[Plan](), [0.0] * self.k_max, [0.0] * self.k_max
        for count, seq_id in enumerate(ranked, start=1):
            tokens, reading = (list(map(add, *pair)) for pair in zip((tokens, reading), each[seq_id], strict=True))
            if count & (count - 1) == 0 or count == len(ranked):  # powers of two and the whole batch are enough
                options = []
                for k, (t, r, s) in enumerate(zip(tokens, reading, seconds, strict=True), start=1):
                    price = self.prices.price(count * k, s) + r
                    if count * k - price > self.prices.margin:
                        options.append((t - price, price, k))
                plans += [Plan(*max(options), ranked[:count])] if options else []
        return plans

    def _outlook(self, seq: Sequence) -> tuple[list[float], list[float]]:
        """Of 1, 2, … nodes: the tokens expected, and the part of reading the prompt that they must pay: it is read once
        for all steps until the answer ends, of which LASTS are counted at most."""
        tokens = list(accumulate(self._expected(seq)))
        if seq.id in self.asked or not self.reading.n:
            return tokens, [0.0] * self.k_max
        reading = self.prices.speed * self.reading.slope * _prompt_length(seq)
        return tokens, [reading * max(1 / self.LASTS, (1 + t) / max(seq.room, 1)) for t in tokens]

    def _expected(self, seq: Sequence) -> list[float]:
        return self.by_sequence[seq.id].expected_survival(self.k_max)

    def _try(self, k: int, sequences: list[int]) -> dict[int, int]:
        self._explain(f"{self.name} is tried: {k} nodes for {len(sequences)} sequences")
        return dict.fromkeys(sequences, k)

    def _probed(self, seqs: list[Sequence]) -> int:
        return max(self.PROBED, len(seqs) // self.PART)

    # ------------------------------------------------------------ before verifying

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        """Keep the likeliest nodes of all trees together, as many as are worth their rows."""
        trees = [(i, tree) for i, tree in enumerate(draft.trees) if tree.tokens]
        self.offered = max((len(tree.tokens) for _, tree in trees), default=0)
        nodes = sorted((-s, i) for i, tree in trees for s in self._survival(turns[i].seq, tree))
        limit = self.prices.limit if self.is_cheap else math.inf
        best = self.prices.best((-minus for minus, _ in nodes), limit)
        kept = [0] * len(turns)
        for _, i in nodes[:best]:
            kept[i] += 1
        if best:
            self._expect(f"{best} of {len(nodes)} drafted", -sum(minus for minus, _ in nodes[:best]))
        elif nodes:
            self._explain(f"{self.name} {_odds(-nodes[0][0], self.prices.price(len(turns)) / len(turns))}")
        return Draft.pack(map(Tree.cut, draft.trees, kept))

    def _survival(self, seq: Sequence, tree: Tree) -> list[float]:
        """Each node's survival by the statistics, never rising along the list, so that every cut is a tree."""
        stats, matched = self.by_sequence[seq.id], seq.rule == "match"
        if tree.survival is None:
            return stats.expected_survival(len(tree.tokens))
        claims = tree.survival if matched else tree.survival[:-1]  # else by its parent
        survival = list(accumulate((stats.survival(claim, tree.source) for claim in claims), min))
        return survival if matched else [1.0, *survival][: len(tree.tokens)]

    # ------------------------------------------------------------ after the pass

    def observe(self, step: Step) -> None:
        turns, asked = step.turns, any(turn.budget for turn in step.turns)
        prompts = step.partial or None in step.verdicts or sum([turn.feed for turn in turns]) > len(turns)
        if not (asked or prompts):
            self.plain_steps.append((len(turns), step.clock["verify"]))
            return
        self._learn_gain(step, self._learn_drafting(step) if asked else 0.0)
        if asked:
            self.pause = 0  # a reason to look: with two steps in flight it may have begun before these verdicts
            self._learn_acceptance(step)
            self._learn_request(step, len(turns))

    def _learn_plain(self) -> None:
        """From the steps since the last look in which nothing was drafted: together, because code that runs again and
        again costs next to nothing, and after a pass its first run comes from memory."""
        for batch, seconds in self.plain_steps:
            self.credit.add(self.credit.SHARE * batch, most=self.credit.SAVED)
            self.lead += self.RECENT * (1 - self.lead)
            self.costs.refine(batch, seconds, batch)
        self.plain_steps = []

    def _learn_drafting(self, step: Step) -> float:
        """Returns the seconds that count. With its first request a sequence's prompt is read, once for many steps: in
        the phase `read` where a device tells them apart, else in that of drafting."""
        asked, batch = [turn for turn in step.turns if turn.asks_drafter], len(step.turns)
        drafting, read = step.clock.get("draft", 0.0), step.clock.get("read", 0.0)
        if not asked or step.partial:
            return drafting if asked else 0.0
        new = {turn.seq.id: turn.seq for turn in asked if turn.seq.id not in self.asked}
        if not step.in_round:  # has it read most of the sequence? Of a drafter that does not say so, nothing is left
            unread = self.traits.backlog  # a source is read with the first request
            new = {i: seq for i, seq in new.items() if seq.source or 0 < 2 * unread(seq) < len(seq.tokens)}
        self.asked.update(new)
        plain, seconds = self.costs(batch, batch), read + drafting
        if new and seconds > self.CHEAP * plain:
            self.reading.add(sum(map(_prompt_length, new.values())), read or drafting)
            self.credit.add(-batch / plain * seconds, least=self.credit.FIRST / 2)
            return 0.0
        # The mode is that of a later step, at worst: a sample under the wrong one.
        nodes = max(self.offered, 1) if self.traits.self_limiting else max(turn.budget for turn in asked)
        self.drafting[self.traits.mode].add(batch, nodes, seconds)
        return seconds

    def _learn_gain(self, step: Step, drafting: float) -> None:
        """The tokens that drafts gained, less those that plain decoding would have made in their time."""
        batch, nodes, fed = len(step.turns), sum(step.draft_rows), sum([turn.feed for turn in step.turns])
        verdicts = [verdict for verdict in step.verdicts if verdict is not None]
        timed = len(verdicts) == batch == fed and not step.partial  # no prompt in this pass
        if timed:
            self.costs.refine(fed + nodes, step.clock["verify"], batch)
        plain, accepted = self.costs(fed, batch), sum(len(verdict.path) for verdict in verdicts)
        speed = batch / (plain if fed == batch else self.costs(batch, batch))
        # Expected seconds: single passes are slow for other reasons, and costs that are wrong are soon corrected.
        more = drafting + self.costs(fed + nodes, batch) - plain
        self.credit.add(self.credit.SHARE * speed * plain + accepted - speed * more, most=self.credit.SAVED)
        if timed:
            lead = (1 + accepted / batch) * plain / (plain + more)
            self.lead = max(self.lead + self.RECENT * (lead - self.lead), 1.0)

    def _learn_acceptance(self, step: Step) -> None:
        batch, pairs = len(step.turns), zip(step.turns, step.draft.trees, strict=True)
        for (turn, tree), verdict, missed in zip(pairs, step.verdicts, step.untaken, strict=True):
            if verdict is not None and tree.tokens:
                self.by_sequence[turn.seq.id].add(tree, verdict.fates)
            elif verdict is not None and missed is not None:
                self.by_sequence[turn.seq.id].add_unverified(*missed)
                if not (step.in_round and turn.budget):  # it took no rows: up to the first credit, as if it had
                    price = batch * (self.costs(batch + 1, batch) / self.costs(batch, batch) - 1)  # of one row
                    self.credit.add((missed[0].tokens[0] == missed[1]) - price, 0.0, self.credit.FIRST)

    def _learn_request(self, step: Step, batch: int) -> None:
        """Below half of the first credit, a cheap drafter is asked as often as its calls take half of the share."""
        low, calls = self.credit.FIRST * batch / 2, self.drafting[self.traits.mode]
        if self.is_cheap and self.credit.tokens < low and calls.count:
            every = 2 * calls.line(batch)(self.k_max) / self.costs(batch, batch) / self.credit.SHARE  # steps
            self._pause("has found little lately and is asked now and then", low, every - 1)

    def end(self, seq: Sequence) -> None:
        self.asked.discard(seq.id)
        self.by_sequence.pop(seq.id, None)

    # ------------------------------------------------------------ pauses, and reasons in words

    def _pause(self, reason: str, credit: float = math.inf, most: float = MAX_PAUSE) -> dict[int, int]:
        """No look at the drafter before the share has brought this credit, or so many steps are over, unless the batch
        changes: meanwhile nothing else does. Returns that nothing is requested."""
        steps = (credit - self.credit.tokens) / (self.credit.SHARE * len(self.turns))
        self.pause, self.pause_batch = math.ceil(max(min(steps, most), 0.0)), len(self.turns)
        return self._explain(f"{self.name} {reason}")

    def _explain(self, reason: str) -> dict[int, int]:
        """Returns that nothing is requested."""
        self.why = f"{len(self.turns)} sequences: {reason}" if len(self.turns) > 1 else reason
        return {}

    def _expect(self, drafted: str, accepted: float) -> None:
        each = " for each" if len(self.turns) > 1 else ""
        self._explain(f"{drafted}: about {1 + accepted / len(self.turns):.1f} tokens expected{each}")


def _prompt_length(seq: Sequence) -> int:
    """Tokens that a drafter reads before its first draft: of the source, or else of the text."""
    return len(seq.source) or len(seq.tokens)


def _odds(survival: float, break_even: float) -> str:
    odds = f"is not used: {survival:.0%} likely at best, break-even here is {break_even:.0%}"
    return f"{odds}; plain decoding until that changes"
