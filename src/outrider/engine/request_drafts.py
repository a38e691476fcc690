"""Drafts that come with the request itself: its prediction (OpenAI's predicted outputs), and what its grammar forces.

A prediction goes first: while the answer follows it, the drafter is not called. A guide knows which tokens it forbids
and where only one token may follow: forbidden tokens are cut off a chain, forced ones are drafted for free.

Like every draft this decides how far a pass reaches, never what is emitted. It knows token ids, sequences and trees,
not which drafter is at work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate, islice
from operator import mul

from ..types import FORCED, PREDICTION, Draft, Sequence, Tree, Turn, chain
from .drafter import Drafter, DraftRequest

CERTAIN = 0.99  # the survival of a forced token: another spelling of the same text is rare
DOUBT = 0.5  # after m equal tokens the next predicted one is expected to be right (m + 1) / (m + 1 + DOUBT) of the time

# Where the answer has left its prediction, its last n tokens are searched in it:
INDEXED = 3  # n of the index over the whole prediction
NEARBY = {2: 64, 1: 8}  # shorter n -> tokens ahead that are searched
MAX_MATCHES = 8  # of the index that are compared, before and after the point of departure
FAR = 6  # equal tokens that are needed to go back


def propose(drafter: Drafter, turns: list[Turn], request: DraftRequest) -> Draft:
    """At most request.budgets[i] nodes for each turn, from the request itself where it has some."""
    seqs, budgets = request.seqs, request.budgets
    if not any(seq.has_request_drafts for seq in seqs):
        return _draft(drafter, request)
    trees = [_guided(seq, predicted_draft(seq, room), room) for seq, room in zip(seqs, budgets, strict=True)]
    open_ = [i for i, (turn, tree) in enumerate(zip(turns, trees, strict=True)) if _may_be_better(turn, tree)]
    drafted = request.answer(open_, lambda some: _draft(drafter, some))
    for i in open_:
        guided = _guided(seqs[i], drafted.trees[i], budgets[i])
        if guided.tokens[: len(trees[i].tokens)] == trees[i].tokens:
            trees[i] = guided
    return drafted._replace(trees=tuple(trees))


def _draft(drafter: Drafter, request: DraftRequest) -> Draft:
    drafted = drafter.draft(request)
    if not isinstance(drafted, Draft):
        raise TypeError(f"draft() returned a value of type {type(drafted).__name__}, but it must return a Draft")
    if len(drafted.trees) != len(request.seqs):
        raise ValueError(f"draft() returned {len(drafted.trees)} trees for {len(request.seqs)} sequences")
    return drafted


def _may_be_better(turn: Turn, own: Tree) -> bool:
    """Whether the drafter is called too: it may go on where forced tokens end.

    Under the rules that draw from q, which draft is verified must not depend on what was drawn.
    """
    goes_on = own.source == FORCED and len(own.tokens) < turn.budget and turn.seq.rule == "match"
    return turn.asks_drafter and (not own.tokens or goes_on)


def _guided(seq: Sequence, tree: Tree, room: int) -> Tree:
    """A chain as far as the guide allows it, and what the guide forces after that.

    A token that was drawn from q is never discarded for its own value: under the other rules such a chain stays whole.
    """
    if seq.matcher is None or not tree.is_chain or tree.q is not None or min(tree.tokens, default=0) < 0:
        return tree
    generated = seq.generated
    tree = tree.cut(seq.matcher.follow(generated, tree.tokens))
    more = seq.matcher.forced(generated + tree.tokens, room - len(tree.tokens))
    if not more:
        return tree
    survival = tree.survival if tree.tokens else []
    if survival is not None:
        last = survival[-1] if survival else 1.0
        survival = survival + [last * CERTAIN ** (i + 1) for i in range(len(more))]
    return chain(tree.tokens + more, survival, source=tree.source if tree.tokens else FORCED)


def predicted_draft(seq: Sequence, budget: int) -> Tree:
    """What a sequence's prediction expects next; the longer it has been right, the higher the survival."""
    if seq.prediction is None or budget <= 0:
        return chain([])
    tokens, run = seq.prediction.ahead(budget), seq.prediction.run
    survival = accumulate((m / (m + DOUBT) for m in range(run + 1, run + 1 + len(tokens))), mul)
    return chain(tokens, list(survival), source=PREDICTION)


class Prediction:
    """The predicted tokens, and the answer's position in them (`types.Prediction`).

    Where the answer leaves the prediction, the position is lost and searched again with every token. The fewer tokens
    match, the nearer ahead they must be.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.position: int | None = 0
        self.run = 0
        self.matched = 0
        self._left_at = 0
        self._recent: list[int] = []  # the answer's last FAR tokens
        self._matches = bytearray(len(tokens))  # [n] 1: the answer has this token here
        self._index: dict[tuple[int, ...], list[int]] | None = None  # INDEXED tokens -> positions after them

    def advance(self, tokens: list[int]) -> Prediction:
        """The answer goes on with these tokens."""
        for token in tokens:
            self._recent = [*self._recent[1 - FAR :], token]
            if self.position is not None and self.tokens[self.position : self.position + 1] == [token]:
                self._set_position(self.position + 1, self.run + 1)
                continue
            if self.position is not None:
                self._left_at, self.run, self.position = self.position, 0, None
            self._search()
        return self

    def ahead(self, most: int) -> list[int]:
        return [] if self.position is None else self.tokens[self.position : self.position + most]

    def _set_position(self, position: int, run: int) -> None:
        self.position, self.run = position, run
        start = position - min(run, FAR)
        self.matched += self._matches.count(0, start, position)
        self._matches[start:position] = b"\1" * (position - start)

    def _search(self) -> None:
        """Go to the candidate with the longest match; the first of several."""
        candidates = [(self._equal(end), -end) for end in self._candidates() if end < len(self.tokens)]
        run, end = max(candidates, default=(0, 0))
        if run:
            self._set_position(-end, run)

    def _candidates(self) -> list[int]:
        """Positions that follow an occurrence of the answer's last tokens."""
        if self._index is None:
            self._index = defaultdict(list)
            for end in range(INDEXED, len(self.tokens) + 1):
                self._index[tuple(self.tokens[end - INDEXED : end])].append(end)
        indexed = self._index.get(tuple(self._recent[-INDEXED:]), [])
        left = bisect_right(indexed, self._left_at)
        ends = indexed[left : left + MAX_MATCHES]
        ends += [end for end in indexed[max(left - MAX_MATCHES, 0) : left] if self._equal(end) >= FAR]
        for n, reach in NEARBY.items():
            recent = self._recent[-n:]
            window = range(max(self._left_at + 1, n), min(self._left_at + reach, len(self.tokens)) + 1)
            near = (end for end in window if len(recent) == n and self.tokens[end - n : end] == recent)
            ends += islice(near, 1)
        return ends

    def _equal(self, end: int) -> int:
        """How many tokens before this position equal the answer's last ones."""
        n = 0
        while n < min(end, len(self._recent)) and self.tokens[end - 1 - n] == self._recent[-1 - n]:
            n += 1
        return n
