"""Drafts that a request brings along, before and around those of the drafter.

A prediction goes first: where the answer stands in it, nobody else is asked. A guide knows what it forbids and where it
leaves but one way to go on: what it forbids is cut off a chain, what it forces is drafted for free.

Like everything about drafts this decides how far a pass reaches, never what is said. It knows sequences and trees; it
does not know which drafter is at work.
"""

from __future__ import annotations

from ..drafters import Drafter
from ..drafters.prediction import foretold
from ..types import BROUGHT, Draft, Sequence, Tree, Turn, chain

_, FORCED = BROUGHT  # the source of a draft that is a guide's
CERTAIN = 0.99  # the survival of a forced token: another spelling of the same text is rare


def propose(drafter: Drafter, turns: list[Turn]) -> Draft:
    """At most turn.budget nodes for each sequence, from the request itself where it can tell."""
    seqs, budget = [turn.seq for turn in turns], [turn.budget for turn in turns]
    if not any(seq.brings for seq in seqs):
        return drafter.draft(seqs, budget)
    trees = [_guided(seq, foretold(seq, room), room) for seq, room in zip(seqs, budget, strict=True)]
    open_ = [i for i, (turn, tree) in enumerate(zip(turns, trees, strict=True)) if _may_be_better(turn, tree)]
    if not open_:
        return Draft.pack(trees)
    answer = drafter.draft([seqs[i] for i in open_], [budget[i] for i in open_])
    for i, tree in zip(open_, answer.trees, strict=True):
        theirs = _guided(seqs[i], tree, budget[i])
        if theirs.tokens[: len(trees[i].tokens)] == trees[i].tokens:
            trees[i] = theirs
    return Draft.pack(trees, answer.unread)


def _may_be_better(turn: Turn, own: Tree) -> bool:
    """Whether the drafter is asked too: it may go on where forced tokens end.

    Under the rules that draw from q, whose draft is verified must not depend on what was drawn.
    """
    goes_on = own.source == FORCED and len(own.tokens) < turn.budget and turn.seq.rule == "match"
    return turn.asks and (not own.tokens or goes_on)


def _guided(seq: Sequence, tree: Tree, room: int) -> Tree:
    """A chain as far as the guide allows it, and what the guide forces after that.

    A token that was drawn from q is never discarded for its own value: under the other rules such a chain stays whole.
    """
    if seq.matcher is None or not tree.is_chain or tree.q is not None or min(tree.tokens, default=0) < 0:
        return tree
    said = seq.generated
    tree = tree.cut(seq.matcher.follow(said, tree.tokens))
    more = seq.matcher.forced(said + tree.tokens, room - len(tree.tokens))
    if not more:
        return tree
    survival = tree.survival if tree.tokens else []
    if survival is not None:
        last = survival[-1] if survival else 1.0
        survival = survival + [last * CERTAIN ** (i + 1) for i in range(len(more))]
    return chain(tree.tokens + more, survival, source=tree.source if tree.tokens else FORCED)
