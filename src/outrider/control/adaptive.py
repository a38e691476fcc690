"""How much to draft: never, always K, or as much as pays.

A controller speaks twice in a step. `budget` bounds the drafter's work before anything is drafted; `prune` bounds the
target's, from what the drafter is confident of. (Where a pass was started without a draft, `glance` and `glanced`
decide whether the next one waits for one.) It sees chances and measured seconds, never tokens. Under the rules
that draw from q, `prune` judges a node by its parent's survival: a drawn token is never discarded for its own value.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from operator import add

from ..engine.drafter import Traits
from ..types import REQUEST_DRAFTS, Draft, Sequence, Step, Tree, Turn, Verdict
from .costs import Costs as Costs, Experience
from .modes import Ways
from .prices import Pass


class Fixed:
    """Up to K nodes for everyone, always. Fixed(0) is plain decoding."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.steady = k == 0
        self.stop_below, self.prices = 0.0, None
        self.why = f"K is fixed at {k}" if k else "speculation is switched off"

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        return [turn.allow(room_for(turn, self.k)) for turn in turns]

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        return draft

    def dry_turns(self, turns: list[Turn]) -> list[Turn]:
        return []

    def observe_dry(self, turns: list[Turn], draft: Draft) -> None:
        pass

    def observe(self, step: Step) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        pass


def room_for(turn: Turn, k: int) -> int:
    """At most k nodes, and never more than its request allows or could still be emitted before the bonus."""
    seq = turn.seq
    most = k if seq.most_drafted is None else min(k, seq.most_drafted)
    return max(0, min(most, seq.room - 1)) if turn.whole and seq.speculate else 0


class Adaptive(Ways):
    """Draft one more token while it brings more tokens per second than the engine makes anyway.

    A node with survival s is worth its row when s > λ · Δt: λ is the speed in tokens per second, Δt what the pass (and
    the drafter, if it is not free) takes longer with one more. Rows are shared by the batch: where many sequences fill
    a pass, one more row takes longer, and less is drafted. When nothing is worth it, nothing is drafted; a probe now
    and then finds out when that has changed.
    """

    CHEAP = 0.05  # a drafter that takes less than this part of a pass is asked every time
    FIRST = 4  # nodes asked of a drafter whose price is not known yet
    PROBE, MOST_IDLE = 24, 384  # steps without a draft before the first and between later probes
    PROBED = 4  # sequences of a batch that are probed together
    FREELY = 512  # nodes asked of a free drafter in all: more rows are not free, and even it takes its time
    FULL = 64  # rows of prompts that make a device's pass cost what it computes, not what it reads
    GLANCES = 8  # sequences of a batch that is glanced at: with more, the host has enough to do while a pass runs
    SETTLED = 12  # steps without a draft after which the next one is expected to have none either
    FORGET = 0.995  # how much of a drafter's dearest price is believed a step later

    def __init__(self, costs: Costs, k_max: int = 16, name: str = "the drafter") -> None:
        self.costs, self.k_max, self.name = costs, k_max, name
        self.traits = Traits()  # of the drafter, in the step at hand
        self.turns: list[Turn] = []  # of the step at hand
        self._now: Pass | None = None
        self.why = "nothing is known yet"
        self._nothing = f"{name} has nothing to propose: plain decoding"
        self.overall = Experience()
        self.own: dict[int, Experience] = {}
        self.largest = self.tried = 0  # nodes of this step's largest tree, before pruning, and of any tree before
        self.paid = False  # is the drafter's price worth thinking about in this step?
        self.stop_below = 0.0
        super().__init__()
        self.unasked = 0  # steps since anybody was asked for a draft
        self.steady = self.ahead = False
        self.quiet = 0  # steps since anybody was probed
        self.probed: set[int] = set()  # sequences, in this step
        self.idle: dict[int, int] = defaultdict(int)
        self.patience: dict[int, int] = defaultdict(lambda: self.PROBE)

    # ------------------------------------------------------------ before drafting

    @property
    def prices(self) -> Pass:
        """Prices of the step at hand."""
        if self._now is None:
            self._now = Pass(self.turns, self.costs, self.lead, max(len(self.turns), 1) * self.k_max)
        return self._now

    def budget(self, turns: list[Turn], traits: Traits) -> list[Turn]:
        self.turns, self._now, self.traits = turns, None, traits
        self._switch_mode(traits.mode)
        self.quiet += 1
        self.probed, self.paid, self.why, self.stop_below = set(), False, self._nothing, 0.0
        able = [turn.seq.id for turn in turns if room_for(turn, 1)]
        self.ahead = self.steady  # if so, this step's pass has been started already
        asked = self._ask_for(turns, able) if able else {}
        free = max(2, min(self.k_max, self.FREELY // max(len(turns), 1)))
        own = {turn.seq.id: free for turn in turns if turn.seq.has_request_drafts and turn.seq.id not in asked}
        self.unasked = 0 if asked or own else self.unasked + 1
        # A pass that was started in vain costs as much as dozens that were not: sure of it, or not at all.
        self.steady = not own and (self.asking.rest > 0 if self.asking.resting else self.unasked >= self.SETTLED)
        rooms = own | asked
        if not rooms:
            return turns
        return [turn.allow(room_for(turn, rooms.get(turn.seq.id, 0)), turn.seq.id in own) for turn in turns]

    def _ask_for(self, turns: list[Turn], able: list[int]) -> dict[int, int]:
        """Nodes for each sequence that may be drafted for."""
        if 4 * sum(turn.feed > 1 for turn in turns) >= len(turns):
            self.asking.wake()
        if not self.asking.pays():
            why = "had nothing to propose" if self.asking.empty else "has brought little of late"
            self.why = f"{self.name} {why} and rests: plain decoding is faster than asking it"
            return {}
        if self.asking.hides and sum(turn.feed for turn in turns) > len(turns) + self.FULL:
            self.why = f"{self.name} is not asked while prompts fill the pass"
            return {}
        if self.draft_node is None:
            few = able[: self.PROBED]  # enough to learn a price and a first chance from
            self.probed = set(few) if self.asking.hides else set()  # where drafts have a price, a first one must tell
            return dict.fromkeys(few, self.FIRST)
        call = self.draft_node * self.k_max if self.clocked else self.draft_call
        call = call if self.draft_most is None else self.draft_most
        thrifty = self.traits.weighs_cost and not self.asking.hides
        if thrifty or call <= self.CHEAP * self.costs(len(turns), len(turns)):
            if self.unasked < self.MOST_IDLE and self.prices.hopeless:  # even free drafts take time, for each sequence
                self.why = f"{_batch(self.prices)}{self.name} is not asked: even a sure draft would lose its rows"
                return {}
            return dict.fromkeys(able, max(2, min(self.k_max, self.FREELY // len(turns))))
        self.paid = True
        hopes = {name: self._of(name).hopes(self.k_max) for name in able}
        able = sorted(able, key=lambda name: -sum(hopes[name]))
        now = Pass(turns, self.costs, self.lead, len(able) * self.k_max)
        deeper = 0.0 if self.traits.self_limiting else now.speed * self.draft_node
        needed = now.margin + self.asking.needed(len(turns), now.speed)
        needed += now.speed * self.draft_call if self.traits.self_limiting else 0.0  # the call itself
        many, k = self._best_shape(now, [hopes[name] for name in able], deeper, needed)
        if not self.traits.self_limiting:  # else it finds its own end
            self.stop_below = self.threshold.below(now.break_even(max(many, 1), deeper))
        k = self.k_max if self.traits.self_limiting else min(k, 2 * max(self.tried, self.FIRST))
        self.probed = self._look_again(now, able[many:])
        if not (many or self.probed):
            refusal = _refusal(hopes[able[0]][0], now.break_even(len(able), now.speed * self.draft_node))
            self.why = f"{_batch(now)}{self.name} is not asked: {refusal}"
            self.asking.leave()
        return dict.fromkeys(able[:many], k) | dict.fromkeys(self.probed, 2)

    def _best_shape(self, now: Pass, hopes: list[list[float]], deeper: float, needed: float) -> tuple[int, int]:
        """How many sequences (the most promising come first) and how many nodes each bring most; (0, 0): plain.

        All of them together pay for the rows, and `deeper` tokens for every depth. Costs may be stairs, so that one
        more node loses and three more win: all depths are looked at.
        """
        best, gain, expected = (0, 0), needed, [0.0] * self.k_max
        for many, own in enumerate(hopes, start=1):
            expected = list(map(add, expected, accumulate(own)))
            if many & (many - 1) and many != len(hopes):
                continue  # powers of two and everybody are choice enough
            for k, tokens in enumerate(expected, start=1):
                value = tokens - now.price(many * k) - deeper * k
                if value > gain:
                    best, gain = (many, k), value
        return best

    # ------------------------------------------------------------ after drafting

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        """Keep the likeliest nodes of all trees together, as many as are worth their rows."""
        self.largest = max((len(tree.tokens) for tree in draft.trees), default=0)
        if not self.largest:
            if any(turn.budget for turn in turns):
                self.why = self._nothing
                self._nod(turns)
            return draft
        self.asking.empty = 0
        hopes = [self._hopes(turn, tree) for turn, tree in zip(turns, draft.trees, strict=True)]
        order = sorted((-hope, i) for i, tree in enumerate(hopes) for hope in tree)
        now = Pass(turns, self.costs, self.lead, max(len(order), len(turns)))
        best = now.worthy([-hope for hope, _ in order], now.margin)
        kept = [0] * len(turns)
        for _, i in order[:best]:
            kept[i] += 1
        self._keep_probes(now, turns, draft, kept)
        self._explain(now, order, sum(kept))
        return Draft.pack(tree.cut(n) for tree, n in zip(draft.trees, kept, strict=True))

    # ------------------------------------------------------------ while nothing is drafted

    def _nod(self, turns: list[Turn]) -> None:
        """There is nothing to propose. Where one can look again at no cost, the next pass need not wait for it."""
        few = self.traits.dry and len(turns) <= self.GLANCES
        if few and self.asking.hides and all(turn.feed == 1 and not turn.request_only for turn in turns):
            self.steady = self.asking.nod(self.traits.weighs_cost)

    def dry_turns(self, turns: list[Turn]) -> list[Turn]:
        if not (self.traits.dry and self.ahead and self.steady and len(turns) <= self.GLANCES):
            return []
        return [turn.allow(room_for(turn, self.k_max)) for turn in turns if room_for(turn, 1)]

    def observe_dry(self, turns: list[Turn], draft: Draft) -> None:
        """The next pass waits for a draft where one like these would pay, at the speed of plain decoding."""
        pairs = zip(turns, draft.trees, strict=True)
        hopes = sorted((hope for pair in pairs for hope in self._hopes(*pair)), reverse=True)
        now = Pass(self.turns, self.costs, self.lead, max(len(hopes), len(self.turns)))
        needed = now.margin + self.asking.needed(len(self.turns), now.speed / self.lead)
        if now.worthy(hopes, needed):
            self.asking.rest, self.steady = 0, False

    def _hopes(self, turn: Turn, tree: Tree) -> list[float]:
        """Each node's chance as experience has it, never rising along the list: every cut is a tree."""
        mine = self._of(turn.seq.id)
        if tree.survival is None:
            return mine.hopes(len(tree.tokens))
        claims = tree.survival
        if turn.seq.rule != "match":  # by its parent: a node's own survival would tell its value
            claims = claims[:-1]
        hopes = list(accumulate((mine.survival(claim, tree.source) for claim in claims), min))
        return hopes if turn.seq.rule == "match" else [1.0, *hopes][: len(tree.tokens)]

    def _keep_probes(self, now: Pass, turns: list[Turn], draft: Draft, kept: list[int]) -> None:
        """A probe that is not verified tells nothing. Where the drafter is free, it is here that probes are chosen."""
        refused: dict[int, int] = {}  # sequence -> its place
        for i, (turn, tree) in enumerate(zip(turns, draft.trees, strict=True)):
            name = turn.seq.id
            if tree.tokens and not kept[i] and name in self.probed:
                kept[i] = len(tree.tokens)
            elif tree.tokens and not kept[i]:
                refused[name] = i
                if self.paid and turn.asks_drafter and tree.survival is not None:
                    self._of(name).refuse()  # its word is worth less than was hoped before asking
                    self.overall.refuse()
        for name in self._look_again(now, list(refused)):
            kept[refused[name]] = 1

    def _look_again(self, now: Pass, names: list[int]) -> set[int]:
        """Nothing is worth it for these; those to try again after a while, after longer and longer whiles.

        A step with probes costs everybody: in a batch they are few at a time, and where even a sure draft would lose
        its rows, they are as rare as can be.
        """
        for name in names:
            self.idle[name] += 1
        due = [name for name in names if self.idle[name] >= self.patience[name]]
        if not due or self.quiet < self.PROBE:
            return set()
        if now.hopeless:
            self.patience.update((name, self.MOST_IDLE) for name in due)
            due = [name for name in due if self.idle[name] >= self.MOST_IDLE]
        chosen = sorted(due, key=lambda name: -self.idle[name])[: self.PROBED]
        for name in chosen:
            self.idle[name], self.patience[name] = 0, min(2 * self.patience[name], self.MOST_IDLE)
            self.quiet = 0
        return set(chosen)

    # ------------------------------------------------------------ in words

    def _explain(self, now: Pass, order: list[tuple[float, int]], kept: int) -> None:
        if not kept:
            self.why = f"{_batch(now)}{self.name}: {_refusal(-order[0][0], now.break_even(now.sequences))}"
        else:
            expected = 1 - sum(hope for hope, _ in order[:kept]) / now.sequences
            whose = "this pass" if now.sequences == 1 else "it for each"
            self.why = f"{_batch(now)}{kept} of {len(order)} drafted: about {expected:.1f} tokens expected of {whose}"

    # ------------------------------------------------------------ afterwards

    def observe(self, step: Step) -> None:
        self._learn_host(step)
        rows, decoded = step.batch.count, [v for v in step.verdicts if v is not None]
        if any(turn.asks_drafter for turn in step.turns):
            self._learn_price(step)
            self.tried = max(self.tried, self.largest)
        elif self.draft_most is not None and not self.clocked:
            self.draft_most *= self.FORGET
        if len(decoded) == rows - sum(len(t.tokens) for t in step.draft.trees):  # no prompt in this pass
            self.costs.refine(rows, step.clock["verify"], len(decoded))
            self._learn_gain(step, decoded)
            self._learn_lead(decoded, sum(step.clock[phase] for phase in ("draft", "verify", "judge")))
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None:
                self._learn(turn, tree, verdict.path, verdict.fates)

    def _learn_host(self, step: Step) -> None:
        self.asking.hides = "host" in step.clock
        crowded = not (self.asking.hides or self.paid) and len(step.turns) > 1  # else its price is thought about
        if self.asking.crowded and not crowded:
            self.asking.wake()
        self.asking.crowded = crowded
        if self.asking.hides and "read" not in step.output.seconds:
            self.asking.spent(len(step.turns), self.ahead, step.clock["host"])

    def _learn_gain(self, step: Step, decoded: list[Verdict]) -> None:
        hides, several = self.asking.hides, self.asking.crowded
        if not (hides or several) or not any(turn.asks_drafter for turn in step.turns):
            return
        if hides and "read" in step.output.seconds:
            return  # the drafter was reading a prompt
        batch = len(decoded)
        # What a drafter reads once, it reads for many steps: that is its own business.
        drafting = step.output.seconds.get("draft", 0.0) if hides else min(step.clock["draft"], 3 * self.draft_call)
        seconds = self.costs(step.batch.count, batch) - self.costs(batch, batch) + drafting
        speed = self.lead * batch / self.costs(batch, batch)  # tokens per second of late
        gain = sum(len(verdict.tokens) - 1 for verdict in decoded) - speed * seconds
        self.asking.brought(batch, gain, speed)

    def _learn_lead(self, decoded: list[Verdict], seconds: float) -> None:
        """Against plain decoding of the same batch, so that it still means something when the batch has changed."""
        now = sum(len(verdict.tokens) for verdict in decoded) / seconds
        now *= self.costs(len(decoded), len(decoded)) / len(decoded)
        self.lead = max(self.lead + 0.05 * (min(now, 3 * self.lead) - self.lead), 1.0)

    def _learn_price(self, step: Step) -> None:
        seconds, batch = step.clock["draft"], len(step.turns)
        free = seconds <= self.CHEAP * self.costs(batch, batch)
        if (not free or not self.largest) and any(turn.asks_drafter and turn.feed > 1 for turn in step.turns):
            return  # the drafter has read a prompt as well, or waits for it: that is not what a draft costs
        self.clocked = self.asking.hides and "draft" in step.output.seconds
        most = max(turn.budget for turn in step.turns if turn.asks_drafter)
        self._took(seconds, self.largest, most == self.k_max)

    def _learn(self, turn: Turn, tree: Tree, path: list[int], fates: str) -> None:
        name = turn.seq.id
        if tree.tokens:
            for record in (self._of(name), self.overall):
                record.add(tree, path, fates)
            if tree.is_chain and tree.survival is not None and tree.source not in REQUEST_DRAFTS:
                self.threshold.learn(len(tree.tokens), len(path), turn.budget)
        if path:
            self.patience.pop(name, None)

    def end(self, seq: Sequence) -> None:
        for memory in (self.own, self.idle, self.patience):
            memory.pop(seq.id, None)

    def _of(self, seq: int) -> Experience:
        if seq not in self.own:
            self.own[seq] = Experience(self.overall)
        return self.own[seq]


def _batch(now: Pass) -> str:
    return f"{now.sequences} sequences: " if now.sequences > 1 else ""


def _refusal(hope: float, needed: float) -> str:
    """Why nothing is drafted, when one more row each must be accepted so often to pay for itself."""
    return f"{hope:.0%} likely at best, break-even here is {needed:.0%}; plain decoding until that changes"
