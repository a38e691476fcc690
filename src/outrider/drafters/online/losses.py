"""What is minimised: first the target's distribution, then more and more what was really accepted (DVI).

Promise: a reward above the baseline raises the probability of what was drafted, one below lowers it; and only words
that are compared take part, so that a few hundred rows of the table are read where thousands would cost milliseconds.

    n records   m words that are compared   W words of the target's distribution
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .buffer import Records


@dataclass(frozen=True)
class Mix:
    """How much each loss counts."""

    distil: float  # KL(p ‖ q): say what the target says
    agree: float  # -log q of what was accepted
    reward: float  # REINFORCE on accepted nodes and first rejects
    back: float  # KL(q ‖ p): a stabiliser, which keeps q from wandering off


@dataclass(frozen=True)
class Schedule:
    """Distillation alone, then a ramp to the mix. Distillation keeps most of its weight: texts change, and it alone
    tells what would have been right (measured: docs/log/)."""

    warm: int = 200  # updates
    ramp: int = 400
    temperature: float = 1.0  # of the target's distribution

    def at(self, update: int) -> Mix:
        t = min(max((update - self.warm) / self.ramp, 0.0), 1.0)
        return Mix(distil=1 - 0.2 * t, agree=0.1 * t, reward=0.05 * t, back=0.05 * t)


@dataclass(frozen=True)
class Lesson:
    """Records over the words that are compared."""

    p: Tensor  # [n, m] the target's distribution over them
    known: Tensor  # [n] how much of its probability they hold
    drafted: Tensor  # [n] which of them was drafted; -1: nothing, or none of them
    accepted: Tensor  # [n] bool
    right: Tensor  # [n] which of them the target finds likeliest; -1: none of them


def lesson(where: Tensor, m: int, records: Records, temperature: float) -> Lesson:
    """where [V + 1]: each target id's place among the m words, or m; the last entry (id -1) is m."""
    mass = (records.logits / temperature).softmax(-1)  # [n, W]
    at = where[records.words]  # [n, W]
    p = mass.new_zeros(mass.shape[0], m + 1).scatter_add_(1, at, mass)[:, :m]
    known = p.sum(-1)
    drafted = where[records.drafted]  # [n]
    return Lesson(
        p / known.clamp(min=1e-6)[:, None],
        known,
        torch.where(drafted < m, drafted, -1),
        records.accepted,
        torch.where(at[:, 0] < m, at[:, 0], -1),
    )


def loss(scores: Tensor, lesson: Lesson, mix: Mix, baseline: float) -> Tensor:
    """A scalar from scores [n, m]; records without a drafted word are judged by what would be drafted now."""
    log_q = F.log_softmax(scores, -1)  # [n, m]
    total = mix.distil * (lesson.known * -(lesson.p * log_q).sum(-1)).mean()
    if mix.agree or mix.reward:
        now = scores.detach().argmax(-1)  # [n]
        asked = lesson.drafted >= 0
        node = torch.where(asked, lesson.drafted, now)
        reward = torch.where(asked, lesson.accepted, now == lesson.right).to(scores.dtype)  # [n]
        says = log_q.gather(1, node[:, None])[:, 0]  # [n]
        total = total - (mix.agree * reward * says + mix.reward * (reward - baseline) * says).mean()
    if mix.back:
        log_p = (lesson.p + 1e-4).log()
        total = total + mix.back * (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    return total
