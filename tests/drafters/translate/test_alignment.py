"""Two tokenizers: the vocabulary alignment is right, and a retokenised text is the same text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import assume, example, given, strategies as st

from outrider.drafters.translate.alignment import (
    NONE,
    TAIL,
    MappedText,
    RetokenisedText,
    TokenizerPair,
    align,
    bytes_of,
    encode_continuation,
    same_vocabulary,
    tokenizer_of,
)
from outrider.models.tokenizer import Tokenizer

from support import alphabets
from support.examples import examples

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
def pair(draft: str, target: str) -> TokenizerPair:
    one, other = kind(draft), kind(target)
    return TokenizerPair(one, other, align(one, other, one.vocab_size, other.vocab_size))


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
@examples(150)
def test_maps_lead_to_tokens_of_the_same_bytes(
    draft_pieces: list[bytes], target_pieces: list[bytes], rows: int, target_rows: int, data: st.DataObject
) -> None:
    """Any vocabularies, any paddings, control tokens anywhere, the same bytes several times."""
    some = st.frozensets(st.integers(0, 29), max_size=4)
    draft, target = Listed(draft_pieces, data.draw(some)), Listed(target_pieces, data.draw(some))
    alignment = align(draft, target, rows, target_rows)
    to_target, to_draft, begins = (t.tolist() for t in (alignment.to_target, alignment.to_draft, alignment.begins))
    assert len(to_target) == len(begins) == rows
    assert len(to_draft) == target_rows
    for one, other, ids, back in ((draft, target, to_target, to_draft), (target, draft, to_draft, to_target)):
        for i, j in enumerate(ids):
            if j != NONE:
                assert j < len(back)
                assert one.id_to_bytes(i) == other.id_to_bytes(j) != b""
                assert one.is_special(i) == other.is_special(j)
    names = [{(w.is_special(i), w.id_to_bytes(i)) for i in range(min(n, len(w.pieces))) if w.id_to_bytes(i)}
             for w, n in ((draft, rows), (target, target_rows))]  # fmt: skip
    assert alignment.shared == len(names[0] & names[1]) == len(alignment.pairs[0])
    assert len(set(alignment.pairs[0].tolist())) == len(set(alignment.pairs[1].tolist())) == alignment.shared
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
@examples(100)
def test_longer_tokens_that_the_target_lacks(own: list[bytes], others: list[bytes], begins: list[bytes]) -> None:
    draft, target = Listed(own, frozenset({3})), Listed(others, frozenset({5}))
    extensions = align(draft, target, 25, 25).longer
    names = {piece for i, piece in enumerate(others[:25]) if i != 5 and piece}
    for begin in [*begins, *own]:
        longer, rests = (t.tolist() for t in extensions.of(begin))
        draft_only = {piece for i, piece in enumerate(own[:25]) if i != 3} - names
        right = {p for p in draft_only if p.startswith(begin) and any(p[len(begin) :].startswith(n) for n in names)}
        assert {draft.id_to_bytes(i) for i in longer} == (right - {begin} if begin else set())
        for i, rest in zip(longer, rests, strict=True):
            spelled = draft.id_to_bytes(i)[len(begin) :]
            assert target.id_to_bytes(rest) == max((n for n in names if spelled.startswith(n)), key=len)


def test_bos_and_eos_are_aligned_whatever_their_names() -> None:
    draft = Listed([b"<s>", b"</s>", b"a"], frozenset({0, 1}), bos_id=0, eos_id=1)
    target = Listed([b"a", b"<|end|>", b"<|begin|>"], frozenset({1, 2}), bos_id=2, eos_id=1)
    alignment = align(draft, target, 3, 3)
    assert alignment.to_target.tolist() == [2, 1, 0]
    assert alignment.to_draft.tolist() == [2, 1, 0]
    assert alignment.begins.tolist() == [2, 1, 0]


def test_spellings_of_bytes_do_not_matter() -> None:
    """A null byte is Ā for one and <0x00> for the other; a space is Ġ and ▁."""
    gpt, llama = kind("byte level"), kind("sentence piece")
    alignment = align(gpt, llama, gpt.vocab_size, llama.vocab_size)
    for draft, target, other in (("Ā", "<0x00>", ""), ("Ġ", "▁", "<0x20>"), ("Ċ", "\n", "<0x0A>")):
        draft_id, target_id = gpt.token_to_id(draft), llama.token_to_id(target)
        assert draft_id is not None
        assert alignment.to_target[draft_id] == target_id
        if other:
            assert alignment.to_draft[llama.token_to_id(other) or 0] == draft_id


def test_equal_vocabularies_are_recognised() -> None:
    gpt = kind("byte level")
    assert same_vocabulary(gpt, kind("byte level"))
    assert not same_vocabulary(gpt, kind("sentence piece"))
    assert not same_vocabulary(alphabets.shuffled(gpt)[0], gpt)
    more = alphabets.byte_level()
    more._core.add_special_tokens(["<extra>"])
    assert same_vocabulary(Tokenizer(more._core, 0, 1), gpt)  # one more control token makes no difference


def test_a_fast_tokenizer_of_transformers() -> None:
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
@examples(60)
def test_a_continuation_is_encoded_byte_for_byte(name: str, text: str) -> None:
    assert bytes_of(kind(name), encode_continuation(kind(name), text)) == text.encode()


PAIRS = [("byte level", "sentence piece"), ("sentence piece", "byte level"), ("byte level, spaced", "byte level")]


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@given(MIXED.map("".join), st.lists(st.integers(1, 9)))
@examples(60)
def test_a_growing_text_is_retokenised_byte_for_byte(draft: str, target: str, text: str, steps: list[int]) -> None:
    """In any pieces, and with an incomplete character at the end of a step."""
    p = pair(draft, target)
    ids = encode_continuation(p.target, "." + text)  # not the start of a text: nothing is stripped
    retokenised, mapped, at = RetokenisedText(p), MappedText(p), 0
    for step in [*steps, len(ids)]:
        at += step
        translated, direct = retokenised.update(ids[:at]), mapped.update(ids[:at])
        target_bytes = bytes_of(p.target, ids[:at])
        assert unprefixed(p, translated) + retokenised.incomplete == target_bytes
        assert len(direct) >= min(at, len(ids)) or not target_bytes
    if all(p.draft_id(i) != NONE for i in ids):
        assert unprefixed(p, direct) == bytes_of(p.target, ids)


def unprefixed(p: TokenizerPair, ids: list[int]) -> bytes:
    """A text's bytes without its BOS, and without the space that some tokenizers put before it."""
    spelled = bytes_of(p.draft, [i for i in ids if not p.draft.is_special(i)])
    return spelled[1:] if spelled[:1] == b" " else spelled


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@given(st.lists(st.sampled_from([*alphabets.PROSE, *alphabets.CODE]), min_size=4, max_size=12), st.integers(1, 40))
@examples(15)
def test_a_long_text_is_encoded_as_if_at_once_and_only_its_end_is_encoded_again(
    draft: str, target: str, lines: list[str], step: int
) -> None:
    p, text = pair(draft, target), "\n".join(lines) * 3
    spied = Spy(p.draft)
    own = TokenizerPair(spied, p.target, p.alignment)
    ids, retokenised = p.target.encode(text), RetokenisedText(own)
    for at in range(step, len(ids) + step, step):
        spied.longest = 0
        translated = retokenised.update(ids[:at])
        assert spied.longest <= 40 * (8 * TAIL + step)
        assert len(translated) - retokenised.settled <= 8 * TAIL + 9 * step
    opening = [p.draft.bos_id] if p.draft.add_bos else []
    assert translated == opening + p.draft.encode(text)


class Spy:
    """A tokenizer that records the longest text it encoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.longest = tokenizer, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, special: bool = False) -> list[int]:
        self.longest = max(self.longest, len(text))
        return self.tokenizer.encode(text, special)


@pytest.mark.parametrize(("draft", "target"), PAIRS)
@given(MIXED.map("".join), MIXED.map("".join), st.integers(0, 3))
@examples(60)
def test_a_draft_is_retokenised_byte_for_byte(draft: str, target: str, text: str, more: str, cut: int) -> None:
    p = pair(draft, target)
    assume(more)
    ids = encode_continuation(p.target, "." + text + more)
    ids = ids[: len(encode_continuation(p.target, "." + text))]  # may end within a character
    retokenised = RetokenisedText(p)
    retokenised.update(ids)
    overlap = retokenised.incomplete
    before = bytes_of(p.target, ids)
    drafted = ("." + text + more).encode()[len(before) - len(overlap) :]
    whole = drafted[: len(drafted) - cut] if cut < len(drafted) else drafted
    translated = bytes_of(p.target, p.to_target(ids, overlap, whole))
    complete = whole.decode("utf-8", "ignore").encode()
    assert overlap + translated == complete or (overlap and not translated)
    assert not overlap or p.to_target(ids, overlap, b"?" + whole) == []


def test_a_text_that_changes_is_translated_anew() -> None:
    p = pair("byte level", "sentence piece")
    one, two = p.target.encode("the quick brown fox"), p.target.encode("return a + b")
    for translation in (RetokenisedText(p), MappedText(p)):
        first = list(translation.update(one))
        assert translation.update(two) != first
        assert translation.update(one) == first


def test_control_tokens_are_no_text() -> None:
    """Those that both have correspond, the others are dropped; the text around them is not joined."""
    p = pair("sentence piece", "byte level")
    user, ids = p.target.token_to_id("<|user|>"), p.target.encode("def add")
    assert user is not None
    for translation in (RetokenisedText(p), MappedText(p)):
        translated = translation.update([p.target.bos_id or 0, *ids, user, *ids])
        assert translated[0] == p.draft.bos_id
        assert bytes_of(p.draft, translated[1:]).count(b"def add") == 2
        assert b"user" not in bytes_of(p.draft, translated)
    words = pair("words", "byte level")
    assert RetokenisedText(words).update(words.target.encode("the fox")) == [1, 3]
