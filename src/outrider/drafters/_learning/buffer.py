"""Recently verified nodes, in a ring buffer on the target's device.

Promise: it never holds more than `capacity` nodes, the oldest go first, and no text can be recovered from it: a record
contains neither its neighbours nor its sequence nor its request (docs/learning.md). It knows no losses.

    C capacity   H hidden size   W likeliest ids of the target's distribution that are kept
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

TOP = 64  # W: nearly always nearly all of the probability
_BLOCK = 32  # scores whose maximum is compared first


class Records(NamedTuple):
    """Verified nodes."""

    state: Tensor  # [n, H] the drafter's state
    previous: Tensor  # [n] the token before the node
    drafted: Tensor  # [n] the drafted target id; -1 where nothing was drafted
    accepted: Tensor  # [n] bool
    top_ids: Tensor  # [n, W] the target's likeliest ids
    logits: Tensor  # [n, W] of those

    def part(self, rows: Tensor | slice) -> Records:
        return Records(*(field[rows] for field in self))


class VerifiedNodes(NamedTuple):
    """Verified nodes of one step, before they are made records."""

    states: list[Tensor]  # n of [H]
    previous: list[int]
    drafted: list[int]
    accepted: list[bool]
    logits: Tensor  # [n, V] the target's

    @property
    def size(self) -> int:
        return len(self.states)

    @staticmethod
    def records(steps: list[VerifiedNodes], top: int) -> Records:
        """Several steps' nodes as records, together: each operation costs more to launch than to run."""
        logits = steps[0].logits if len(steps) == 1 else torch.cat([step.logits for step in steps])
        top_ids, values = likeliest(logits, top)
        return Records(
            torch.stack([state for step in steps for state in step.states]),
            torch.tensor([token for step in steps for token in step.previous]),
            torch.tensor([token for step in steps for token in step.drafted]),
            torch.tensor([accepted for step in steps for accepted in step.accepted]),
            top_ids,
            values,
        )


class Nodes(Protocol):
    """Verified nodes of one step, of some kind of drafter."""

    @property
    def drafted(self) -> list[int]:
        """Target ids; -1 where nothing was drafted."""
        ...

    @property
    def accepted(self) -> list[bool]: ...

    @property
    def size(self) -> int: ...

    @staticmethod
    def records(steps: list[Any], top: int) -> Records: ...


class Ring:
    """The latest `capacity` records."""

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
        """Copy these in, over the oldest."""
        count = records.state.shape[0]
        rows = self._rows(torch.arange(self.added, self.added + count))
        for field, values in zip(self.fields, records, strict=True):
            field[rows] = values.to(field.device, field.dtype)
        self.added += count

    def sample(self, count: int, generator: torch.Generator, holdout: int = 0) -> Records:
        """Random records with replacement, none of the latest `holdout` where there are others."""
        old = len(self) - holdout if len(self) > holdout else len(self)
        numbers = torch.randint(0, old, (count,), generator=generator)
        return self.fields.part(self._rows(self.added - len(self) + numbers))

    def latest(self, count: int) -> Records:
        return self.fields.part(self._rows(torch.arange(self.added - min(count, len(self)), self.added)))

    def clear(self) -> None:
        self.added = 0

    def _rows(self, numbers: Tensor) -> Tensor:
        return (numbers % self.capacity).to(self.fields.state.device)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and values [n, count] of the highest of logits [n, V], best first.

    The highest `count` are in the `count` blocks with the highest maxima: a fifth of the time of topk on a CPU.
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
