"""Drafts that come with the request itself: its prediction, and what its grammar forces.

A prediction goes first: where the answer stands in it, the drafter is not asked. A guide knows which tokens it forbids
and where only one token may follow: what it forbids is cut off a chain, what it forces is drafted for free.

Like every draft this decides how far a pass reaches, never what is emitted. It knows sequences and trees, not which
drafter is at work.
"""

from __future__ import annotations

from dataclasses import replace

from ..types import FORCED, Draft, Sequence, Tree, Turn, chain
from .drafter import Drafter, DraftRequest
from .prediction import predicted_draft

CERTAIN = 0.99  # the survival of a forced token: another spelling of the same text is rare


def propose(drafter: Drafter, turns: list[Turn], request: DraftRequest) -> Draft:
    """At most request.budgets[i] nodes for each turn, from the request itself where it can tell."""
    seqs, budgets = request.seqs, request.budgets
    if not any(seq.has_request_drafts for seq in seqs):
        return drafter.draft(request)
    trees = [_guided(seq, predicted_draft(seq, room), room) for seq, room in zip(seqs, budgets, strict=True)]
    open_ = [i for i, (turn, tree) in enumerate(zip(turns, trees, strict=True)) if _may_be_better(turn, tree)]
    drafted = request.answer(open_, drafter.draft)
    for i in open_:
        guided = _guided(seqs[i], drafted.trees[i], budgets[i])
        if guided.tokens[: len(trees[i].tokens)] == trees[i].tokens:
            trees[i] = guided
    return replace(drafted, trees=tuple(trees))


def _may_be_better(turn: Turn, own: Tree) -> bool:
    """Whether the drafter is asked too: it may go on where forced tokens end.

    Under the rules that draw from q, whose draft is verified must not depend on what was drawn.
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
