"""What was verified lately, in a ring of fixed size on the target's device.

Promise: it never holds more than `capacity` nodes, the oldest go first, and nothing in it can be turned back into a
text: no record knows its neighbours, its sequence or its request (docs/learning.md). It knows no losses.

    C capacity   H hidden size   W words of the target's distribution that are kept
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TOP = 64  # W: nearly all of the probability nearly always
_BLOCK = 32  # scores of which only the highest is looked at first


class Records(NamedTuple):
    """Verified nodes."""

    state: Tensor  # [n, H] what the drafter knew
    beside: Tensor  # [n] the token it went on from
    drafted: Tensor  # [n] target id that it drafted; -1 where it was not asked
    accepted: Tensor  # [n] bool
    words: Tensor  # [n, W] the target's likeliest ids there
    logits: Tensor  # [n, W] and their logits

    def part(self, rows: Tensor | slice) -> Records:
        return Records(*(field[rows] for field in self))


class Seen(NamedTuple):
    """Verified nodes of one step as they come, before anybody has time for them."""

    states: list[Tensor]  # n of [H]
    beside: list[int]
    drafted: list[int]
    accepted: list[bool]
    logits: Tensor  # [n, V] the target's, for each of them

    def __len__(self) -> int:
        return len(self.states)


def digested(seen: list[Seen], top: int) -> Records:
    """Several steps' nodes as records: together, because each operation costs more than its work."""
    logits = seen[0].logits if len(seen) == 1 else torch.cat([each.logits for each in seen])
    words, values = likeliest(logits, top)
    return Records(
        torch.stack([state for each in seen for state in each.states]),
        torch.tensor([token for each in seen for token in each.beside]),
        torch.tensor([token for each in seen for token in each.drafted]),
        torch.tensor([outcome for each in seen for outcome in each.accepted]),
        words,
        values,
    )


class Ring:
    """The last so many records."""

    def __init__(self, capacity: int, hidden: int, like: Tensor, top: int = TOP) -> None:
        """like: a tensor of the states' dtype and device."""
        self.capacity, self.added, self.top = capacity, 0, top
        ids = torch.zeros(capacity, dtype=torch.long, device=like.device)
        self.fields = Records(
            like.new_zeros(capacity, hidden),
            ids,
            ids.clone(),
            torch.zeros(capacity, dtype=torch.bool, device=like.device),
            ids[:, None].repeat(1, top),
            like.new_zeros(capacity, top),
        )

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, records: Records) -> None:
        """Copy these in; the oldest make room."""
        count = records.state.shape[0]
        rows = (torch.arange(self.added, self.added + count) % self.capacity).to(self.fields.state.device)
        for mine, new in zip(self.fields, records, strict=True):
            mine[rows] = new.to(mine.device, mine.dtype)
        self.added += count

    def sample(self, count: int, generator: torch.Generator, sparing: int = 0) -> Records:
        """So many of them, at random, some perhaps twice; none of the latest `sparing`, where there are others."""
        old = len(self) - sparing if len(self) > sparing else len(self)
        rows = (self.added - len(self) + torch.randint(0, old, (count,), generator=generator)) % self.capacity
        return self.fields.part(rows.to(self.fields.state.device))

    def latest(self, count: int) -> Records:
        """The last so many."""
        count = min(count, len(self))
        rows = torch.arange(self.added - count, self.added) % self.capacity
        return self.fields.part(rows.to(self.fields.state.device))

    def clear(self) -> None:
        self.added = 0


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and values [n, count] of the highest of logits [n, V], best first; on the device that they are on.

    The highest `count` lie in the `count` blocks with the highest maxima: on a CPU that takes a fifth of the time.
    """
    rows, size = logits.shape
    count = min(count, size)
    if logits.device.type != "cpu" or size % _BLOCK or size // _BLOCK <= 2 * count:
        values, ids = logits.topk(count, -1)
        return ids, values
    blocks = logits.view(rows, -1, _BLOCK)  # [n, V / block, block]
    best = blocks.amax(-1).topk(count, -1, sorted=False).indices  # [n, count]
    inner = blocks.gather(1, best[..., None].expand(-1, -1, _BLOCK)).flatten(1)  # [n, count * block]
    values, at = inner.topk(count, -1)
    return best.gather(1, at // _BLOCK) * _BLOCK + at % _BLOCK, values
