"""How much to draft: never, always K, or as much as pays.

A controller speaks twice in a step. `budget` bounds the drafter's work before anything is drafted; `prune` bounds the
target's, from what the drafter is confident of. It sees chances and measured seconds, never tokens. Under the rules
that draw from q, `prune` judges a node by its parent's survival: a drawn token is never discarded for its own value.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from typing import Protocol

from .types import ACCEPTED, REJECTED, Draft, Step, Tree, Turn


class Controller(Protocol):
    why: str  # the reason for the last step's draft, in words

    def budget(self, turns: list[Turn]) -> list[Turn]: ...

    def prune(self, turns: list[Turn], draft: Draft) -> Draft: ...

    def observe(self, step: Step) -> None: ...


class Fixed:
    """Up to K nodes for everyone, always. Fixed(0) is plain decoding."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.why = f"K is fixed at {k}" if k else "speculation is switched off"

    def budget(self, turns: list[Turn]) -> list[Turn]:
        return [turn.allow(room_for(turn, self.k)) for turn in turns]

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        return draft

    def observe(self, step: Step) -> None:
        pass


def room_for(turn: Turn, k: int) -> int:
    """At most k nodes, and never more than could still be emitted before the bonus."""
    return max(0, min(k, turn.seq.room - 1)) if turn.whole and turn.seq.speculate else 0


# ---------------------------------------------------------------- what is known


class Costs:
    """Seconds of a target pass by its row count: measured at the start, refined by every step."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds = dict(seconds)
        self._rows = sorted(self.seconds)
        self._drift = 1.0  # contexts grow and machines get busy: everything becomes slower together

    def __call__(self, rows: int) -> float:
        """The cost of a pass, by straight lines between what was measured."""
        known = self._rows
        if len(known) == 1:
            return self._drift * self.seconds[known[0]]
        i = min(max(bisect_left(known, rows), 1), len(known) - 1)
        low, high = known[i - 1], known[i]
        slope = (self.seconds[high] - self.seconds[low]) / (high - low)
        return self._drift * max(self.seconds[low] + slope * (rows - low), self.seconds[known[0]] * 0.5)

    def refine(self, rows: int, seconds: float) -> None:
        """A pass over this many rows took this long. One slow pass is somebody else's load: it moves little."""
        surprise = min(max(seconds / self(rows), 0.5), 1.5) - 1
        self._drift *= 1 + 0.02 * surprise
        if rows in self.seconds:
            self.seconds[rows] *= 1 + 0.08 * surprise


class Rate:
    """How often something comes true: the recent past counts most, and a prior while little has been seen."""

    FADE, WEIGHT = 0.98, 4.0

    def __init__(self) -> None:
        self.hits = self.tries = 0.0

    def add(self, hit: bool) -> None:
        self.hits, self.tries = self.hits * self.FADE + hit, self.tries * self.FADE + 1

    def given(self, prior: float) -> float:
        return (self.hits + self.WEIGHT * prior) / (self.tries + self.WEIGHT)


class Experience:
    """What became of drafts: by what the drafter claimed, and by depth where it claims nothing.

    A sequence's own experience leans on everybody's, which leans on the drafter's word.
    """

    EDGES = (0.03, 0.06, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)

    def __init__(self, wider: Experience | None = None) -> None:
        self.wider = wider
        self.claims: dict[int, Rate] = defaultdict(Rate)
        self.depths: dict[int, Rate] = defaultdict(Rate)

    def survival(self, claim: float) -> float:
        """The chance that a node is accepted whose drafter gives it this chance."""
        prior = self.wider.survival(claim) if self.wider else claim
        return self.claims[bisect_right(self.EDGES, claim)].given(prior)

    def acceptance(self, depth: int) -> float:
        """The chance that the node at a depth is accepted once it is reached."""
        if self.wider:
            prior = self.wider.acceptance(depth)
        else:
            prior = self.acceptance(depth - 1) if depth else 0.5
        return self.depths[depth].given(prior)

    def add(self, tree: Tree, path: list[int], fates: str) -> None:
        walked = len(path) + (REJECTED in fates)
        for depth in range(walked):
            self.depths[depth].add(depth < len(path))
        for claim, fate in zip(tree.survival or (), fates, strict=False):
            self.claims[bisect_right(self.EDGES, claim)].add(fate == ACCEPTED)


# ---------------------------------------------------------------- what follows from it


class Adaptive:
    """Draft one more token while it brings more tokens per second than the engine makes anyway.

    A node with survival s is worth its row when s > λ · Δt: λ is the speed in tokens per second, Δt what the pass (and
    the drafter, if it is not free) takes longer with one more. When nothing is worth it, nothing is drafted; a probe
    now and then finds out when that has changed.
    """

    CHEAP = 0.05  # a drafter that takes less than this part of a pass is asked every time
    MARGIN = 0.03  # tokens that a draft must be expected to bring, beyond its rows: less is lost in small costs
    FIRST = 4  # nodes asked of a drafter whose price is not known yet
    PROBE, MOST_IDLE = 24, 384  # steps without a draft before the first and between later probes

    def __init__(self, costs: Costs, k_max: int = 16, name: str = "the drafter") -> None:
        self.costs, self.k_max, self.name = costs, k_max, name
        self.why = "nothing is known yet"
        self.overall = Experience()
        self.own: dict[int, Experience] = {}
        self.speed = 1 / costs(1)  # λ
        self.drafted = 0  # nodes of this step, before pruning
        self.draft_node: float | None = None  # seconds, once the drafter has been asked
        self.draft_call = 0.0
        self.idle: dict[int, int] = defaultdict(int)
        self.patience: dict[int, int] = defaultdict(lambda: self.PROBE)

    # ------------------------------------------------------------ before drafting

    def budget(self, turns: list[Turn]) -> list[Turn]:
        rows = sum(turn.feed for turn in turns)
        return [turn.allow(room_for(turn, self._ask_for(turn, rows))) for turn in turns]

    def _ask_for(self, turn: Turn, rows: int) -> int:
        if not (turn.whole and turn.seq.speculate):
            return 0
        if self.draft_node is None:
            return self.FIRST
        if self.draft_call <= self.CHEAP * self.costs(1):
            return self.k_max
        mine, best, gain, value, survival = self._of(turn.seq.id), 0, self.MARGIN, 0.0, 1.0
        for k in range(1, self.k_max + 1):
            survival *= mine.acceptance(k - 1)
            value += survival - self.speed * (self.draft_node + self.costs(rows + k) - self.costs(rows + k - 1))
            if value > gain:
                best, gain = k, value
        return best or self._probe(turn.seq.id, 2)

    # ------------------------------------------------------------ after drafting

    def prune(self, turns: list[Turn], draft: Draft) -> Draft:
        """Keep the likeliest nodes of all trees together, as many as are worth their rows."""
        self.drafted = draft.offsets[-1]
        rows = sum(turn.feed for turn in turns)
        hopes = [self._hopes(turn, tree) for turn, tree in zip(turns, draft.trees, strict=True)]
        order = sorted((-hope, i, node) for i, tree in enumerate(hopes) for node, hope in enumerate(tree))
        best, gain, value = 0, self.MARGIN, 0.0
        for n, (hope, _, _) in enumerate(order, start=1):
            value -= hope + self.speed * (self.costs(rows + n) - self.costs(rows + n - 1))
            if value > gain:
                best, gain = n, value
        kept = [0] * len(turns)
        for _, i, _ in order[:best]:
            kept[i] += 1
        for i, (turn, tree) in enumerate(zip(turns, draft.trees, strict=True)):
            if tree.tokens and not kept[i]:
                kept[i] = min(self._probe(turn.seq.id, 1), len(tree.tokens))
        self._explain(rows, order, sum(kept))
        return Draft.pack(tree.cut(n) for tree, n in zip(draft.trees, kept, strict=True))

    def _hopes(self, turn: Turn, tree: Tree) -> list[float]:
        """Each node's chance as experience has it, never rising along the list: every cut is a tree."""
        mine, hopes, low = self._of(turn.seq.id), [], 1.0
        for node in range(len(tree.tokens)):
            if tree.survival is None:
                low *= mine.acceptance(node)
            elif turn.seq.rule == "match":
                low = min(low, mine.survival(tree.survival[node]))
            else:  # by its parent: a node's own survival would tell its value
                low = min(low, mine.survival(tree.survival[node - 1]) if node else 1.0)
            hopes.append(low)
        return hopes

    def _probe(self, seq: int, nodes: int) -> int:
        """Nothing is worth it; look again after a while, and after longer and longer whiles."""
        self.idle[seq] += 1
        if self.idle[seq] < self.patience[seq]:
            return 0
        self.idle[seq], self.patience[seq] = 0, min(2 * self.patience[seq], self.MOST_IDLE)
        return nodes

    def _explain(self, rows: int, order: list[tuple[float, int, int]], kept: int) -> None:
        needed = max(self.speed * (self.costs(rows + 1) - self.costs(rows)), 0.0)
        if not order:
            self.why = f"{self.name} has nothing to propose: plain decoding"
        elif not kept:
            self.why = (
                f"{self.name}: {-order[0][0]:.0%} likely at best, break-even here is {needed:.0%}; plain decoding "
                f"until that changes"
            )
        else:
            expected = 1 - sum(hope for hope, _, _ in order[:kept])
            self.why = f"{kept} of {len(order)} drafted: about {expected:.1f} tokens expected of this pass"

    # ------------------------------------------------------------ afterwards

    def observe(self, step: Step) -> None:
        rows = step.rows.tokens.shape[0]
        self.costs.refine(rows, step.clock["verify"])
        if any(turn.budget for turn in step.turns):
            self._learn_price(step.clock["draft"])
        decoded = [v for v in step.verdicts if v is not None]
        if len(decoded) == rows - sum(len(t.tokens) for t in step.draft.trees):  # no prompt in this pass
            now = sum(len(v.tokens) for v in decoded) / sum(step.clock[p] for p in ("draft", "verify", "judge"))
            self.speed = max(self.speed + 0.05 * (min(now, 3 * self.speed) - self.speed), 1 / self.costs(len(decoded)))
        for turn, tree, verdict in zip(step.turns, step.draft.trees, step.verdicts, strict=True):
            if verdict is not None:
                self._learn(turn, tree, verdict.path, verdict.fates)

    def _learn_price(self, seconds: float) -> None:
        each = seconds / max(self.drafted, 1)
        weight = 1.0 if self.draft_node is None else 0.2  # the first time tells most
        self.draft_node = (1 - weight) * (self.draft_node or 0.0) + weight * each
        self.draft_call += weight * (seconds - self.draft_call)

    def _learn(self, turn: Turn, tree: Tree, path: list[int], fates: str) -> None:
        name = turn.seq.id
        if tree.tokens:
            for record in (self._of(name), self.overall):
                record.add(tree, path, fates)
        if path:
            self.patience.pop(name, None)
        if turn.seq.done:
            for memory in (self.own, self.idle, self.patience):
                memory.pop(name, None)

    def _of(self, seq: int) -> Experience:
        if seq not in self.own:
            self.own[seq] = Experience(self.overall)
        return self.own[seq]
