"""Two tokenizers side by side: maps are right, and a text told in the other's words is the same text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import assume, example, given, settings, strategies as st

from outrider.drafters.translate.alignment import NONE, bytes_of, dictionary, same_words, tokenizer_of
from outrider.drafters.translate.retokenise import KEPT, Mapped, Pair, Retold, Speller
from outrider.models.tokenizer import Tokenizer

from support import alphabets

KINDS = ("byte level", "byte level, spaced", "sentence piece")


@cache
def kind(name: str) -> Tokenizer:
    make = {
        "byte level": lambda: alphabets.byte_level(),
        "byte level, spaced": lambda: alphabets.byte_level(alphabets.CODE, prefix=True),
        "sentence piece": lambda: alphabets.sentence_piece(),
        "words": lambda: alphabets.words(),
    }
    return make[name]()


@cache
def pair(draft: str, target: str) -> Pair:
    ours, theirs = kind(draft), kind(target)
    return Pair(ours, theirs, dictionary(ours, theirs, ours.vocab_size, theirs.vocab_size))


@dataclass
class Listed:
    """A tokenizer that is only a list of what its ids spell; None for a control token's name."""

    pieces: list[bytes]
    special: frozenset[int] = frozenset()
    bos_id: int | None = None
    eos_id: int | None = None
    add_bos: bool = False
    strip: int = 0

    @property
    def vocabulary(self) -> dict[str, int]:
        return {f"{i}": i for i in range(len(self.pieces))}

    def encode(self, text: str, special: bool = False) -> list[int]:
        raise NotImplementedError

    def id_to_bytes(self, token: int) -> bytes:
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def is_special(self, token: int) -> bool:
        return token in self.special


PIECES = st.lists(st.binary(max_size=4).map(lambda b: bytes(x % 3 + 97 for x in b)), max_size=30)


@given(PIECES, PIECES, st.integers(0, 35), st.integers(0, 35), st.data())
@settings(max_examples=150, deadline=None)
def test_maps_lead_to_tokens_of_the_same_bytes(
    ours: list[bytes], theirs: list[bytes], rows: int, their_rows: int, data: st.DataObject
) -> None:
    """Any vocabularies, any paddings, control tokens anywhere, the same bytes several times."""
    some = st.frozensets(st.integers(0, 29), max_size=4)
    draft, target = Listed(ours, data.draw(some)), Listed(theirs, data.draw(some))
    known = dictionary(draft, target, rows, their_rows)
    to_target, to_draft, begins = known.to_target.tolist(), known.to_draft.tolist(), known.begins.tolist()
    assert len(to_target) == len(begins) == rows
    assert len(to_draft) == their_rows
    for words, other, there, back in ((draft, target, to_target, to_draft), (target, draft, to_draft, to_target)):
        for i, j in enumerate(there):
            if j != NONE:
                assert j < len(back)
                assert words.id_to_bytes(i) == other.id_to_bytes(j) != b""
                assert words.is_special(i) == other.is_special(j)
    names = [{(w.is_special(i), w.id_to_bytes(i)) for i in range(min(n, len(w.pieces))) if w.id_to_bytes(i)}
             for w, n in ((draft, rows), (target, their_rows))]  # fmt: skip
    assert known.shared == len(names[0] & names[1]) == len(known.pairs[0])
    assert len(set(known.pairs[0].tolist())) == len(set(known.pairs[1].tolist())) == known.shared
    ordinary = {spelled for special, spelled in names[1] if not special}
    for i, j in enumerate(begins):
        spelled = draft.id_to_bytes(i)
        if draft.is_special(i):
            assert j == to_target[i]
        elif j == NONE:
            assert not any(spelled.startswith(piece) for piece in ordinary)
        else:
            longest = max((p for p in ordinary if spelled.startswith(p)), key=len)
            assert target.id_to_bytes(j) == longest


@given(PIECES, PIECES, PIECES)
@settings(max_examples=100, deadline=None)
def test_longer_tokens_that_the_target_lacks(ours: list[bytes], theirs: list[bytes], asked: list[bytes]) -> None:
    draft, target = Listed(ours, frozenset({3})), Listed(theirs, frozenset({5}))
    found = dictionary(draft, target, 25, 25).longer
    names = {piece for i, piece in enumerate(theirs[:25]) if i != 5 and piece}
    for begin in [*asked, *ours]:
        longer, rests = (t.tolist() for t in found.of(begin))
        lonely = {piece for i, piece in enumerate(ours[:25]) if i != 3} - names
        right = {p for p in lonely if p.startswith(begin) and any(p[len(begin) :].startswith(n) for n in names)}
        assert {draft.id_to_bytes(i) for i in longer} == (right - {begin} if begin else set())
        for i, rest in zip(longer, rests, strict=True):
            spelled = draft.id_to_bytes(i)[len(begin) :]
            assert target.id_to_bytes(rest) == max((n for n in names if spelled.startswith(n)), key=len)


def test_ends_of_a_text_belong_together_whatever_they_are_called() -> None:
    draft = Listed([b"<s>", b"</s>", b"a"], frozenset({0, 1}), bos_id=0, eos_id=1)
    target = Listed([b"a", b"<|end|>", b"<|begin|>"], frozenset({1, 2}), bos_id=2, eos_id=1)
    known = dictionary(draft, target, 3, 3)
    assert known.to_target.tolist() == [2, 1, 0]
    assert known.to_draft.tolist() == [2, 1, 0]
    assert known.begins.tolist() == [2, 1, 0]


def test_spellings_of_bytes_do_not_matter() -> None:
    """A null byte is Ā for one and <0x00> for the other; a space is Ġ and ▁."""
    gpt, llama = kind("byte level"), kind("sentence piece")
    known = dictionary(gpt, llama, gpt.vocab_size, llama.vocab_size)
    for ours, theirs, other in (("Ā", "<0x00>", ""), ("Ġ", "▁", "<0x20>"), ("Ċ", "\n", "<0x0A>")):
        mine, its = gpt.token_to_id(ours), llama.token_to_id(theirs)
        assert mine is not None
        assert known.to_target[mine] == its
        if other:
            assert known.to_draft[llama.token_to_id(other) or 0] == mine


def test_the_same_words_are_known_as_such() -> None:
    gpt = kind("byte level")
    assert same_words(gpt, kind("byte level"))
    assert not same_words(gpt, kind("sentence piece"))
    assert not same_words(alphabets.shuffled(gpt)[0], gpt)
    more = alphabets.byte_level()
    more._core.add_special_tokens(["<extra>"])
    assert same_words(Tokenizer(more._core, 0, 1), gpt)  # one more control token is no other language


def test_a_tokenizer_of_transformers_is_taken_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    gpt = kind("byte level")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=gpt._core, bos_token="<s>", eos_token="</s>")
    taken = tokenizer_of(fast)
    assert taken.vocabulary == gpt.vocabulary
    assert taken.eos_id == 1
    assert taken.encode("the fox") == gpt.encode("the fox")


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=12)
MIXED = st.lists(st.one_of(TEXT, st.sampled_from([*alphabets.PROSE, *alphabets.CODE, " ", "\n", "  "])), max_size=6)


@pytest.mark.parametrize("name", KINDS)
@given(MIXED.map("".join))
@example(" ")
@example("\n\nfoo")
@settings(max_examples=60, deadline=None)
def test_a_text_that_goes_on_is_spelled_byte_for_byte(name: str, text: str) -> None:
    assert bytes_of(kind(name), Speller(kind(name)).go_on(text)) == text.encode()


PAIRS = [("byte level", "sentence piece"), ("sentence piece", "byte level"), ("byte level, spaced", "byte level")]


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@given(MIXED.map("".join), st.lists(st.integers(1, 9)))
@settings(max_examples=60, deadline=None)
def test_what_was_said_is_retold_byte_for_byte(draft: str, target: str, text: str, steps: list[int]) -> None:
    """However it comes, and with half a character at the end of a step."""
    p = pair(draft, target)
    ids = p.target_speller.go_on("." + text)  # no beginning of a text: nothing is stripped
    retold, mapped, at = Retold(p), Mapped(p), 0
    for step in [*steps, len(ids)]:
        at += step
        told, direct = retold.hear(ids[:at]), mapped.hear(ids[:at])
        said = bytes_of(p.target, ids[:at])
        assert unprefixed(p, told) + retold.half == said
        assert len(direct) >= min(at, len(ids)) or not said
    if all(p.draft_id(i) != NONE for i in ids):
        assert unprefixed(p, direct) == bytes_of(p.target, ids)


def unprefixed(p: Pair, ids: list[int]) -> bytes:
    """A text's bytes without its BOS, and without the space that some tokenizers put before it."""
    spelled = bytes_of(p.draft, [i for i in ids if not p.draft.is_special(i)])
    return spelled[1:] if spelled[:1] == b" " else spelled


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@given(st.lists(st.sampled_from([*alphabets.PROSE, *alphabets.CODE]), min_size=4, max_size=12), st.integers(1, 40))
@settings(max_examples=15, deadline=None)
def test_a_long_text_is_spelled_as_if_at_once_and_looks_back_but_a_little(
    draft: str, target: str, lines: list[str], step: int
) -> None:
    p, text = pair(draft, target), "\n".join(lines) * 3
    spied = Spy(p.draft)
    own = Pair(spied, p.target, p.known)
    ids, retold = p.target.encode(text), Retold(own)
    for at in range(step, len(ids) + step, step):
        spied.longest = 0
        told = retold.hear(ids[:at])
        assert spied.longest <= 40 * (8 * KEPT + step)
        assert len(told) - retold.settled <= 8 * KEPT + 9 * step
    opening = [p.draft.bos_id] if p.draft.add_bos else []
    assert told == opening + p.draft.encode(text)


class Spy:
    """A tokenizer that remembers the longest text it was asked for."""

    def __init__(self, words: Tokenizer) -> None:
        self.words, self.longest = words, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.words, name)

    def encode(self, text: str, special: bool = False) -> list[int]:
        self.longest = max(self.longest, len(text))
        return self.words.encode(text, special)


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@given(MIXED.map("".join), MIXED.map("".join), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_a_draft_is_told_to_the_target_byte_for_byte(draft: str, target: str, said: str, more: str, cut: int) -> None:
    p = pair(draft, target)
    assume(more)
    ids = p.target_speller.go_on("." + said + more)
    ids = ids[: len(p.target_speller.go_on("." + said))]  # where the target stands: perhaps within a character
    retold = Retold(p)
    retold.hear(ids)
    before = bytes_of(p.target, ids)
    drafted = ("." + said + more).encode()[len(before) - len(retold.half) :]
    whole = drafted[: len(drafted) - cut] if cut < len(drafted) else drafted
    told = bytes_of(p.target, p.in_target(ids, retold.half, whole))
    complete = whole.decode("utf-8", "ignore").encode()
    assert retold.half + told == complete or (retold.half and not told)
    assert not retold.half or p.in_target(ids, retold.half, b"?" + whole) == []


def test_a_text_that_becomes_another_one_is_told_anew() -> None:
    p = pair("byte level", "sentence piece")
    one, two = p.target.encode("the quick brown fox"), p.target.encode("return a + b")
    for context in (Retold(p), Mapped(p)):
        first = list(context.hear(one))
        assert context.hear(two) != first
        assert context.hear(one) == first


def test_control_tokens_are_no_text() -> None:
    """Those that both have stand for each other, the others for nothing; the words around them are not joined."""
    p = pair("sentence piece", "byte level")
    user, ids = p.target.token_to_id("<|user|>"), p.target.encode("def add")
    assert user is not None
    for context in (Retold(p), Mapped(p)):
        told = context.hear([p.target.bos_id or 0, *ids, user, *ids])
        assert told[0] == p.draft.bos_id
        assert bytes_of(p.draft, told[1:]).count(b"def add") == 2
        assert b"user" not in bytes_of(p.draft, told)
    words = pair("words", "byte level")
    assert Retold(words).hear(words.target.encode("the fox")) == [1, 3]
