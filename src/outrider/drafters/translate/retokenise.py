"""A text in another tokenizer's words: what was said so far for the draft model, what it drafts for the target.

Promise: `Speller.go_on` gives ids whose bytes are exactly the text's, wherever the tokenizer can spell it at all.
`Retold` holds the ids that a tokenizer gives for a text that grows, and looks back only as far as new text can change
old words: its work for a step does not grow with the text. What it gets wrong costs a draft; the text is never its own.

It knows ids and bytes; it knows neither models nor caches.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Listing

from .alignment import NONE, Dictionary, Words, bytes_of

KEPT = 24  # words at the end that are spelled again at each step: what follows may join them
MARKS = ("\n", ".", "a")  # what may stand before a text, so that a tokenizer does not take it for a beginning
LOOK_BACK = 4  # target tokens that a draft is spelled together with


class Speller:
    """A tokenizer that can go on in the middle of a text."""

    def __init__(self, words: Words) -> None:
        self.words = words

    def go_on(self, text: str) -> list[int]:
        """Ids of a text that follows another one: no space is put before it, and none is lost."""
        plain = self.words.encode(text)
        if not text or bytes_of(self.words, plain) == text.encode():
            return plain
        return next((ids for mark in MARKS if (ids := self._after(mark, text)) is not None), plain)

    def _after(self, mark: str, text: str) -> list[int] | None:
        """Ids of the text after a mark that is cut off again; None where the two cannot be told apart."""
        ids = self.words.encode(mark + text)
        wanted, rest = text.encode(), len(bytes_of(self.words, ids)) - len(text.encode())
        size = 0
        for place, i in enumerate(ids):
            if size == rest:
                return ids[place:] if bytes_of(self.words, ids[place:]) == wanted else None
            size += len(self.words.id_to_bytes(i))
        return None


class Mapped:
    """What was said, token by token: each as the draft token of the same bytes, the others spelled out."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.read: list[int] = []  # target tokens
        self.ids: list[int] = []  # draft ids

    def hear(self, tokens: list[int]) -> list[int]:
        """Draft ids of all of these target tokens."""
        if self.read != tokens[: len(self.read)]:
            self.read, self.ids = [], []
        new = tokens[len(self.read) :]
        if not self.read:
            self.ids = self.pair.opening(new)
        for token in new:
            known = self.pair.draft_id(token)
            self.ids += [known] if known != NONE else self.pair.alone(token)
        self.read = list(tokens)
        return self.ids


class Retold:
    """What was said, as the draft model's tokenizer would spell it."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._restart()

    def _restart(self) -> None:
        self.read: list[int] = []  # target tokens
        self.ids: list[int] = []  # draft ids; those before `settled` stay as they are
        self.settled = 0
        self.tail = ""  # the text of those from there on
        self.begins = True  # the tail is where the text begins
        self.strip = getattr(self.pair.target, "strip", 0)  # spaces at the beginning that are not the text's own
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def half(self) -> bytes:
        """The bytes of a character that is not complete yet: no text can stand for them."""
        return self.utf8.getstate()[0]

    def hear(self, tokens: list[int]) -> list[int]:
        """Draft ids of all of these target tokens, but for half a character at the end."""
        if self.read != tokens[: len(self.read)]:
            self._restart()
        new = tokens[len(self.read) :]
        if not self.read:
            self.ids = self.pair.opening(new)
            self.settled = len(self.ids)
        run: list[int] = []
        for token in new:
            if self.pair.target.is_special(token):
                self._write(run, final=True)
                run = []
                self._control(token)
            else:
                run.append(token)
        self._write(run)
        self._settle()
        self.read = list(tokens)
        return self.ids

    def _control(self, token: int) -> None:
        """A control token is no text: its like, if there is one, and the words before it are settled."""
        known = self.pair.draft_id(token)
        self.ids += [known] if known != NONE else []
        self.settled, self.tail = len(self.ids), ""
        self.begins = self.begins and len(self.ids) <= 1  # after the token that begins every text

    def _write(self, run: list[int], final: bool = False) -> None:
        text = self.utf8.decode(bytes_of(self.pair.target, run), final)
        while self.strip and text:
            text, self.strip = (text[1:], self.strip - 1) if text[0] == " " else (text, 0)
        if text:
            self.tail += text
            self.ids[self.settled :] = self._spell(self.tail)

    def _spell(self, text: str) -> list[int]:
        return self.pair.fitting(self.pair.draft.encode(text) if self.begins else self.pair.speller.go_on(text))

    def _settle(self) -> None:
        """Leave all but the last words alone, where those are spelled without the others as they are with them."""
        long = len(self.ids) - self.settled
        if long <= 2 * KEPT:
            return
        whole = self.tail.encode()
        for kept in range(KEPT, 2 * KEPT):
            size = len(bytes_of(self.pair.draft, self.ids[-kept:]))
            try:
                tail = whole[max(len(whole) - size, 0) :].decode()
            except UnicodeDecodeError:
                continue
            if long > 8 * KEPT or self.pair.speller.go_on(tail) == self.ids[-kept:]:
                self.tail, self.settled, self.begins = tail, len(self.ids) - kept, False
                return


class Pair:
    """Two tokenizers with their dictionary: everything that contexts and drafts ask them for."""

    def __init__(self, draft: Words, target: Words, known: Dictionary) -> None:
        self.draft, self.target, self.known = draft, target, known
        self.speller, self.target_speller = Speller(draft), Speller(target)
        self._draft_ids: list[int] = known.to_draft.tolist()
        self._size = len(known.to_target)
        self._alone: dict[int, list[int]] = {}

    def draft_id(self, token: int) -> int:
        return self._draft_ids[token] if 0 <= token < len(self._draft_ids) else NONE

    def alone(self, token: int) -> list[int]:
        """A target token that the draft model does not have, in its own words; none for a control token."""
        known = self._alone.get(token)
        if known is None:
            silent = self.target.is_special(token)
            text = "" if silent else self.target.id_to_bytes(token).decode("utf-8", "replace")
            known = self._alone[token] = self.fitting(self.speller.go_on(text))
        return known

    def opening(self, tokens: list[int]) -> list[int]:
        """What the draft model's texts begin with, where the target's do not say so themselves."""
        bos = self.draft.bos_id
        says_so = bool(tokens) and self.draft_id(tokens[0]) == bos
        return [bos] if bos is not None and self.draft.add_bos and not says_so else []

    def fitting(self, ids: list[int]) -> list[int]:
        """Without ids that the draft model has no row for."""
        return [i for i in ids if i < self._size]

    def in_target(self, said: list[int], half: bytes, drafted: bytes) -> list[int]:
        """Target ids that spell what was drafted after `said`; `half` is said already, and drafted once more."""
        if not drafted.startswith(half):
            return []
        text = codecs.getincrementaldecoder("utf-8")("ignore").decode(drafted)  # half a character at the end is left
        before, said_text = self._before(said, half)
        if before and text:
            ids = self.target_speller.go_on(said_text + text)
            if ids[: len(before)] == before:
                return ids[len(before) :]
        try:
            return self.target_speller.go_on(codecs.getincrementaldecoder("utf-8")().decode(drafted[len(half) :]))
        except UnicodeDecodeError:  # the rest of a character is no text
            return []

    def _before(self, said: list[int], half: bytes) -> tuple[list[int], str]:
        """The last few target tokens and their text, but for what is drafted once more."""
        for count in range(LOOK_BACK, 2 * LOOK_BACK):
            before = said[-count:]
            if len(before) < count or any(map(self.target.is_special, before)):
                break
            text = bytes_of(self.target, before)
            try:
                if text.endswith(half):
                    return before, text[: len(text) - len(half)].decode()
            except UnicodeDecodeError:
                continue  # they begin within a character
        return [], ""


def ends_of(words: Words, ids: Listing[int], skip: int = 0) -> list[int]:
    """Where each token's bytes end, counted from `skip`."""
    ends, at = [], skip
    for i in ids:
        at += len(words.id_to_bytes(i))
        ends.append(at)
    return ends
