"""Two tokenizers side by side: which ids of one stand for which ids of the other.

Tokens are compared by the bytes that they add to a text, so that spellings (`Ġ`, `▁`, `<0x0A>`) do not matter. Control
tokens are compared among themselves, by name; those that begin and end a text are each other's in any case. Ids that a
model has no row for, and rows that no token belongs to (padding), are in no map.

It knows vocabularies; it knows neither models nor the text that is being written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

NONE = -1  # where there is no such id


class Words(Protocol):
    """What a tokenizer must be able to do here (`models.tokenizer.Tokenizer` can)."""

    bos_id: int | None
    eos_id: int | None
    add_bos: bool

    @property
    def vocabulary(self) -> dict[str, int]: ...

    def encode(self, text: str, special: bool = False) -> list[int]: ...

    def id_to_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


@dataclass(frozen=True)
class Dictionary:
    """A draft model's ids in the target's, and back."""

    to_target: Tensor  # [D] the target's id for each draft id; NONE where it has no such token
    to_draft: Tensor  # [V] the draft id for each of the target's
    begins: Tensor  # [D] the longest target token that a draft token begins with: itself, where there is such a one
    longer: Extensions  # draft tokens that the target lacks, by how they begin
    shared: int  # tokens that both have
    target_share: float  # of the target's tokens
    draft_share: float  # of the draft model's

    @property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """Draft ids and their target ids, [shared] each, no id twice."""
        drafts = torch.nonzero(self.to_target != NONE).flatten()
        return drafts, self.to_target[drafts]


def same_words(draft: Words, target: Words) -> bool:
    """Whether ids mean the same on both sides, but perhaps for control tokens: a wrong one of these costs a draft."""
    a, b = draft.vocabulary, target.vocabulary
    if a == b:
        return True
    return _ordinary(draft, a) == _ordinary(target, b)


def _ordinary(words: Words, vocabulary: dict[str, int]) -> dict[str, int]:
    return {piece: i for piece, i in vocabulary.items() if not words.is_special(i)}


def dictionary(draft: Words, target: Words, draft_size: int, target_size: int) -> Dictionary:
    """The sizes are the models': how many ids each has an embedding for."""
    ours, theirs = _by_bytes(draft, draft_size), _by_bytes(target, target_size)
    to_target, to_draft = [NONE] * draft_size, [NONE] * target_size
    for name, ids in ours.items():
        for place, its in enumerate(theirs.get(name, ())):
            if not place:
                to_target[ids[0]] = its  # the usual spelling of each
            to_draft[its] = ids[0]
    _join_ends(draft, target, to_target, to_draft)
    shared = draft_size - to_target.count(NONE)
    texts = {name[1]: ids[0] for name, ids in theirs.items() if not name[0]}
    begins = _beginnings(ours, texts, to_target)
    lonely = [(name[1], ids[0]) for name, ids in ours.items() if not name[0] and to_target[ids[0]] == NONE]
    return Dictionary(
        to_target=torch.tensor(to_target, dtype=torch.long),
        to_draft=torch.tensor(to_draft, dtype=torch.long),
        begins=torch.tensor(begins, dtype=torch.long),
        longer=Extensions(lonely, texts),
        shared=shared,
        target_share=shared / max(len(theirs), 1),
        draft_share=shared / max(len(ours), 1),
    )


Name = tuple[bool, bytes]  # whether it is a control token, and its bytes


def _by_bytes(words: Words, size: int) -> dict[Name, list[int]]:
    """Every token that a model has a row for: ids of the same bytes together, the usual spelling first."""
    found: dict[Name, list[int]] = {}
    pieces = sorted(words.vocabulary.items(), key=lambda item: (_is_byte(item[0]), item[1]))
    for _, i in pieces:
        spelled = words.id_to_bytes(i)
        if spelled and 0 <= i < size:
            found.setdefault((words.is_special(i), spelled), []).append(i)
    return found


def _is_byte(piece: str) -> bool:
    """A byte of its own is how SentencePiece spells what it has no token for: never the usual spelling."""
    return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")


def _join_ends(draft: Words, target: Words, to_target: list[int], to_draft: list[int]) -> None:
    """The tokens that begin and end a text, whatever they are called."""
    for ours, theirs in ((draft.eos_id, target.eos_id), (draft.bos_id, target.bos_id)):
        if ours is None or theirs is None or ours >= len(to_target) or theirs >= len(to_draft):
            continue
        if to_target[ours] == NONE and theirs not in to_target:
            to_target[ours] = theirs
        if to_draft[theirs] == NONE:
            to_draft[theirs] = ours


class Extensions:
    """Draft tokens that go on where another one ends, and that the target has no token for.

    A text may end within what the draft model knows as one token (a line's end and the indent after it). Then its next
    token is not likely after the shorter one: it never saw them apart. What it would have said instead is found here.
    """

    def __init__(self, lonely: list[tuple[bytes, int]], theirs: dict[bytes, int]) -> None:
        self._sorted, self._theirs = sorted(lonely), theirs
        self._found: dict[bytes, tuple[Tensor, Tensor]] = {}

    def of(self, begin: bytes) -> tuple[Tensor, Tensor]:
        """Draft ids [E] that begin so and are longer, and the target token [E] that the rest of each begins with."""
        if begin not in self._found:
            if not begin:
                return torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)
            at = bisect_right(self._sorted, (begin, len(self._sorted)))
            found = []
            while at < len(self._sorted) and self._sorted[at][0].startswith(begin):
                spelled, i = self._sorted[at]
                if len(spelled) > len(begin) and (rest := _longest(self._theirs, spelled[len(begin) :])) != NONE:
                    found.append((i, rest))
                at += 1
            pairs = torch.tensor(found, dtype=torch.long).view(-1, 2)  # [E, 2]
            self._found[begin] = (pairs[:, 0], pairs[:, 1])
        return self._found[begin]


def _longest(theirs: dict[bytes, int], spelled: bytes) -> int:
    """The longest token that these bytes begin with."""
    sizes = range(len(spelled), 0, -1)
    return next((theirs[spelled[:n]] for n in sizes if spelled[:n] in theirs), NONE)


def _beginnings(ours: dict[Name, list[int]], theirs: dict[bytes, int], to_target: list[int]) -> list[int]:
    """[D] the longest target token that each draft token begins with. What is shared stands for itself."""
    begins = list(to_target)
    for (special, spelled), ids in ours.items():
        longest = NONE if special else _longest(theirs, spelled)
        for i in () if special else ids:
            begins[i] = longest
    return begins


def tokenizer_of(given: Any) -> Any:
    """A tokenizer as it is, out of a file, or out of transformers' fast ones."""
    if isinstance(given, str) or hasattr(given, "__fspath__"):
        from ...models.checkpoint import open_checkpoint

        return open_checkpoint(given).tokenizer
    core = getattr(given, "backend_tokenizer", None)
    if core is None:
        return given
    from ...models.tokenizer import Tokenizer

    return Tokenizer(core, given.bos_token_id, given.eos_token_id)


def bytes_of(words: Words, ids: Iterable[int]) -> bytes:
    """The bytes that these ids add to a text."""
    return b"".join(words.id_to_bytes(i) for i in ids)
