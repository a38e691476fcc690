"""Answers into batches of a fixed token budget, in an order that a seed fixes.

Promise: the n-th batch of a run is the same whether or not the run was interrupted before it. Sequences of about the
same length share a batch, so little is padded. It knows ids and lengths, no model.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .answers import Answer

_ROUND = 16  # padded lengths are multiples of this: fewer shapes for compiled steps
_WINDOW = 64  # batches whose sequences are sorted by length together


@dataclass(frozen=True)
class Batch:
    """Some sequences, padded on the right."""

    tokens: Tensor  # [B, n]
    lengths: Tensor  # [B] tokens that are not padding
    starts: Tensor  # [B] how many of them are the prompt
    anchors: Tensor  # [B, A] head rows at which blocks begin
    rows: Tensor  # [M] the head rows p, as places in [B, n-1], that predict an answer's token: start-1 <= p <= length-3
    depth: Tensor  # [M] p - (start - 1)
    kinds: tuple[str, ...]  # [B]
    count: int  # tokens that are not padding

    def to(self, device: torch.device | str) -> Batch:
        names = ("tokens", "lengths", "starts", "anchors", "rows", "depth")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


class Batches:
    """An endless, reproducible stream of batches."""

    def __init__(self, answers: list[Answer], budget: int, longest: int, seed: int, anchors: int = 0) -> None:
        self.items = [cut(a, min(longest, budget)) for a in answers]
        self.items = [a for a in self.items if usable(a)]
        self.budget, self.seed, self.anchors = budget, seed, anchors

    def __iter__(self) -> Iterator[Batch]:
        return self.after(0)

    def after(self, steps: int) -> Iterator[Batch]:
        """The stream without its first `steps` batches."""
        every = (group for epoch in itertools.count() for group in self._epoch(epoch))
        for step, group in enumerate(itertools.islice(every, steps, None), steps):
            rng = random.Random(f"{self.seed}:anchors:{step}")
            yield collate([self.items[i] for i in group], self.anchors, rng)

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Indices of each batch."""
        rng = random.Random(f"{self.seed}:{epoch}")
        order = list(range(len(self.items)))
        rng.shuffle(order)
        longest = max(a.length for a in self.items)
        window = max(1, _WINDOW * self.budget // longest)
        groups: list[list[int]] = []
        for at in range(0, len(order), window):
            near = sorted(order[at : at + window], key=lambda i: self.items[i].length)
            groups += pack([self.items[i].length for i in near], near, self.budget)
        rng.shuffle(groups)
        return groups


def pack(lengths: list[int], names: list[int], budget: int) -> list[list[int]]:
    """Neighbours together, as many as fit into the budget when padded to the longest of them."""
    groups: list[list[int]] = []
    widest = 0
    for length, name in zip(lengths, names, strict=True):
        widest = max(widest, padded(length))
        if not groups or widest * (len(groups[-1]) + 1) > budget:
            groups.append([])
            widest = padded(length)
        groups[-1].append(name)
    return groups


def collate(items: list[Answer], anchors: int, rng: random.Random) -> Batch:
    """One batch; anchors are drawn without replacement as far as there are enough places."""
    width = padded(max(a.length for a in items))
    tokens = torch.zeros(len(items), width, dtype=torch.long)
    for row, a in enumerate(items):
        tokens[row, : a.length] = torch.tensor(a.tokens)
    places = [range(len(a.prompt) - 1, a.length - 2) for a in items]
    drawn = [sorted(rng.sample(p, anchors) if len(p) >= anchors else rng.choices(p, k=anchors)) for p in places]
    lengths, starts = [a.length for a in items], [len(a.prompt) for a in items]
    spots = torch.tensor(drawn, dtype=torch.long).view(len(items), anchors)
    rows = torch.cat([torch.arange(p.start, p.stop) + b * (width - 1) for b, p in enumerate(places)])
    depth = torch.cat([torch.arange(len(p)) for p in places])
    kinds = tuple(a.kind for a in items)
    return Batch(
        tokens, torch.tensor(lengths), torch.tensor(starts), spots, rows, depth, kinds=kinds, count=sum(lengths)
    )


def cut(answer: Answer, longest: int) -> Answer:
    """The beginning of an answer that is too long; what remains is still what the target said."""
    room = max(longest - len(answer.prompt), 0)
    if room >= len(answer.answer):
        return answer
    return Answer(**{**vars(answer), "answer": answer.answer[:room]})


def usable(answer: Answer) -> bool:
    """Whether a head has anything to predict in it: two tokens of the answer, after one of the prompt."""
    return len(answer.prompt) >= 1 and len(answer.answer) >= 2


def padded(length: int) -> int:
    return -(-length // _ROUND) * _ROUND
