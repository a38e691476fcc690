"""Two tokenizers: which ids of one stand for which ids of the other, and a growing text in the other's ids.

*Alignment* compares tokens by the bytes that they add to a text, so spellings (`Ġ`, `▁`, `<0x0A>`) do not matter.
Control tokens are compared among themselves, by name; BOS and EOS always correspond. Ids without a row in the model,
and rows without a token (padding), are in no map.

*Retokenising* gives ids whose bytes are exactly the text's, wherever the tokenizer can encode it at all. It re-encodes
only the end of a growing text, so its work per step does not grow with the text. An error costs a draft, never text.

It knows ids and bytes; it knows neither models nor caches.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence as Listing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...models.tokenizer import Tokenizer

NONE = -1  # no such id
TAIL = 24  # tokens at the end that are encoded again in each step, because new text may merge with them
MARKS = ("\n", ".", "a")  # put before a text so that the tokenizer does not encode it as the start of a text
LOOK_BACK = 4  # target tokens that a draft is encoded together with


def bytes_of(tokenizer: Tokenizer, ids: Iterable[int]) -> bytes:
    """The bytes that these ids add to a text."""
    return b"".join(tokenizer.id_to_bytes(i) for i in ids)


def byte_ends(tokenizer: Tokenizer, ids: Listing[int], skip: int = 0) -> list[int]:
    """Where each token's bytes end, counted from `skip`."""
    ends, at = [], skip
    for i in ids:
        at += len(tokenizer.id_to_bytes(i))
        ends.append(at)
    return ends


def tokenizer_of(tokenizer: Any) -> Any:
    """A tokenizer from a path, or from a fast tokenizer of transformers; any other is returned unchanged."""
    if isinstance(tokenizer, str) or hasattr(tokenizer, "__fspath__"):
        from ...models.checkpoint import open_checkpoint

        return open_checkpoint(tokenizer).tokenizer
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is None:
        return tokenizer
    from ...models.tokenizer import Tokenizer

    return Tokenizer(core, tokenizer.bos_token_id, tokenizer.eos_token_id)


def same_vocabulary(draft: Tokenizer, target: Tokenizer) -> bool:
    """Whether ids mean the same on both sides, control tokens aside: a wrong one of these only costs a draft."""
    first, second = draft.vocabulary, target.vocabulary
    return first == second or _ordinary(draft, first) == _ordinary(target, second)


def _ordinary(tokenizer: Tokenizer, vocabulary: dict[str, int]) -> dict[str, int]:
    return {piece: i for piece, i in vocabulary.items() if not tokenizer.is_special(i)}


# ------------------------------------------------------------ vocabulary alignment


@dataclass(frozen=True)
class Alignment:
    """A draft model's ids as the target's, and back."""

    to_target: Tensor  # [D] the target id of each draft id; NONE where the target has no such token
    to_draft: Tensor  # [V] the draft id of each target id
    begins: Tensor  # [D] the longest target token that a draft token begins with, which may be the whole of it
    longer: Extensions  # draft tokens that the target lacks, by their first bytes
    shared: int  # tokens that both have
    target_share: float  # of the target's tokens
    draft_share: float  # of the draft model's

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Draft ids and their target ids, [shared] each, no id twice."""
        drafts = torch.nonzero(self.to_target != NONE).flatten()
        return drafts, self.to_target[drafts]


Token = tuple[bool, bytes]  # whether it is a control token, and its bytes


def align(draft: Tokenizer, target: Tokenizer, draft_size: int, target_size: int) -> Alignment:
    """draft_size, target_size: how many ids each model has an embedding for."""
    draft_ids, target_ids = _ids_by_token(draft, draft_size), _ids_by_token(target, target_size)
    to_target, to_draft = [NONE] * draft_size, [NONE] * target_size
    for token, ids in draft_ids.items():
        for i, target_id in enumerate(target_ids.get(token, ())):
            if not i:
                to_target[ids[0]] = target_id  # the usual spelling of each
            to_draft[target_id] = ids[0]
    _align_ends(draft, target, to_target, to_draft)
    shared = draft_size - to_target.count(NONE)
    target_texts = {token[1]: ids[0] for token, ids in target_ids.items() if not token[0]}
    begins = list(to_target)
    for (special, spelled), ids in draft_ids.items():
        if not special:
            prefix = _longest_prefix(target_texts, spelled)
            for i in ids:
                begins[i] = prefix
    draft_only = [(token[1], ids[0]) for token, ids in draft_ids.items() if not token[0] and to_target[ids[0]] == NONE]
    return Alignment(
        to_target=torch.tensor(to_target, dtype=torch.long),
        to_draft=torch.tensor(to_draft, dtype=torch.long),
        begins=torch.tensor(begins, dtype=torch.long),
        longer=Extensions(draft_only, target_texts),
        shared=shared,
        target_share=shared / max(len(target_ids), 1),
        draft_share=shared / max(len(draft_ids), 1),
    )


def _ids_by_token(tokenizer: Tokenizer, size: int) -> dict[Token, list[int]]:
    """Every token that a model has a row for: ids of the same bytes together, the usual spelling first."""
    ids: dict[Token, list[int]] = {}
    # SentencePiece spells what it has no token for as single bytes <0x..>: never the usual spelling.
    pieces = sorted(
        tokenizer.vocabulary.items(),
        key=lambda item: (len(item[0]) == 6 and item[0].startswith("<0x") and item[0].endswith(">"), item[1]),
    )
    for _, i in pieces:
        spelled = tokenizer.id_to_bytes(i)
        if spelled and 0 <= i < size:
            ids.setdefault((tokenizer.is_special(i), spelled), []).append(i)
    return ids


def _align_ends(draft: Tokenizer, target: Tokenizer, to_target: list[int], to_draft: list[int]) -> None:
    """Align EOS with EOS and BOS with BOS, whatever their names."""
    for draft_id, target_id in ((draft.eos_id, target.eos_id), (draft.bos_id, target.bos_id)):
        if draft_id is None or target_id is None or draft_id >= len(to_target) or target_id >= len(to_draft):
            continue
        if to_target[draft_id] == NONE and target_id not in to_target:
            to_target[draft_id] = target_id
        if to_draft[target_id] == NONE:
            to_draft[target_id] = draft_id


def _longest_prefix(texts: dict[bytes, int], spelled: bytes) -> int:
    """The id of the longest token that these bytes begin with."""
    return next((texts[spelled[:n]] for n in range(len(spelled), 0, -1) if spelled[:n] in texts), NONE)


class Extensions:
    """Draft tokens that begin with another draft token and that the target has no token for.

    A text may end within what the draft model has as one token (a line break and the indent after it). Then no token is
    likely after the shorter one, because the two never occur apart. The longer tokens are found here.
    """

    def __init__(self, draft_only: list[tuple[bytes, int]], target_texts: dict[bytes, int]) -> None:
        self._sorted, self._target_texts = sorted(draft_only), target_texts
        self._cached: dict[bytes, tuple[Tensor, Tensor]] = {b"": (torch.zeros(0).long(), torch.zeros(0).long())}

    def of(self, begin: bytes) -> tuple[Tensor, Tensor]:
        """Longer draft ids [E] that begin so, and the target token [E] that the rest of each begins with."""
        if begin not in self._cached:
            extensions = []
            for at in range(bisect_right(self._sorted, (begin, len(self._sorted))), len(self._sorted)):
                spelled, i = self._sorted[at]
                if not spelled.startswith(begin):
                    break
                if (rest := _longest_prefix(self._target_texts, spelled[len(begin) :])) != NONE:
                    extensions.append((i, rest))
            pairs = torch.tensor(extensions, dtype=torch.long).view(-1, 2)  # [E, 2]
            self._cached[begin] = (pairs[:, 0], pairs[:, 1])
        return self._cached[begin]


# ------------------------------------------------------------ retokenising


class TokenizerPair:
    """Two tokenizers and their alignment."""

    def __init__(self, draft: Tokenizer, target: Tokenizer, alignment: Alignment) -> None:
        self.draft, self.target, self.alignment = draft, target, alignment
        self.draft_size = len(alignment.to_target)
        self._draft_ids: list[int] = alignment.to_draft.tolist()
        self._encoded: dict[int, list[int]] = {}

    def draft_id(self, token: int) -> int:
        return self._draft_ids[token] if 0 <= token < len(self._draft_ids) else NONE

    def encoded(self, token: int) -> list[int]:
        """A target token that the draft model lacks, in draft ids; none for a control token."""
        if token not in self._encoded:
            special = self.target.is_special(token)
            text = "" if special else self.target.id_to_bytes(token).decode("utf-8", "replace")
            self._encoded[token] = self.in_model(encode_continuation(self.draft, text))
        return self._encoded[token]

    def opening(self, tokens: list[int]) -> list[int]:
        """The draft model's BOS, if its texts begin with one and these target tokens do not."""
        bos = self.draft.bos_id
        present = bool(tokens) and self.draft_id(tokens[0]) == bos
        return [bos] if bos is not None and self.draft.add_bos and not present else []

    def in_model(self, ids: list[int]) -> list[int]:
        """Without ids that the draft model has no row for."""
        return [i for i in ids if i < self.draft_size]

    def to_target(self, tokens: list[int], overlap: bytes, drafted: bytes) -> list[int]:
        """Target ids of drafted bytes after these target tokens; `drafted` repeats the last bytes, `overlap`."""
        if not drafted.startswith(overlap):
            return []
        text = codecs.getincrementaldecoder("utf-8")("ignore").decode(drafted)  # drops half a character at the end
        last, last_text = self._last_tokens(tokens, overlap)
        if last and text:
            ids = encode_continuation(self.target, last_text + text)
            if ids[: len(last)] == last:
                return ids[len(last) :]
        try:
            rest = codecs.getincrementaldecoder("utf-8")().decode(drafted[len(overlap) :])
        except UnicodeDecodeError:  # it begins within a character
            return []
        return encode_continuation(self.target, rest)

    def _last_tokens(self, tokens: list[int], overlap: bytes) -> tuple[list[int], str]:
        """The last few target tokens, and their text without the overlap."""
        for count in range(LOOK_BACK, 2 * LOOK_BACK):
            last = tokens[-count:]
            if len(last) < count or any(map(self.target.is_special, last)):
                break
            text = bytes_of(self.target, last)
            try:
                if text.endswith(overlap):
                    return last, text[: len(text) - len(overlap)].decode()
            except UnicodeDecodeError:
                continue  # they begin within a character
        return [], ""


def encode_continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that follows another one: no space is put before it, and none is lost."""
    plain, wanted = tokenizer.encode(text), text.encode()
    if not text or bytes_of(tokenizer, plain) == wanted:
        return plain
    for mark in MARKS:
        ids = tokenizer.encode(mark + text)
        before = len(bytes_of(tokenizer, ids)) - len(wanted)  # bytes of the mark
        cut = [0, *byte_ends(tokenizer, ids)][: len(ids)]  # where each token begins
        if before in cut and bytes_of(tokenizer, rest := ids[cut.index(before) :]) == wanted:
            return rest
    return plain


class Translation(ABC):
    """A growing text of target tokens in draft ids."""

    def __init__(self, pair: TokenizerPair) -> None:
        self.pair = pair
        self.tokens: list[int] = []  # the target's
        self.ids: list[int] = []  # the draft model's

    def update(self, tokens: list[int]) -> list[int]:
        """Draft ids of all of these target tokens."""
        restart = not self.tokens or self.tokens != tokens[: len(self.tokens)]
        new = tokens if restart else tokens[len(self.tokens) :]
        if restart:
            self._restart(self.pair.opening(new))
        self._extend(new)
        self.tokens = list(tokens)
        return self.ids

    def _restart(self, opening: list[int]) -> None:
        self.ids = opening

    @abstractmethod
    def _extend(self, new: list[int]) -> None: ...


class MappedText(Translation):
    """Token by token: each target token as the draft token of the same bytes, or else encoded."""

    def _extend(self, new: list[int]) -> None:
        for token in new:
            draft_id = self.pair.draft_id(token)
            self.ids += [draft_id] if draft_id != NONE else self.pair.encoded(token)


class RetokenisedText(Translation):
    """As the draft model's tokenizer encodes the text, without an incomplete character at the end."""

    def _restart(self, opening: list[int]) -> None:
        self.ids, self.settled = opening, len(opening)  # ids before `settled` are final
        self.tail = ""  # the text of ids[settled:]
        self.at_start = True  # the tail is the start of the text
        self.strip = getattr(self.pair.target, "strip", 0)  # leading spaces that the target's tokenizer has added
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def incomplete(self) -> bytes:
        """The first bytes of a character that is not complete yet."""
        return self.utf8.getstate()[0]

    def _extend(self, new: list[int]) -> None:
        run: list[int] = []
        for token in new:
            if not self.pair.target.is_special(token):
                run.append(token)
                continue
            self._encode(run, final=True)
            run = []
            draft_id = self.pair.draft_id(token)
            self.ids += [draft_id] if draft_id != NONE else []
            self.settled, self.tail = len(self.ids), ""
            self.at_start = self.at_start and len(self.ids) <= 1  # after BOS the text starts
        self._encode(run)
        self._settle()

    def _encode(self, run: list[int], final: bool = False) -> None:
        text = self.utf8.decode(bytes_of(self.pair.target, run), final)
        while self.strip and text:
            text, self.strip = (text[1:], self.strip - 1) if text[0] == " " else (text, 0)
        if text:
            self.tail += text
            draft = self.pair.draft
            ids = draft.encode(self.tail) if self.at_start else encode_continuation(draft, self.tail)
            self.ids[self.settled :] = self.pair.in_model(ids)

    def _settle(self) -> None:
        """Make all but the last tokens final, where those are encoded alone as they are with the others."""
        open_ids = len(self.ids) - self.settled
        if open_ids <= 2 * TAIL:
            return
        whole = self.tail.encode()
        for kept in range(TAIL, 2 * TAIL):
            size = len(bytes_of(self.pair.draft, self.ids[-kept:]))
            try:
                tail = whole[max(len(whole) - size, 0) :].decode()
            except UnicodeDecodeError:
                continue
            if open_ids > 8 * TAIL or encode_continuation(self.pair.draft, tail) == self.ids[-kept:]:
                self.tail, self.settled, self.at_start = tail, len(self.ids) - kept, False
                return
