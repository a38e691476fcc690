"""A draft vocabulary that follows the text: what a prompt or an answer uses and the head cannot propose, it learns.

A head scores some of the target's tokens: those that were frequent in what it was trained on. In another language, or
another code base, others are frequent, and each of them ends a draft. Here such a token takes the place of a rare one,
with the target's own output row: nothing is trained, and the next draft can propose it.

Promise: the number of draft ids stays the same; tokens that end a text are never replaced; a request with `learn=False`
changes nothing. It knows ids and rows, not what a head computes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from weakref import proxy

import torch
from torch import Tensor

from ...types import Sequence
from .network import Head

_SHARE, _MOST = 8, 2048  # at most one of eight draft ids, and at most so many, stand for learnt tokens
_PROMPT = 2048  # last tokens of a prompt that are looked at


class LearntVocabulary:
    """The draft ids of a head that stand for other tokens than it was trained with."""

    def __init__(self, head: Head, rows: Callable[[Tensor], Tensor], kept: Iterable[int]) -> None:
        """rows: the target's output rows of ids [n] -> [n, H]; kept: tokens that are never replaced."""
        self.head: Head = proxy(head)  # which refers to this object
        self.rows = rows
        ids: list[int] = head.ids.tolist()
        self.known = dict.fromkeys(ids)  # tokens that can be drafted
        most, protected = min(len(ids) // _SHARE, _MOST), set(kept)
        # Tokenizers number tokens by frequency, more or less: the highest ids are the rarest.
        rarest = sorted((i for i, token in enumerate(ids) if token not in protected), key=lambda i: -ids[i])
        self.free = rarest[:most][::-1]  # places that no learnt token has taken, the rarest last
        self.learnt: OrderedDict[int, int] = OrderedDict()  # token -> its place, least recently seen first
        self.followed: dict[int, int] = {}  # sequence -> its tokens that were looked at, where it is drafted for

    def begin(self, seq: Sequence) -> None:
        """A new request: its prompt's tokens are likely in its answer."""
        if seq.params.learn and seq.speculate:
            self.see(seq.tokens[-_PROMPT:])

    def follow(self, seq: Sequence) -> None:
        """A draft is wanted: look at what the target has emitted since the last one."""
        if seq.params.learn:
            self.see(seq.tokens[self.followed.get(seq.id, seq.prompt_len) :])
        self.followed[seq.id] = len(seq.tokens)

    def end(self, seq: Sequence) -> None:
        """The rest of an answer is for the others, unless nobody drafted here."""
        if seq.id in self.followed:
            self.follow(seq)
            del self.followed[seq.id]

    def see(self, tokens: Iterable[int]) -> None:
        """Tokens that occurred. Those outside the draft vocabulary replace the ones not seen for longest."""
        new: dict[int, int] = {}  # token -> place
        for token in dict.fromkeys(tokens):
            if token in self.learnt:
                self.learnt.move_to_end(token)
            elif token not in self.known and (self.free or len(self.learnt) > len(new)):
                new[token] = self._place(token)
        if new:
            ids, places = torch.tensor(list(new)), torch.tensor(list(new.values()))
            self.head.replace_ids(places, ids, self.rows(ids))

    def _place(self, token: int) -> int:
        """The draft id for a new token; the token that had it can no longer be drafted."""
        if self.free:
            place = self.free.pop()
            del self.known[int(self.head.ids[place])]
        else:
            oldest, place = self.learnt.popitem(last=False)
            del self.known[oldest]
        self.learnt[token] = place
        self.known[token] = None
        return place
