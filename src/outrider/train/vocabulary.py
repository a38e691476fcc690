"""A reduced output vocabulary: the ids that the target says most often, and those that it must be able to say.

Promise: deterministic, ascending, and always with the ends of texts. It counts ids and knows no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .answers import Answer


@dataclass(frozen=True)
class Vocabulary:
    """A part of the target's ids."""

    ids: Tensor  # [draft_vocab] int64, ascending
    size: int  # of the target's vocabulary
    coverage: float  # share of the training answers' tokens that are in it
    held_coverage: float  # the same of the held-out answers'

    @property
    def d2t(self) -> Tensor:
        """[draft_vocab] target id - draft id"""
        return self.ids - torch.arange(len(self.ids))

    @property
    def t2d(self) -> Tensor:
        """[vocab] whether a target id is in it"""
        return torch.zeros(self.size, dtype=torch.bool).index_fill(0, self.ids, True)


def choose(answers: list[Answer], size: int, wanted: int, always: Iterable[int] = ()) -> Vocabulary:
    """The `wanted` most frequent of `size` ids (0: all of them): in answers first, then in prompts, then the lowest."""
    said = Counter(t for a in answers if not a.held for t in a.answer)
    asked = Counter(t for a in answers if not a.held for t in a.prompt)
    must = sorted({i for i in always if 0 <= i < size})
    ranked = sorted(set(range(size)) - set(must), key=lambda i: (-said[i], -asked[i], i))
    ids = sorted([*must, *ranked][: max(min(wanted or size, size), len(must))])
    held = Counter(t for a in answers if a.held for t in a.answer)
    return Vocabulary(torch.tensor(ids), size, _share(said, set(ids)), _share(held, set(ids)))


def _share(counts: Counter[int], ids: set[int]) -> float:
    total = sum(counts.values())
    return sum(n for i, n in counts.items() if i in ids) / total if total else 1.0
