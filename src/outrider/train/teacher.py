"""The target's word as a teacher: its likeliest tokens with their chances, and how far a student is from them.

Promise: the divergence and its gradient are exact for the teacher's tokens, in float32, and take a few passes over the
student's logits, in pieces: a vocabulary times a batch is gigabytes. What the teacher leaves out (a few hundredths of
all chances, half of the time less than one) is as if it had never been said. It knows logits, not who made them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TOLD = 64  # tokens of the teacher for each row
_PIECE = 2**27  # numbers of one piece


@dataclass(frozen=True)
class Teacher:
    """What the target would say in M rows."""

    places: Tensor  # [M, T] tokens, as places in the student's vocabulary
    chances: Tensor  # [M, T]; a row's sum is what these tokens have of everything that could be said

    def of(self, rows: Tensor) -> Teacher:
        """The same for some rows [m], which may repeat."""
        return Teacher(self.places[rows], self.chances[rows])


@torch.no_grad()
def listen(logits: Tensor, ids: Tensor | None = None, told: int = TOLD) -> Teacher:
    """The teacher of logits [M, V] for a student that knows these ids [D], or all of them."""
    places, chances = [], []
    for piece in logits.split(max(_PIECE // logits.shape[1], 1)):
        wide = piece.to(torch.promote_types(piece.dtype, torch.float32))
        known = wide if ids is None else wide[:, ids]  # [m, D]
        top = known.topk(min(told, known.shape[1]))
        places.append(top.indices)
        chances.append((top.values - wide.logsumexp(-1, keepdim=True)).exp())
    return Teacher(torch.cat(places), torch.cat(chances))


def repeat(said: Tensor, ids: Tensor | None = None) -> Teacher:
    """The teacher that only says these tokens [M]; nothing where the student does not know them."""
    place = said if ids is None else torch.searchsorted(ids, said).clamp(max=len(ids) - 1)
    known = torch.ones_like(said, dtype=torch.float) if ids is None else (ids[place] == said).float()
    return Teacher(place[:, None], known[:, None])


def divergence(teacher: Teacher, logits: Tensor) -> Tensor:
    """KL from the teacher's law to the softmax of logits [M, D], times the mass that the teacher has: [M]."""
    found: Tensor = _Divergence.apply(logits, teacher.places, teacher.chances)  # type: ignore[no-untyped-call]
    return found


class _Divergence(torch.autograd.Function):
    """Keeps the logits themselves and one number a row; a softmax of all of them would be kept otherwise."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, places: Tensor, chances: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        pieces = logits.split(max(_PIECE // logits.shape[1], 1))
        whole = torch.cat([piece.to(wide).logsumexp(-1) for piece in pieces])  # [M]
        chances, mass = chances.to(wide), chances.to(wide).sum(-1)
        ctx.save_for_backward(logits, places, chances, whole, mass)
        cross = (chances * (logits.gather(1, places).to(wide) - whole[:, None])).sum(-1)
        entropy: Tensor = torch.special.xlogy(mass, mass) - torch.special.xlogy(chances, chances).sum(-1)
        return -cross - entropy

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        logits, places, chances, whole, mass = ctx.saved_tensors
        slopes = torch.empty_like(logits)
        size, at = max(_PIECE // logits.shape[1], 1), 0
        for piece in logits.split(size):
            rows = slice(at, at + len(piece))
            wide = (piece.to(whole.dtype) - whole[rows, None]).exp_().mul_(mass[rows, None])
            wide.scatter_add_(1, places[rows], -chances[rows])
            slopes[rows] = wide.mul_(slope[rows, None])
            at += len(piece)
        return slopes, None, None
