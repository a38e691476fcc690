"""Prompt lookup against a brute-force search, and with calls that are skipped, repeated and wrong."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from outrider.drafters import DraftRequest, Workspace, lookup, ngram
from outrider.drafters.ngram import NGram
from outrider.errors import ConfigError
from outrider.types import Sequence, Tree

texts = st.lists(st.integers(0, 2), max_size=40)


def drafter(**options: object) -> NGram:
    return NGram(Workspace(None, None, None, options))  # type: ignore[arg-type]


def draft(it: NGram, seq: Sequence, budget: int) -> Tree:
    return it.draft(DraftRequest([seq], [budget])).trees[0]


def brute_force(tokens: list[int], low: int, high: int, budget: int) -> tuple[int, list[int]]:
    """The longest n-gram first, its occurrences from the latest backwards; (n, what followed)."""
    for n in range(high, low - 1, -1):
        for start in range(len(tokens) - 1, n - 1, -1):
            if tokens[start - n : start] == tokens[-n:]:
                copied = list(tokens)
                for i in range(budget):
                    copied.append(copied[start + i])
                return n, copied[len(tokens) :]
    return 0, []


@given(texts, st.integers(1, 3), st.integers(0, 3), st.integers(1, 9))
def test_it_finds_what_brute_force_finds(tokens: list[int], low: int, more: int, budget: int) -> None:
    n, expected = brute_force(tokens, low, low + more, budget)
    tree = draft(drafter(ngram_min=low, ngram_max=low + more), Sequence(0, tokens), budget)
    assert tree.tokens == expected
    assert tree.is_chain
    assert tree.source == ("ngram" if n else "")
    if n:
        assert tree.survival is not None
        assert tree.survival[0] == pytest.approx(n / (n + ngram.DOUBT))
        assert tree.survival == sorted(tree.survival, reverse=True)


def test_the_latest_occurrence_and_the_longest_match_win() -> None:
    assert draft(drafter(), Sequence(0, [1, 2, 7, 1, 2, 8, 1, 2]), 1).tokens == [8]
    assert draft(drafter(), Sequence(0, [5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]), 1).tokens == [7]


def test_a_period_continues() -> None:
    assert draft(drafter(), Sequence(0, [9, 1, 2, 3, 1, 2, 3]), 7).tokens == [1, 2, 3, 1, 2, 3, 1]


def test_a_batch_is_drafted_sequence_by_sequence() -> None:
    drafts = drafter().draft(DraftRequest([Sequence(0, [1, 2, 3, 1, 2]), Sequence(1, [4, 5, 6, 4, 5])], [2, 1]))
    assert [tree.tokens for tree in drafts.trees] == [[3, 1], [6]]


def test_sequences_that_never_end_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_SEQUENCES", 3)
    it = drafter()
    for i in range(10):
        draft(it, Sequence(i, [1, 2, 3, 1, 2]), 1)
    assert len(it._indexes) == 3
    assert draft(it, Sequence(0, [1, 2, 3, 1, 2]), 1).tokens == [3]


def test_options_by_our_names_and_by_vllms() -> None:
    assert lookup("ngram") is NGram
    assert list(drafter()._sizes) == [4, 3, 2]
    assert list(drafter(prompt_lookup_max=5, prompt_lookup_min=3)._sizes) == [5, 4, 3]
    assert list(drafter(ngram_max=1)._sizes) == [1]
    with pytest.raises(ConfigError, match="ngram_min is 3 and ngram_max is 2"):
        drafter(ngram_min=3, ngram_max=2)


def test_it_is_fast() -> None:
    it, seq = drafter(), Sequence(0, [i * i % 97 for i in range(4000)])
    it.begin(seq)
    started = time.perf_counter()
    for i in range(1000):
        seq.tokens.append(i % 7)
        draft(it, seq, 8)
    assert time.perf_counter() - started < 1.0  # 1 ms each; about 0.01 ms is usual
