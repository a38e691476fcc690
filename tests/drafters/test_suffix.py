"""The suffix drafter against a brute-force search; its trees, its shared responses, and unreliable callers."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, strategies as st

from outrider.drafters import DraftRequest, Workspace, lookup, suffix
from outrider.drafters.suffix import GRAMS, MAX_LENGTH, MAX_MATCHES, SEPARATOR, IndexedText, SharedResponses, Suffix
from outrider.errors import ConfigError
from outrider.types import SamplingParams, Sequence, Tree

texts = st.lists(st.integers(0, 2), max_size=60)


def drafter(**options: object) -> Suffix:
    return Suffix(Workspace(None, None, None, options))  # type: ignore[arg-type]


def draft(it: Suffix, seq: Sequence, budget: int, stop_below: float = 0.0) -> Tree:
    return it.draft(DraftRequest([seq], [budget], stop_below=stop_below)).trees[0]


def finish(it: Suffix, number: int, response: list[int], prompt: tuple[int, ...] = (90, 91)) -> None:
    """A whole request, from its prompt to its end."""
    seq = Sequence(number, list(prompt))
    it.begin(seq)
    seq.tokens.extend(response)
    it.end(seq)


# ---------------------------------------------------------------- the search


def match_length(text: list[int], position: int, tokens: list[int]) -> int:
    length = 0
    while length < min(position, len(tokens), MAX_LENGTH) and text[position - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def brute_force(text: list[int], tokens: list[int]) -> list[tuple[int, int]]:
    """(length, position) of the latest MAX_MATCHES positions after the last 4 tokens, then 2, then 1."""
    lengths = {position: match_length(text, position, tokens) for position in range(len(text) - 1, -1, -1)}
    found: dict[int, int] = {}
    for n in GRAMS:
        found |= {position: length for position, length in lengths.items() if length >= n and position not in found}
    return [(length, position) for position, length in found.items()][:MAX_MATCHES]


@given(texts, texts)
def test_matches_are_those_of_brute_force(text: list[int], tokens: list[int]) -> None:
    indexed = IndexedText()
    indexed.tokens += text
    for end in (tokens, text):
        matches = indexed.matches(end, 1)
        assert [(m.length, m.ahead) for m in matches] == [(n, [text[p]]) for n, p in brute_force(text, end)]


@given(texts, st.lists(st.integers(1, 9), max_size=8))
def test_indexing_piece_by_piece_is_indexing_at_once(text: list[int], pieces: list[int]) -> None:
    whole, grown = IndexedText(), IndexedText()
    whole.tokens += text
    for size in [*pieces, len(text)]:
        assert grown.sync(text[: len(grown.tokens) + size])
    assert grown.tokens == text
    assert grown.matches(text, 3) == whole.matches(text, 3)


def naive_chain(tokens: list[int], budget: int, floor: float) -> tuple[list[int], list[float]]:
    """The vote as documented, without an index or groups: the whole path of every match is compared."""
    matches = sorted(brute_force(tokens, tokens), key=lambda m: (-m[0], -m[1]))
    path: list[int] = []
    survival: list[float] = []
    while len(path) < budget:
        votes: dict[int, float] = {}
        longest = 0
        for length, position in matches:
            ahead = [tokens[position + i % (len(tokens) - position)] for i in range(len(path) + 1)]
            if ahead[:-1] == path:
                votes[ahead[-1]] = votes.get(ahead[-1], 0.0) + suffix.GAIN**length
                longest = max(longest, length)
        if not votes:
            break
        token = max(votes, key=lambda t: votes[t])
        doubt = suffix.DOUBT * suffix.GAIN**longest / (longest + len(path)) ** 1.25
        alive = (survival or [1.0])[-1] * votes[token] / (sum(votes.values()) + doubt)
        if alive < floor:
            break
        path.append(token)
        survival.append(alive)
    return path, survival


@given(texts, st.integers(1, 9), st.sampled_from([0.0, 0.1, 0.4]))
def test_a_chain_is_what_the_votes_say(tokens: list[int], budget: int, floor: float) -> None:
    tree = draft(drafter(suffix_min_survival=floor), Sequence(0, tokens), budget)
    path, survival = naive_chain(tokens, budget, floor)
    assert tree.is_chain
    assert tree.tokens == path
    assert tree.survival == pytest.approx(survival)


def test_longer_matches_and_more_of_them_are_trusted_more() -> None:
    def first(tokens: list[int]) -> float:
        survival = draft(drafter(suffix_min_survival=0), Sequence(0, tokens), 1).survival
        assert survival is not None
        return survival[0]

    one, longer, twice = [1, 2, 7, 1, 2], [1, 2, 3, 7, 1, 2, 3], [1, 2, 7, 1, 2, 7, 1, 2]
    assert 0.3 < first(one) < first(longer) < 0.9
    assert first(one) < first(twice) < 1
    assert first([1, 2, 7, 1, 2, 8, 1, 2]) < first(one)  # matches that disagree


# ---------------------------------------------------------------- deferred indexing


def test_a_text_is_indexed_with_its_first_draft_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing is drafted, requests arrive, grow and end without being indexed."""
    hashed: list[object] = []
    monkeypatch.setattr(suffix, "hash", lambda key: hashed.append(key) or hash(key), raising=False)
    it = drafter()
    for number in range(5):
        finish(it, number, list(range(40)), prompt=tuple(range(100, 200)))
    assert not hashed
    assert draft(it, Sequence(9, [7, 11, 12, 13]), 4).tokens[:1] == [14]  # and nothing is missed
    assert len(hashed) == len(GRAMS) * (5 * 41 + 4 + 2)  # each position once, and a lookup in both texts that have any
    hashed.clear()
    draft(it, Sequence(9, [7, 11, 12, 13]), 4)
    assert len(hashed) == len(GRAMS) * 2  # nothing is indexed twice


def test_a_chain_ends_at_the_requests_stop_below() -> None:
    it, seq = drafter(), Sequence(0, [1, 2, 3, 4, 9, 1, 2, 3])
    whole = draft(it, seq, 4)
    assert whole.survival is not None
    assert draft(it, seq, 4, stop_below=whole.survival[1]) == whole.cut(2)
    assert draft(it, seq, 4, stop_below=0.99).tokens == []


# ---------------------------------------------------------------- trees


@given(texts, st.lists(texts, max_size=3), st.integers(1, 24), st.booleans())
def test_a_tree_is_sound_and_best_first(tokens: list[int], past: list[list[int]], budget: int, branching: bool) -> None:
    it = drafter(tree=branching, suffix_min_survival=0.02)
    for number, response in enumerate(past):
        finish(it, number, response)
    tree = draft(it, Sequence(9, tokens), budget)
    assert tree.survival is not None
    assert len(tree.tokens) == len(tree.parents) == len(tree.survival) <= budget
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
    assert tree.survival == sorted(tree.survival, reverse=True)
    assert all(0.02 <= alive < 1 for alive in tree.survival)
    assert all(p < 0 or tree.survival[p] >= s for p, s in zip(tree.parents, tree.survival, strict=True))
    assert len({*zip(tree.parents, tree.tokens, strict=True)}) == len(tree.tokens)  # no duplicate siblings
    assert SEPARATOR not in tree.tokens


@given(texts, st.integers(1, 12))
def test_a_tree_expects_at_least_what_a_chain_expects(tokens: list[int], budget: int) -> None:
    chain, tree = (draft(drafter(tree=branching), Sequence(0, tokens), budget) for branching in (False, True))
    assert sum(tree.survival or []) >= sum(chain.survival or []) - 1e-9


def test_a_tree_branches_where_the_past_did() -> None:
    tree = draft(drafter(tree=True), Sequence(0, [1, 2, 3, 5, 1, 2, 4, 6, 1, 2]), 4)
    assert {(tree.tokens[i], tree.parents[i]) for i in (0, 1)} == {(4, -1), (3, -1)}
    assert sorted(tree.parents) == [-1, -1, 0, 1]


def test_nothing_follows_an_end() -> None:
    tokens = [1, 2, 0, 5, 6, 1, 2]
    assert draft(drafter(), Sequence(0, tokens), 3).tokens == [0, 5, 6]
    assert draft(drafter(), Sequence(0, tokens, ends=frozenset({0})), 3).tokens == [0]


# ---------------------------------------------------------------- what is shared


def test_a_finished_response_helps_the_next_request_and_its_prompt_does_not() -> None:
    it = drafter()
    for number in range(3):
        finish(it, number, [11, 12, 13, 14, 15, 16], prompt=(21, 22, 23, 24, 25, 26))
    tree = draft(it, Sequence(9, [7, 11, 12, 13]), 8)
    assert (tree.tokens[:2], tree.source) == ([14, 15], "suffix:shared")
    assert set(tree.tokens) <= {14, 15, 16}  # no other response is joined to it
    assert draft(it, Sequence(8, [7, 21, 22, 23]), 8).tokens == []


def test_the_request_itself_counts_more_than_others() -> None:
    it = drafter()
    for number in range(3):
        finish(it, number, [11, 12, 13, 66])
    tree = draft(it, Sequence(9, [11, 12, 13, 55, 11, 12, 13]), 1)
    assert (tree.tokens, tree.source) == ([55], "suffix")


def test_a_request_that_must_not_be_learnt_from_is_not_shared() -> None:
    it = drafter()
    seq = Sequence(1, [90, 91], SamplingParams(learn=False))
    it.begin(seq)
    seq.tokens.extend([11, 12, 13, 11, 12])
    assert draft(it, seq, 2).tokens == [13, 11]  # its own text helps it all the same
    it.end(seq)
    assert not draft(it, Sequence(2, [7, 11, 12]), 2).tokens


def test_zero_shared_tokens_keep_requests_apart() -> None:
    it = drafter(suffix_shared_tokens=0)
    for number in range(3):
        finish(it, number, [11, 12, 13, 14, 15, 16])
    assert draft(it, Sequence(9, [7, 11, 12, 13]), 4).tokens == []


@given(st.integers(0, 40), st.lists(texts, max_size=12))
def test_shared_responses_are_bounded_and_hold_the_latest(limit: int, responses: list[list[int]]) -> None:
    shared = SharedResponses(limit)
    for response in responses:
        shared.add(response)
        held = [text.tokens for text in shared.texts]
        assert sum(map(len, held)) <= limit
        kept = min(len(response), max(limit // 2 - 1, 0))
        if kept:
            assert held[0][-kept - 1 :] == [*response[-kept:], SEPARATOR]


def test_old_responses_are_dropped() -> None:
    it = drafter(suffix_shared_tokens=2000, suffix_min_survival=0.01)
    finish(it, 0, [11, 12, 13, 14, 15, 16])
    seq = Sequence(9999, [7, 11, 12, 13])
    assert draft(it, seq, 1).tokens == [14]
    for number in range(1, 400):
        finish(it, number, [100 + number % 50] * 10)
    assert draft(it, seq, 1).tokens == []
    assert len(it._requests) == 1


# ---------------------------------------------------------------- unreliable callers


def test_an_end_that_comes_twice_or_unannounced_adds_nothing() -> None:
    it, seq = drafter(), Sequence(0, [1])
    it.end(seq)
    it.begin(seq)
    it.begin(seq)
    seq.tokens.extend([2, 3])
    it.end(seq)
    it.end(seq)
    assert [text.tokens for text in it._shared.texts] == [[2, 3, SEPARATOR], []]


def test_interrupted_indexing_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = IndexedText(), IndexedText()
    whole.tokens += [1, 2, 3, 1, 2, 3, 1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(suffix, "hash", lambda key: (_ for _ in ()).throw(MemoryError()), raising=False)
        broken.tokens += [1, 2, 3, 1]
        with pytest.raises(MemoryError):
            broken.matches([1, 2], 4)
    broken.tokens += [2, 3, 1, 2]
    assert broken.matches([1, 2], 4) == whole.matches([1, 2], 4) != []


def test_requests_that_never_end_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_REQUESTS", 3)
    it = drafter()
    for i in range(10):
        it.begin(Sequence(i, [1, 2, 3, 1, 2]))
    assert len(it._requests) == 3
    assert draft(it, Sequence(0, [1, 2, 3, 1, 2]), 1).tokens == [3]


# ---------------------------------------------------------------- the rest


def test_options_by_our_names_and_by_vllms() -> None:
    assert lookup("suffix") is Suffix
    assert drafter()._floor == 0.1
    assert drafter(suffix_decoding_min_token_prob=0.3)._floor == 0.3
    with pytest.raises(ConfigError, match="suffix_min_survival is 2"):
        drafter(suffix_min_survival=2)


@pytest.mark.parametrize("branching", [False, True])
@pytest.mark.parametrize("period", [1, 2, 97])
def test_it_is_fast_even_on_text_that_only_repeats(period: int, branching: bool) -> None:
    it = drafter(tree=branching)
    for number in range(5):
        finish(it, number, [i * i % period for i in range(2000)])
    seq = Sequence(9, [i * i % period for i in range(4000)])
    it.begin(seq)
    started = time.perf_counter()
    for i in range(200):
        seq.tokens.append(i * i % period)
        draft(it, seq, 16)
    assert time.perf_counter() - started < 1.0  # 5 ms each; 0.05 to 0.2 ms is usual
