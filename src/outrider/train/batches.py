"""Answers as batches of a fixed token budget, and the draft vocabulary that is counted from them.

The n-th batch of a run depends on the seed alone, so a resumed run sees the same ones. Sequences of similar length
share a batch, so little is padded. This module knows ids and lengths, no model.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .answers import Answer

_MULTIPLE = 16  # padded lengths are multiples of this: fewer shapes to compile
_WINDOW = 64  # batches whose sequences are sorted by length together


@dataclass(frozen=True)
class Batch:
    """Sequences padded on the right. Head row p of a sequence reads token p+1 and predicts token p+2."""

    tokens: Tensor  # [B, n]
    lengths: Tensor  # [B] tokens that are not padding
    starts: Tensor  # [B] prompt tokens
    anchors: Tensor  # [B, A] head rows at which blocks begin
    rows: Tensor  # [M] head rows that predict a token of an answer, start-1 <= p <= length-3, as indices into [B, n-1]
    depth: Tensor  # [M] p - (start - 1)
    kinds: tuple[str, ...]  # [B]
    count: int  # tokens that are not padding
    sources: Tensor  # [B, S] what an encoder reads; S is 0 without an encoder
    source_lengths: Tensor  # [B]

    @property
    def next_tokens(self) -> Tensor:
        """[M] what the rows should predict: t_{p+2}."""
        return self.tokens[:, 1:].roll(-1, 1).flatten()[self.rows]

    def to(self, device: torch.device | str) -> Batch:
        names = ("tokens", "lengths", "starts", "anchors", "rows", "depth", "sources", "source_lengths")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})


class Batches:
    """An endless, reproducible stream of batches of at most `budget` tokens, padding included."""

    def __init__(self, answers: list[Answer], budget: int, longest: int, seed: int, anchors: int = 0) -> None:
        self.items = usable_answers(answers, min(longest, budget))
        self.budget, self.seed, self.anchors = budget, seed, anchors

    def after(self, steps: int) -> Iterator[Batch]:
        """The stream without its first `steps` batches."""
        groups = (group for epoch in itertools.count() for group in self._epoch(epoch))
        for step, group in enumerate(itertools.islice(groups, steps, None), steps):
            rng = random.Random(f"{self.seed}:anchors:{step}")
            yield collate([self.items[i] for i in group], self.anchors, rng)

    def _epoch(self, epoch: int) -> list[list[int]]:
        """Indices of the answers of each batch."""
        rng = random.Random(f"{self.seed}:{epoch}")
        order = list(range(len(self.items)))
        rng.shuffle(order)
        window = max(1, _WINDOW * self.budget // max(a.length for a in self.items))
        groups: list[list[int]] = []
        for start in range(0, len(order), window):
            by_length = sorted(order[start : start + window], key=lambda i: self.items[i].length)
            groups += pack([self.items[i].length for i in by_length], by_length, self.budget)
        rng.shuffle(groups)
        return groups


def held_out_batches(answers: list[Answer], budget: int, longest: int) -> list[Batch]:
    """The held-out answers in batches, always the same ones."""
    items = sorted(usable_answers((a for a in answers if a.held), min(longest, budget)), key=lambda a: a.length)
    groups = pack([a.length for a in items], list(range(len(items))), budget)
    return [collate([items[i] for i in group], 0, random.Random(0)) for group in groups]


def pack(lengths: list[int], indices: list[int], budget: int) -> list[list[int]]:
    """Neighbours together, as many as fit into the budget when padded to the longest of them."""
    groups: list[list[int]] = []
    width = 0
    for length, index in zip(lengths, indices, strict=True):
        width = max(width, _padded(length))
        if not groups or width * (len(groups[-1]) + 1) > budget:
            groups.append([])
            width = _padded(length)
        groups[-1].append(index)
    return groups


def collate(items: list[Answer], anchors: int, rng: random.Random) -> Batch:
    """One batch; anchors are drawn without replacement where there are enough rows.

    Behind an encoder all texts begin one place later, after a token that nothing reads: the first token of an answer is
    drafted too, and has a row.
    """
    later = int(bool(items[0].source))
    lengths = [a.length + later for a in items]
    width = _padded(max(lengths))
    tokens = torch.zeros(len(items), width, dtype=torch.long)
    for row, a in enumerate(items):
        tokens[row, later : later + a.length] = torch.tensor(a.tokens)
    ranges = [range(len(a.prompt) - 1, length - 2) for a, length in zip(items, lengths, strict=True)]
    drawn = [sorted(rng.sample(r, anchors) if len(r) >= anchors else rng.choices(r, k=anchors)) for r in ranges]
    sources = torch.zeros(len(items), _padded(max(len(a.source) for a in items)), dtype=torch.long)
    for row, a in enumerate(items):
        sources[row, : len(a.source)] = torch.tensor(a.source, dtype=torch.long)
    return Batch(
        tokens=tokens,
        lengths=torch.tensor(lengths),
        starts=torch.tensor([len(a.prompt) for a in items]),
        anchors=torch.tensor(drawn, dtype=torch.long).view(len(items), anchors),
        rows=torch.cat([torch.arange(r.start, r.stop) + b * (width - 1) for b, r in enumerate(ranges)]),
        depth=torch.cat([torch.arange(len(r)) for r in ranges]),
        kinds=tuple(a.kind for a in items),
        count=sum(lengths),
        sources=sources,
        source_lengths=torch.tensor([len(a.source) for a in items]),
    )


def usable_answers(answers: Iterable[Answer], longest: int) -> list[Answer]:
    """Answers cut to `longest` tokens with their prompt, without those that leave a head nothing to predict."""
    cut = [replace(a, answer=a.answer[: max(longest - len(a.prompt), 0)]) for a in answers]
    return [a for a in cut if len(a.prompt) >= 1 and len(a.answer) >= 2]


def _padded(length: int) -> int:
    return -(-length // _MULTIPLE) * _MULTIPLE


# ---------------------------------------------------------------- draft vocabulary


@dataclass(frozen=True)
class DraftVocabulary:
    """The target ids that a drafter can propose."""

    ids: Tensor  # [draft_vocab] int64, ascending
    coverage: float  # share of the training answers' tokens that are in it
    held_coverage: float  # the same of the held-out answers


def choose_vocabulary(answers: list[Answer], size: int, wanted: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """`wanted` of `size` ids (0: all): those in `always`, then the most frequent in answers, in prompts, the lowest."""
    in_answers = Counter(t for a in answers if not a.held for t in a.answer)
    in_prompts = Counter(t for a in answers if not a.held for t in a.prompt)
    required = sorted({i for i in always if 0 <= i < size})
    ranked = sorted(set(range(size)) - set(required), key=lambda i: (-in_answers[i], -in_prompts[i], i))
    ids = sorted([*required, *ranked][: max(min(wanted or size, size), len(required))])
    in_held = Counter(t for a in answers if a.held for t in a.answer)
    return DraftVocabulary(torch.tensor(ids), _share(in_answers, set(ids)), _share(in_held, set(ids)))


def _share(counts: Counter[int], ids: set[int]) -> float:
    total = sum(counts.values())
    return sum(n for i, n in counts.items() if i in ids) / total if total else 1.0
