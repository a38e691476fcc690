"""Controllers: how much to draft. `Fixed` drafts K nodes; `Adaptive` drafts as much as pays.

`budget` bounds the drafter's work before anything is drafted; `prune` bounds the target's work by the survival of what
was drafted. Where a pass was started without a draft, dry drafts decide whether the next pass waits for one. Under the
rules that draw from q, a node is judged by its parent's survival: a drawn token is never discarded for its own value.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from ..engine.drafter import Traits
from ..types import REQUEST_DRAFTS, Draft, Sequence, Step, Tree, Turn, Verdict
from . import Controller
from .acceptance import AcceptanceStats, StopThreshold
from .backoff import FIRST_PAUSE, LONGEST_PAUSE, Backoff, HostBackoff
from .ema import Ema
from .pass_costs import PassCosts, StepPrices


class Fixed(Controller):
    """Up to K nodes for every sequence in every step. Fixed(0) is plain decoding."""

    def __init__(self, k: int, block: int = 1) -> None:
        self.k, self.block = k, block
        self.steady = k == 0
        self.why = f"K is fixed at {k}" if k else "speculation is switched off"

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        return [_allow(turn, room_for(turn, self.k), self.block) for turn in turns]


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


class ModeState:
    """What is learnt about drafting in one mode; it says nothing about the drafter's other modes."""

    def __init__(self) -> None:
        # Seconds. A draft model makes one pass for the k-th node of all trees: a node costs the same in any batch.
        self.draft_node, self.draft_call = Ema(0.2), Ema(0.2)
        self.draft_full = Ema(0.2)  # a call for k_max nodes
        self.device_timed = False  # measured by the device's clock, without the host's other work
        self.lead = Ema(0.05)  # recent speed relative to plain decoding, at least 1
        self.lead.value = 1.0
        self.threshold, self.backoff = StopThreshold(), HostBackoff()


class Adaptive(Controller):
    """Drafts one more token while it gains more tokens per second than the engine emits anyway.

    A node with survival s is worth its row when s > λ · Δt: λ is the speed in tokens per second, Δt the seconds that
    one more row adds to the pass and to drafting. Where many sequences fill a pass, rows cost more: less is drafted.
    Where nothing pays, nothing is drafted, except for a probe after a pause.
    """

    CHEAP = 0.05  # share of a plain pass below which drafts are requested in every step
    FIRST = 4  # nodes requested while the drafter's cost is unknown
    PROBED = 4  # sequences of a batch that are probed together
    FREE_NODES = 512  # nodes requested of a free drafter for a whole batch
    FULL = 64  # prompt rows from which a device's pass is bound by compute, not by memory
    DRY_BATCH = 8  # largest batch with dry drafts: with more sequences, host work fills the pass
    SETTLED = 12  # steps without a draft request after which none is expected in the next step
    FORGET = 0.995  # decay per step of `draft_full` while no draft is requested

    def __init__(self, costs: PassCosts, k_max: int = 16, name: str = "the drafter", block: int = 1) -> None:
        self.costs, self.k_max, self.name, self.block = costs, k_max, name, block
        self.why, self._nothing = "no step yet", f"{name} has nothing to propose: plain decoding"
        self.traits, self.turns = Traits(), list[Turn]()  # of this step
        self._prices: StepPrices | None = None  # of this step
        self._modes: dict[str, ModeState] = defaultdict(ModeState)
        self.mode = self._modes[""]  # of this step
        self.overall = AcceptanceStats()
        self.by_sequence: dict[int, AcceptanceStats] = defaultdict(lambda: AcceptanceStats(self.overall))
        self.largest = self.largest_ever = 0  # nodes of this step's largest tree before pruning; of any earlier tree
        self.costly = False  # drafting is not free in this step
        self.started = False  # this step's pass was started before drafting
        self.since_request = self.since_probe = 0  # steps
        self.probed: set[int] = set()  # sequences, in this step
        self.backoffs: dict[int, Backoff] = defaultdict(Backoff)  # of each sequence's probes

    @property
    def prices(self) -> StepPrices:
        if self._prices is None:
            self._prices = self._price(self.turns, max(len(self.turns), 1) * self.k_max)
        return self._prices

    def _price(self, turns: list[Turn], most: int) -> StepPrices:
        return StepPrices(turns, self.costs, self.mode.lead.value or 1.0, most)

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        self.turns, self._prices, self.traits, self.mode = turns, None, traits, self._modes[traits.mode]
        self.since_probe += 1
        self.probed, self.costly, self.why, self.stop_below = set(), False, self._nothing, 0.0
        self.started = self.steady
        eligible = [turn.seq.id for turn in turns if room_for(turn, 1)]
        free = max(2, min(self.k_max, self.FREE_NODES // max(len(turns), 1)))
        rooms = self._rooms(turns, eligible, free) if eligible else {}
        request_only = {turn.seq.id: free for turn in turns if turn.seq.has_request_drafts and turn.seq.id not in rooms}
        rooms |= request_only
        self.since_request = 0 if rooms else self.since_request + 1
        # A pass that is started ahead and discarded costs as much as dozens of waiting ones.
        backoff = self.mode.backoff
        settled = backoff.left > 0 if backoff.paused else self.since_request >= self.SETTLED
        self.steady = settled and not request_only
        if not rooms:
            return turns
        sizes = [room_for(turn, rooms.get(turn.seq.id, 0)) for turn in turns]
        return [_allow(turn, n, self.block, turn.seq.id in request_only) for turn, n in zip(turns, sizes, strict=True)]

    def _rooms(self, turns: list[Turn], eligible: list[int], free: int) -> dict[int, int]:
        """Sequence -> nodes to request of the drafter; `free` is the most for each where drafting costs nothing."""
        mode, batch = self.mode, len(turns)
        if 4 * sum(turn.feed > 1 for turn in turns) >= batch:
            mode.backoff.reset()
        if not mode.backoff.next_step():
            cause = "had nothing to propose" if mode.backoff.empty else "has gained little recently"
            self.why = f"{self.name} {cause} and is paused: plain decoding is faster than requesting drafts"
            return {}
        if mode.backoff.pipelined and sum(turn.feed for turn in turns) > batch + self.FULL:
            self.why = f"{self.name} is not used while prompts fill the pass"
            return {}
        if mode.draft_node.value is None:
            few = eligible[: self.PROBED]  # enough for a first cost and a first acceptance
            self.probed = set(few) if mode.backoff.pipelined else set()  # verify them where requests cost host time
            return dict.fromkeys(few, self.FIRST)
        call = mode.draft_node.value * self.k_max if mode.device_timed else mode.draft_call.value or 0.0
        call = call if mode.draft_full.value is None else mode.draft_full.value
        weighs_cost = self.traits.weighs_cost and not mode.backoff.pipelined
        if not weighs_cost and call > self.CHEAP * self.costs(batch, batch):
            self.costly = True
            return self._costly_rooms(turns, eligible, mode.draft_node.value)
        if self.since_request < LONGEST_PAUSE and self.prices.hopeless:  # even free drafts take host time
            self._explain(f"{self.name} is not used: even a certain draft would lose by its rows")
            return {}
        return dict.fromkeys(eligible, free)

    def _costly_rooms(self, turns: list[Turn], eligible: list[int], node: float) -> dict[int, int]:
        """The same where drafting takes `node` seconds for each depth."""
        survival = {seq_id: self.by_sequence[seq_id].chain_survival(self.k_max) for seq_id in eligible}
        eligible = sorted(eligible, key=lambda seq_id: -sum(survival[seq_id]))
        prices = self._price(turns, len(eligible) * self.k_max)
        needed = prices.margin + self.mode.backoff.needed(len(turns), prices.speed)
        chains = [survival[seq_id] for seq_id in eligible]
        if self.traits.self_limiting:  # any depth costs one call
            needed += prices.speed * (self.mode.draft_call.value or 0.0)
            count, k = prices.best_shape(chains, 0.0, needed)[0], self.k_max
        else:
            deeper = prices.speed * node
            count, k = prices.best_shape(chains, deeper, needed)
            k = min(k, 2 * max(self.largest_ever, self.FIRST))
            self.stop_below = self.mode.threshold.below(prices.break_even(max(count, 1), deeper))
        self.probed = self._due_probes(prices, eligible[count:])
        if not (count or self.probed):
            self._refuse(chains[0][0], prices.break_even(len(eligible), prices.speed * node))
            self.mode.backoff.pause()
        return dict.fromkeys(eligible[:count], k) | dict.fromkeys(self.probed, 2)

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        """Keep the likeliest nodes of all trees together, as many as are worth their rows."""
        backoff, batch = self.mode.backoff, len(turns)
        self.largest = max((len(tree.tokens) for tree in draft.trees), default=0)
        if not self.largest:
            if any(turn.budget for turn in turns):
                self.why = self._nothing
                plain = all(turn.feed == 1 and not turn.request_only for turn in turns)
                if self.traits.dry and batch <= self.DRY_BATCH and backoff.pipelined and plain:
                    self.steady = backoff.add_empty(self.traits.weighs_cost)  # dry drafts go on meanwhile
            return draft
        backoff.empty = 0
        survival = [self._survival(turn, tree) for turn, tree in zip(turns, draft.trees, strict=True)]
        order = sorted((-chance, i) for i, tree in enumerate(survival) for chance in tree)
        prices = self._price(turns, max(len(order), batch))
        kept = [0] * batch
        for _, i in order[: prices.best_count([-chance for chance, _ in order], prices.margin)]:
            kept[i] += 1
        self._keep_probes(prices, turns, draft, kept)
        if total := sum(kept):
            expected = 1 - sum(chance for chance, _ in order[:total]) / batch
            unit = "tokens expected" if batch == 1 else "tokens expected for each"
            self._explain(f"{total} of {len(order)} drafted: about {expected:.1f} {unit}")
        else:
            self._refuse(-order[0][0], prices.break_even(batch))
        return Draft.pack(tree.cut(n) for tree, n in zip(draft.trees, kept, strict=True))

    def _survival(self, turn: Turn, tree: Tree) -> list[float]:
        """Each node's survival by the statistics, never rising along the list, so that every cut is a tree."""
        stats = self.by_sequence[turn.seq.id]
        if tree.survival is None:
            return stats.chain_survival(len(tree.tokens))
        matched = turn.seq.rule == "match"
        claims = tree.survival if matched else tree.survival[:-1]  # else by its parent
        survival = list(accumulate((stats.survival(claim, tree.source) for claim in claims), min))
        return survival if matched else [1.0, *survival][: len(tree.tokens)]

    def _keep_probes(self, prices: StepPrices, turns: list[Turn], draft: Draft, kept: list[int]) -> None:
        """Probes are verified whatever they cost. Where the drafter is free, they are chosen here."""
        refused: dict[int, int] = {}  # sequence -> its index
        for i, (turn, tree) in enumerate(zip(turns, draft.trees, strict=True)):
            seq_id = turn.seq.id
            if tree.tokens and not kept[i] and seq_id in self.probed:
                kept[i] = len(tree.tokens)
            elif tree.tokens and not kept[i]:
                refused[seq_id] = i
                if self.costly and turn.asks_drafter and tree.survival is not None:
                    self.by_sequence[seq_id].refuse()
                    self.overall.refuse()
        for seq_id in self._due_probes(prices, list(refused)):
            kept[refused[seq_id]] = 1

    def _due_probes(self, prices: StepPrices, seq_ids: list[int]) -> set[int]:
        """Of sequences for which nothing pays, those to probe now. A probe slows the whole batch down: a few are made
        together, and where even a certain draft would lose by its rows, after the longest pause."""
        for seq_id in seq_ids:
            self.backoffs[seq_id].idle += 1
        due = [seq_id for seq_id in seq_ids if self.backoffs[seq_id].due]
        if not due or self.since_probe < FIRST_PAUSE:
            return set()
        if prices.hopeless:
            for seq_id in due:
                self.backoffs[seq_id].pause = LONGEST_PAUSE
            due = [seq_id for seq_id in due if self.backoffs[seq_id].due]
        chosen = sorted(due, key=lambda seq_id: -self.backoffs[seq_id].idle)[: self.PROBED]
        for seq_id in chosen:
            self.backoffs[seq_id].tried()
            self.since_probe = 0
        return set(chosen)

    def _explain(self, reason: str) -> None:
        self.why = f"{len(self.turns)} sequences: {reason}" if len(self.turns) > 1 else reason

    def _refuse(self, survival: float, break_even: float) -> None:
        odds = f"{survival:.0%} likely at best, break-even here is {break_even:.0%}"
        self._explain(f"{self.name} is not used: {odds}; plain decoding until that changes")

    def dry_turns(self, turns: list[Turn]) -> list[Turn]:
        if not (self.traits.dry and self.started and self.steady and len(turns) <= self.DRY_BATCH):
            return []
        return [turn.allow(room_for(turn, self.k_max)) for turn in turns if room_for(turn, 1)]

    def observe_dry(self, turns: list[Turn], draft: Draft) -> None:
        """The next pass waits for a draft if one like this would pay at the speed of plain decoding."""
        pairs = zip(turns, draft.trees, strict=True)
        survival = sorted((chance for pair in pairs for chance in self._survival(*pair)), reverse=True)
        prices = self._price(self.turns, max(len(survival), len(self.turns)))
        needed = prices.margin + self.mode.backoff.needed(len(self.turns), prices.speed / prices.lead)
        if prices.best_count(survival, needed):
            self.mode.backoff.left, self.steady = 0, False

    def observe(self, step: Step) -> None:
        self._learn_host(step)
        rows, decoded = step.batch.count, [v for v in step.verdicts if v is not None]
        requested = any(turn.asks_drafter for turn in step.turns)
        if requested:
            self._learn_draft_cost(step)
            self.largest_ever = max(self.largest_ever, self.largest)
        elif self.mode.draft_full.value is not None and not self.mode.device_timed:
            self.mode.draft_full.value *= self.FORGET
        if len(decoded) == rows - sum(len(t.tokens) for t in step.draft.trees):  # no prompt in this pass
            self.costs.refine(rows, step.clock["verify"], len(decoded))
            if requested:
                self._learn_gain(step, decoded)
            self._learn_lead(decoded, sum(step.clock[phase] for phase in ("draft", "verify", "judge")))
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None:
                self._learn_acceptance(turn, tree, verdict)

    def _learn_host(self, step: Step) -> None:
        backoff = self.mode.backoff
        backoff.pipelined = "host" in step.clock
        batched = not (backoff.pipelined or self.costly) and len(step.turns) > 1  # else `budget` weighs the cost
        if backoff.batched and not batched:
            backoff.reset()
        backoff.batched = batched
        if backoff.pipelined and "read" not in step.output.seconds:
            backoff.add_host_time(len(step.turns), self.started, step.clock["host"])

    def _learn_gain(self, step: Step, decoded: list[Verdict]) -> None:
        backoff, batch = self.mode.backoff, len(decoded)
        if backoff.pipelined and "read" not in step.output.seconds:  # else the drafter was reading a prompt
            drafting = step.output.seconds.get("draft", 0.0)
        elif backoff.batched:  # clipped: a prompt is read once, for many steps
            drafting = min(step.clock["draft"], 3 * (self.mode.draft_call.value or 0.0))
        else:
            return
        plain = self.costs(batch, batch)
        seconds = self.costs(step.batch.count, batch) - plain + drafting
        speed = (self.mode.lead.value or 1.0) * batch / plain  # tokens per second
        gain = sum(len(verdict.tokens) - 1 for verdict in decoded) - speed * seconds
        backoff.add_gain(batch, gain, speed)

    def _learn_lead(self, decoded: list[Verdict], seconds: float) -> None:
        """Relative to plain decoding of the same batch, so that it stays valid when the batch changes."""
        lead = sum(len(verdict.tokens) for verdict in decoded) / seconds
        lead *= self.costs(len(decoded), len(decoded)) / len(decoded)
        self.mode.lead.value = max(self.mode.lead.add(lead), 1.0)

    def _learn_draft_cost(self, step: Step) -> None:
        seconds, batch = step.clock["draft"], len(step.turns)
        free = seconds <= self.CHEAP * self.costs(batch, batch)
        if (not free or not self.largest) and any(turn.asks_drafter and turn.feed > 1 for turn in step.turns):
            return  # the drafter has read a prompt as well, or waits for it
        self.mode.device_timed = self.mode.backoff.pipelined and "draft" in step.output.seconds
        self.mode.draft_node.add(seconds / max(self.largest, 1))
        self.mode.draft_call.add(seconds)
        if max(turn.budget for turn in step.turns if turn.asks_drafter) == self.k_max:
            self.mode.draft_full.add(seconds)

    def _learn_acceptance(self, turn: Turn, tree: Tree, verdict: Verdict) -> None:
        seq_id, path = turn.seq.id, verdict.path
        if tree.tokens:
            for stats in (self.by_sequence[seq_id], self.overall):
                stats.add(tree, path, verdict.fates)
            if tree.is_chain and tree.survival is not None and tree.source not in REQUEST_DRAFTS:
                self.mode.threshold.learn(len(tree.tokens), len(path), turn.budget)
        if path and seq_id in self.backoffs:
            self.backoffs[seq_id].reset()

    def end(self, seq: Sequence) -> None:
        self.by_sequence.pop(seq.id, None)
        self.backoffs.pop(seq.id, None)
