"""Controllers: how much to draft. `Fixed` drafts K nodes; `Adaptive` drafts as much as pays.

`budget` bounds the drafter's work before anything is drafted; `prune` bounds the target's work by the survival of what
was drafted. Under the rules that draw from q, a node is judged by its parent's survival: a drawn token is never
discarded for its own value.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence as Listing
from functools import partial
from itertools import accumulate, takewhile

from ..engine.drafter import Traits
from ..types import Draft, Sequence, Step, Tree, Turn
from . import Controller
from .acceptance import AcceptanceStats
from .credit import Credit
from .draft_costs import DraftCosts, Line
from .pass_costs import PassCosts, StepPrices


class Fixed(Controller):
    """Up to K nodes for every sequence in every step. Fixed(0) is plain decoding."""

    def __init__(self, k: int, block: int = 1) -> None:
        self.k, self.block = k, block
        self.why = f"K is fixed at {k}" if k else "speculation is switched off"

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        return [_allow(turn, room_for(turn, self.k), self.block) for turn in turns] if self.k else turns


def room_for(turn: Turn, k: int) -> int:
    """At most k nodes, within the request's limit and the tokens that it may still emit before the bonus."""
    seq = turn.seq
    most = k if seq.most_drafted is None else min(k, seq.most_drafted)
    return max(0, min(most, seq.room - 1)) if turn.whole and seq.speculate else 0


def _allow(turn: Turn, budget: int, block: int, request_only: bool = False) -> Turn:
    """Where the target runs whole blocks of positions, no draft reaches into the next block: that would take a second
    pass, which the next step makes anyway, with one more token and a new draft."""
    root = len(turn.seq.tokens) - 1
    return turn.allow(budget if block == 1 else min(budget, block - 1 - root % block), request_only)


class Adaptive(Controller):
    """Drafts what gains more tokens than its time is worth, and never risks more than it may lose.

    A draft of nodes with survival s1, s2, … is worth, in tokens,

        s1 + s2 + … − λ · (t(rows with it) − t(rows without it) + seconds of drafting) − MARGIN

    where λ is the engine's speed in tokens per second, t the seconds of a pass (`pass_costs`), the seconds of drafting
    are learnt from the step's clock (`draft_costs`), and survival from verdicts (`acceptance`). The nodes with the
    highest worth are drafted; none, where none has any. Where many sequences fill a pass, rows cost more: less is
    drafted.

    Expectations may be wrong, so a step risks no more than the `credit` of its sequences if every node is rejected:
    drafts grow with their success. Where nothing is expected to pay, the same credit pays for trials.
    """

    CHEAP = 0.05  # share of a plain pass below which drafts are requested whatever is expected of them
    RECENT = 0.05  # weight of a step in `lead`: the last twenty count
    TRIED = (4, 1)  # nodes of the first requests: two points make a line; of trials, the last of these
    PROBED = 4  # sequences of a batch that are tried together
    FULL = 64  # prompt rows from which on a pass has no row to spare
    LASTS = 16  # steps in which the gain of drafts must pay for the reading of a prompt
    READS = 3  # times the known seconds of a call: one that takes longer has read a prompt
    FREE_NODES = 512  # nodes requested of a cheap drafter for a whole batch

    def __init__(self, costs: PassCosts, k_max: int = 16, name: str = "the drafter", block: int = 1) -> None:
        self.costs, self.k_max, self.name, self.block = costs, k_max, name, block
        self.why, self._nothing = "no step yet", f"{name} has nothing to propose: plain decoding"
        self.overall = AcceptanceStats()
        self.by_sequence: dict[int, AcceptanceStats] = defaultdict(partial(AcceptanceStats, self.overall))
        self.credit = Credit()
        self.drafting: dict[str, DraftCosts] = defaultdict(DraftCosts)  # by the drafter's mode
        self.calls: dict[str, int] = defaultdict(int)  # by the drafter's mode
        self.price_of_full = 0.0  # tokens that full drafts for all sequences cost, at the last step with any
        self.lead = 1.0  # recent speed relative to plain decoding, at least 1
        self.asked: set[int] = set()  # sequences for which drafts were requested
        # Seconds of requests that read prompts, by their tokens; nodes that were drafted in these seconds too.
        self.reading, self.reading_nodes = Line(), 0
        self.paused = f"{name} has gained less than it cost and is paused: plain decoding is faster"
        self.resume_above, self.refusal = 0.0, self.paused  # the credit above which drafting is considered again; why
        self.refused = 0  # sequences of the batch that this is about
        # Of the step that is being prepared; `observe` does not read them.
        self.turns, self.traits = list[Turn](), Traits()
        self._prices: StepPrices | None = None
        self.tried: set[int] = set()  # sequences whose drafts are verified whatever is expected of them
        self.source = name  # of the drafter's trees

    @property
    def prices(self) -> StepPrices:
        if self._prices is None:
            self._prices = StepPrices(self.turns, self.costs, self.lead)
        return self._prices

    # ------------------------------------------------------------ before drafting

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        self.turns, self.traits, self._prices, self.tried = turns, traits, None, set()
        self.why, self.stop_below = self._nothing, 0.0
        self.credit.first = self.credit.FIRST if traits.forecast is None else self.credit.KNOWN
        eligible = [turn.seq.id for turn in turns if room_for(turn, 1)]
        for seq_id in eligible:
            self.credit.admit(seq_id)
        free = max(2, min(self.k_max, self.FREE_NODES // max(len(turns), 1)))
        rooms: dict[int, int] = {}
        if len(turns) != self.refused:
            self._resume()
        if self.credit.tokens <= self.resume_above:
            self._explain(self.refusal)
        elif eligible:
            rooms = self._rooms(eligible, free)
        request_only = {turn.seq.id for turn in turns if turn.seq.has_request_drafts and turn.seq.id not in rooms}
        if not (rooms or request_only):
            return turns
        rooms |= dict.fromkeys(request_only, free)
        sizes = [room_for(turn, rooms.get(turn.seq.id, 0)) for turn in turns]
        return [_allow(turn, n, self.block, turn.seq.id in request_only) for turn, n in zip(turns, sizes, strict=True)]

    def _rooms(self, eligible: list[int], free: int) -> dict[int, int]:
        """Sequence -> nodes to request of the drafter; `free` is the most for each where drafting costs nothing."""
        batch, calls = len(self.turns), self.calls[self.traits.mode]
        if sum(turn.feed for turn in self.turns) > batch + self.FULL:
            self._explain(f"{self.name} is not used while prompts fill the pass")
            return {}
        if self.traits.weighs_cost:
            self.prices.limit = self._risk
        line = self.drafting[self.traits.mode].line(batch)
        if line is None or calls < len(self.TRIED):
            return self._trial(eligible, self.TRIED[min(calls, len(self.TRIED) - 1)])
        if not self.traits.weighs_cost and line(self.k_max) > self.CHEAP * self.costs(batch, batch):
            return self._costly_rooms(eligible, line)
        if self.prices.hopeless and not self._affords_trial(eligible, line):
            return self._wait(f"{self.name} is not used: even a certain draft would lose by its rows", line)
        return dict.fromkeys(eligible, free)

    def _costly_rooms(self, eligible: list[int], line: Line) -> dict[int, int]:
        """The same where drafting costs time: the shape that is worth most by the acceptance at each depth."""
        survival = {seq_id: self.by_sequence[seq_id].expected_survival(self.k_max) for seq_id in eligible}
        eligible = sorted(eligible, key=lambda seq_id: -sum(survival[seq_id]))
        count, k, gain = self._best_shape([survival[seq_id] for seq_id in eligible], line)
        if not count:
            if self._affords_trial(eligible, line):
                return self._trial(eligible, self.TRIED[-1])
            odds = self._too_unlikely(survival[eligible[0]][0], self._break_even(len(eligible), line))
            return self._wait(odds, line)
        accepted = sum(sum(survival[seq_id][:k]) for seq_id in eligible[:count])
        if gain < self._price_of_reading({*eligible[:count]} - self.asked, 1 + accepted / count, line):
            eligible = [seq_id for seq_id in eligible if seq_id in self.asked]
            count, k, _ = self._best_shape([survival[seq_id] for seq_id in eligible], line)
            if not count:
                self._explain(f"{self.name} is not used: reading the prompts costs more than its drafts gain")
                return {}
            accepted = sum(sum(survival[seq_id][:k]) for seq_id in eligible[:count])
        shape = f"up to {k} nodes for {count}" if len(self.turns) > 1 else f"up to {k} nodes"
        self._expect(shape, 1 + accepted / len(self.turns))
        if self.traits.self_limiting:
            k = self.k_max
        else:
            self.stop_below = self._lowest_claim(self._break_even(count, line))
        return dict.fromkeys(eligible[:count], k)

    def _best_shape(self, chains: list[list[float]], line: Line) -> tuple[int, int, float]:
        most = self.k_max if self.traits.self_limiting else 0  # it decides itself
        seconds = [line(most or k) for k in range(self.k_max + 1)]
        return self.prices.best_shape(chains, seconds, self._risk) if chains else (0, 0, 0.0)

    def _price_of_reading(self, seq_ids: set[int], tokens: float, line: Line) -> float:
        """Tokens per step that the first requests for these sequences cost, over the steps that they serve, each of
        which emits so many tokens of a sequence."""
        unread = [turn.seq for turn in self.turns if turn.seq.id in seq_ids]
        if not (unread and self.reading.n):
            return 0.0
        drafting = line(self.reading_nodes) if self.reading_nodes else 0.0
        seconds = max(self.reading(sum(len(seq.tokens) for seq in unread)) - drafting, 0.0)
        steps = min([self.LASTS, *(max(seq.room / tokens, 1.0) for seq in unread)])
        return self.prices.speed * seconds / steps

    @property
    def _risk(self) -> float:
        """What may be lost, at this step's prices: a token of plain decoding is worth `lead` of its tokens. Where a
        prompt is read, a drafter whose acceptance is known cannot draft yet: others must not use up its credit."""
        waits = self.traits.forecast is not None and any(turn.feed > 1 for turn in self.turns)
        most = self.credit.FIRST / 2 * len(self.turns) if waits else math.inf
        return min(max(self.credit.tokens, 0.0), most) * self.lead

    def _trial(self, eligible: list[int], k: int) -> dict[int, int]:
        """k nodes for a few sequences: those whose prompts the drafter has read, if there are any."""
        self.tried = set(([seq_id for seq_id in eligible if seq_id in self.asked] or eligible)[: self.PROBED])
        self._explain(f"{self.name} is tried: {k} nodes for {len(self.tried)} sequences")
        return dict.fromkeys(self.tried, k)

    def _affords_trial(self, eligible: list[int], line: Line) -> bool:
        """Whether one node for a few sequences costs less than half of what the batch may lose."""
        rows = min(len(eligible), self.PROBED)
        return 2 * (self.prices.exact(rows) + self.prices.speed * line(1)) <= self._risk

    def _wait(self, reason: str, line: Line) -> dict[int, int]:
        """Nothing is drafted before the credit pays for one node, or the batch changes: nothing else tells more."""
        self.resume_above = (self.prices.exact(1) + self.prices.speed * line(1)) / self.lead
        self.refusal, self.refused = reason, len(self.turns)
        self._explain(reason)
        return {}

    def _resume(self) -> None:
        self.resume_above, self.refusal = 0.0, self.paused

    def _break_even(self, count: int, line: Line) -> float:
        """The survival at which one more node for each of these sequences pays."""
        return (self.prices.exact(count) + self.prices.speed * (line(2) - line(1))) / count

    def _lowest_claim(self, survival: float) -> float:
        """The lowest claim down to which all nodes survive this often."""
        claims = sorted((survival, *AcceptanceStats.EDGES), reverse=True)
        often = takewhile(lambda claim: self.overall.survival(claim, self.source) >= survival, claims)
        return min(often, default=claims[0])

    # ------------------------------------------------------------ before verifying

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        """Keep the likeliest nodes of all trees together, as many as are worth their rows."""
        drafted = [i for i, tree in enumerate(draft.trees) if tree.tokens]
        if not drafted:
            return draft
        prices, batch, kept = self.prices, len(turns), [0] * len(turns)
        order = sorted((-chance, i) for i in drafted for chance in self._survival(turns[i], draft.trees[i]))
        for _, i in order[: prices.best_count([-chance for chance, _ in order], self._risk)]:
            kept[i] += 1
        for i in drafted:
            nodes = len(draft.trees[i].tokens)
            if not kept[i] and turns[i].seq.id in self.tried and prices.price(nodes) <= self._risk:
                kept[i] = nodes
        if total := sum(kept):
            self._expect(f"{total} of {len(order)} drafted", 1 - sum(chance for chance, _ in order[:total]) / batch)
        else:
            self._explain(self._too_unlikely(-order[0][0], prices.exact(batch) / batch))
        return Draft.pack(tree.cut(n) for tree, n in zip(draft.trees, kept, strict=True))

    def _survival(self, turn: Turn, tree: Tree) -> list[float]:
        """Each node's survival by the statistics, never rising along the list, so that every cut is a tree."""
        stats = self.by_sequence[turn.seq.id]
        if tree.survival is None:
            return stats.expected_survival(len(tree.tokens))
        matched = turn.seq.rule == "match"
        claims = tree.survival if matched else tree.survival[:-1]  # else by its parent
        survival = list(accumulate((stats.survival(claim, tree.source) for claim in claims), min))
        return survival if matched else [1.0, *survival][: len(tree.tokens)]

    def _explain(self, reason: str) -> None:
        self.why = f"{len(self.turns)} sequences: {reason}" if len(self.turns) > 1 else reason

    def _expect(self, drafted: str, tokens: float) -> None:
        each = "" if len(self.turns) == 1 else " for each"
        self._explain(f"{drafted}: about {tokens:.1f} tokens expected{each}")

    def _too_unlikely(self, survival: float, break_even: float) -> str:
        odds = f"{survival:.0%} likely at best, break-even here is {break_even:.0%}"
        return f"{self.name} is not used: {odds}; plain decoding until that changes"

    # ------------------------------------------------------------ after the pass

    def observe(self, step: Step) -> None:
        turns, trees, batch = step.turns, step.draft.trees, len(step.turns)
        asked = [turn for turn in turns if turn.asks_drafter]
        drafting, read = (step.clock.get(phase, 0.0) if asked else 0.0 for phase in ("draft", "read"))
        if asked and not step.partial:
            drafting = self._learn_drafting(turns, asked, drafting, read)
        nodes = sum(step.draft_rows)
        rows, decoded = nodes + sum(turn.feed for turn in turns), sum(verdict is not None for verdict in step.verdicts)
        plain = decoded == batch and rows == batch + nodes and not step.partial  # no prompt in this pass
        verify = step.clock["verify"] if plain else self.costs(rows, batch)
        if decoded:
            self._learn_credit(step, nodes, verify, decoded, drafting)
        if plain:
            lead = 1.0
            if nodes or drafting:
                tokens = sum(len(verdict.tokens) for verdict in step.verdicts if verdict is not None)
                lead = tokens / batch * self.costs(batch, batch) / (verify + drafting + step.clock["judge"])
            self.lead = max(self.lead + self.RECENT * (min(lead, 3 * self.lead) - self.lead), 1.0)
            self.costs.refine(rows, verify, batch)
        for turn, tree, verdict, missed in zip(turns, trees, step.verdicts, step.untaken, strict=True):
            if verdict is not None and tree.tokens:
                self.source = tree.source if turn.asks_drafter else self.source
                for stats in (self.by_sequence[turn.seq.id], self.overall):
                    stats.add(tree, verdict.path, verdict.fates)
            elif verdict is not None and missed is not None:
                for stats in (self.by_sequence[turn.seq.id], self.overall):
                    stats.add_unverified(*missed)
                if not (step.in_round and turn.budget):  # it took no rows
                    price = batch * (self.costs(batch + 1, batch) / self.costs(batch, batch) - 1)  # of one row
                    self.credit.forgo((missed[0].tokens[0] == missed[1]) - price)

    def _learn_drafting(self, turns: Listing[Turn], asked: list[Turn], seconds: float, read: float) -> float:
        """Returns the seconds that count. With its first request a sequence's prompt is read, once for many steps: in
        `read` seconds where a device tells them apart, else in these."""
        mode, batch = self.traits.mode, len(turns)  # the mode of a later step, at worst: a sample under the wrong one
        plain, nodes = self.costs(batch, batch), max(turn.budget for turn in asked)
        reads = any(turn.feed > 1 or turn.seq.id not in self.asked for turn in asked)
        if foreseen := self.traits.forecast:  # its first draft may come later than the first request
            reads = reads or seconds > self.READS * foreseen.call * len(asked)
        self.asked.update(turn.seq.id for turn in asked)
        if reads and read + seconds > self.CHEAP * plain:
            self.reading_nodes = 0 if read else nodes
            self.reading.add(sum(len(turn.seq.tokens) for turn in asked), read or seconds)
            self.credit.read(batch / plain * (read + seconds))
            return 0.0
        self.calls[mode] += 1
        self.drafting[mode].add(batch, nodes, read + seconds)
        return read + seconds

    def _learn_credit(self, step: Step, nodes: int, verify: float, decoded: int, drafting: float) -> None:
        """The tokens that drafts gained, less those that plain decoding would have made in their time."""
        if not (nodes or drafting):
            self.credit.add(self.credit.SHARE * decoded, self.price_of_full)
            return
        batch, rows = len(step.turns), step.rows
        plain, speed = self.costs(rows - nodes, batch), decoded / self.costs(decoded, decoded)
        verified = min(verify, 3 * self.costs(rows, batch)) - plain if nodes else 0.0
        gain = sum(len(verdict.path) for verdict in step.verdicts if verdict is not None)
        self.price_of_full = speed * (self.costs(rows - nodes + batch * self.k_max, batch) - plain + drafting)
        self.credit.add(self.credit.SHARE * decoded + gain - speed * (verified + drafting), self.price_of_full)

    def end(self, seq: Sequence) -> None:
        self._resume()
        self.credit.end(seq.id)
        self.asked.discard(seq.id)
        self.by_sequence.pop(seq.id, None)
