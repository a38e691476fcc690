"""What both drafters that look up earlier text promise: the tokens decide, whatever was called before."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from outrider.drafters import Drafter, DraftRequest, Workspace, lookup
from outrider.types import Sequence, Tree

texts = st.lists(st.integers(0, 2), max_size=60)
actions = st.lists(
    st.tuples(st.sampled_from(["grow", "begin", "end", "draft", "reuse", "copy", "cut"]), texts), max_size=12
)
either = pytest.mark.parametrize("name", ["ngram", "suffix"])


def drafter(name: str) -> Drafter:
    """It shares no text between requests."""
    return lookup(name)(Workspace(None, None, None, {"suffix_shared_tokens": 0}))  # type: ignore[arg-type]


def draft(it: Drafter, seq: Sequence, budget: int) -> Tree:
    return it.draft(DraftRequest([seq], [budget])).trees[0]


@either
def test_nothing_found_or_nothing_allowed_is_an_empty_tree(name: str) -> None:
    seqs = [Sequence(0, [1, 2, 3]), Sequence(1, [1, 2, 1, 2]), Sequence(2, [])]
    drafts = drafter(name).draft(DraftRequest(seqs, [5, 0, 5]))
    assert [tree.tokens for tree in drafts.trees] == [[], [], []]


@either
@given(texts, actions)
def test_the_tokens_decide_whatever_was_called_before(
    name: str, tokens: list[int], calls: list[tuple[str, list[int]]]
) -> None:
    it, seq = drafter(name), Sequence(0, list(tokens))
    for action, new in calls:
        if action == "grow":
            seq.tokens.extend(new)
        elif action == "cut":
            del seq.tokens[len(new) :]
            draft(it, seq, 4)
        elif action in ("reuse", "copy"):
            seq = Sequence(0, list(new if action == "reuse" else seq.tokens))
        elif action == "draft":
            draft(it, seq, 4)
        else:
            getattr(it, action)(seq)
        if len(new) % 2:  # otherwise the drafter sees it only later
            assert draft(it, seq, 4) == draft(drafter(name), seq, 4)
    assert draft(it, seq, 4) == draft(drafter(name), seq, 4)


@either
def test_an_end_rewritten_in_place_is_noticed(name: str) -> None:
    it, seq = drafter(name), Sequence(0, [1, 2, 3, 1, 2])
    assert draft(it, seq, 1).tokens == [3]
    seq.tokens[2:] = [4, 1, 5, 1, 2]
    assert draft(it, seq, 1).tokens == [4]
