"""What is trained, and on what loss: a small correction of a hidden state in front of a frozen output table (DVI).

Promise: initial weights change nothing (a trained head predicts what it did; a bare tap predicts what the target
predicted one token before), and every function is pure in its weights, so that a copy can be trained while another one
drafts. A reward above the baseline raises the probability of the drafted token, one below lowers it. Losses read only
the candidates' rows of the table: a few hundred instead of thousands, which would take milliseconds.

    H hidden size   r rank   D draft vocabulary   V target's vocabulary   n records   m candidates   W top ids
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .buffer import Records

Weights = dict[str, Tensor]
SAMPLE = 16  # rows and columns of a table that identify it


class Adapted(NamedTuple):
    stream: Tensor  # [n, H] from which a longer draft continues
    normed: Tensor  # [n, H] which the table is multiplied with


class Output(Protocol):
    """The part of a drafter that is not trained, and what its weights do. `FrozenOutput` is one."""

    norm: Tensor  # [H] in the dtype and on the device of all trained weights

    @property
    def vocabulary(self) -> int: ...

    def initial(self, rank: int) -> Weights: ...

    def adapt(self, w: Weights, state: Tensor, previous: Tensor) -> Adapted: ...

    def scores(self, w: Weights, state: Tensor, previous: Tensor, rows: Tensor) -> Tensor: ...

    def candidates(self, records: Records, top: int) -> Candidates: ...

    def predicted(self, normed: Tensor, rows: Callable[[], int]) -> Generator[str, None, Tensor]: ...

    def identity(self) -> tuple[tuple[object, ...], Tensor, Tensor]: ...


@dataclass
class FrozenOutput:
    """The part of a drafter that is not trained."""

    table: Tensor  # [D, H] the output's rows of the draft vocabulary
    ids: Tensor  # [D] the target id of each draft id
    draft_ids: Tensor  # [V] the draft id of each target id, or -1
    norm: Tensor  # [H] gain of the norm before the output
    eps: float
    embedding: Tensor | None  # [V, H] of the previous token; None: the state contains it already

    @staticmethod
    def of(
        table: Tensor, ids: Tensor, vocabulary: int, norm: Tensor, eps: float, embedding: Tensor | None
    ) -> FrozenOutput:
        draft_ids = torch.full((vocabulary,), -1, dtype=torch.long, device=table.device)
        draft_ids[ids.to(table.device)] = torch.arange(ids.shape[0], device=table.device)
        return FrozenOutput(table, ids, draft_ids, norm, eps, embedding)

    @property
    def vocabulary(self) -> int:
        """V"""
        return self.draft_ids.shape[0]

    def initial(self, rank: int) -> Weights:
        """Weights that change nothing. Exactly one factor of each product is zero, so that gradients are not."""
        size = self.table.shape[1]
        wide = size * (1 if self.embedding is None else 2)
        generator, like = torch.Generator().manual_seed(0), self.norm

        def random() -> Tensor:
            noise: Tensor = torch.randn(rank, wide, generator=generator) * wide**-0.5
            return noise.to(like.device, like.dtype)

        weights = {"state": like.new_ones(size), "norm": like.clone()}  # [H]
        weights |= {"gate": random(), "down": random(), "up": like.new_zeros(size, rank)}  # [r, wide], [H, r]
        return weights if self.embedding is None else weights | {"token": like.new_zeros(size)}  # [H]

    def adapt(self, w: Weights, state: Tensor, previous: Tensor) -> Adapted:
        """state [n, H]; previous [n]: the ids of the last tokens."""
        x = unit(state.to(w["state"].dtype), self.eps)  # [n, H]
        y = w["state"] * x
        if self.embedding is not None:
            e = unit(self.embedding[previous].to(x.dtype), self.eps)  # [n, H]
            x, y = torch.cat([x, e], 1), y + w["token"] * e
        y = y + F.linear(F.silu(F.linear(x, w["gate"])) * F.linear(x, w["down"]), w["up"])
        return Adapted(y, unit(y, self.eps) * w["norm"])

    def scores(self, w: Weights, state: Tensor, previous: Tensor, rows: Tensor) -> Tensor:
        """Scores [n, m] with these rows of the table [m, H]."""
        return F.linear(self.adapt(w, state, previous).normed.to(rows.dtype), rows).to(self.norm.dtype)

    def candidates(self, records: Records, top: int) -> Candidates:
        """The likely and drafted tokens of these records; on a GPU all tokens, because counting would synchronise."""
        table, ids = self.table, self.ids.to(self.draft_ids.device)
        if self.draft_ids.device.type == "cpu":
            likely = torch.cat([records.top_ids[:, :top].flatten(), records.drafted.clamp(min=0)])
            chosen = torch.unique(self.draft_ids[likely])
            chosen = chosen[chosen >= 0]  # [m]
            table, ids = table[chosen], ids[chosen]
        return Candidates.of(table, ids, self.draft_ids.shape[0])

    def predicted(self, normed: Tensor, rows: Callable[[], int]) -> Generator[str, None, Tensor]:
        """The target id that each of normed [n, H] predicts [n], over all tokens.

        The table is larger than a CPU cache: it is read in slices of `rows()`, each once for all of them.
        """
        normed, values, best, start = normed.to(self.table.dtype), list[Tensor](), list[Tensor](), 0
        while start < self.table.shape[0]:
            yield "judge"
            count = rows()
            top = (normed @ self.table[start : start + count].T).max(-1)
            values.append(top.values)
            best.append(top.indices + start)
            start += count
        piece = torch.stack(values).argmax(0)  # [n]
        return self.ids.to(normed.device)[torch.stack(best).gather(0, piece[None])[0]]

    def identity(self) -> tuple[tuple[object, ...], Tensor, Tensor]:
        """What the weights belong to: shapes, the draft vocabulary [D], and some of the table's rows and columns."""
        facts = (tuple(self.table.shape), self.draft_ids.shape[0], self.embedding is None)
        return facts, self.ids, self.table[:: max(1, self.table.shape[0] // SAMPLE), :SAMPLE]


def copied(weights: Weights, trained: bool = False) -> Weights:
    """A copy; a `trained` one collects gradients."""
    return {name: weight.detach().clone().requires_grad_(trained) for name, weight in weights.items()}


def unit(x: Tensor, eps: float) -> Tensor:
    """x [n, H] scaled to a mean square of one."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


# ------------------------------------------------------------ the loss


@dataclass(frozen=True)
class Mix:
    """The weight of each loss."""

    distil: float  # KL(p ‖ q): match the target's distribution
    agree: float  # -log q of accepted tokens
    reward: float  # REINFORCE on accepted nodes and first rejects
    back: float  # KL(q ‖ p): a stabiliser


@dataclass(frozen=True)
class Schedule:
    """Distillation alone, then a ramp to the mix. Distillation keeps most of the weight: texts change, and no other
    loss tells what would have been right (measured: docs/log/)."""

    warm: int = 200  # updates
    ramp: int = 400
    temperature: float = 1.0  # of the target's distribution

    def at(self, update: int) -> Mix:
        t = min(max((update - self.warm) / self.ramp, 0.0), 1.0)
        return Mix(distil=1 - 0.2 * t, agree=0.1 * t, reward=0.05 * t, back=0.05 * t)


@dataclass(frozen=True)
class Labels:
    """Records in terms of the m candidates."""

    p: Tensor  # [n, m] the target's distribution over them
    covered: Tensor  # [n] the probability that they cover
    drafted: Tensor  # [n] the drafted candidate; -1: nothing was drafted, or no candidate
    accepted: Tensor  # [n] bool
    best: Tensor  # [n] the target's likeliest candidate; -1: no candidate


@dataclass(frozen=True)
class Candidates:
    """The tokens that an update compares."""

    rows: Tensor  # [m, H] of the table
    index: Tensor  # [V + 1] each target id's index among them, or m; the last entry (id -1) is m

    @staticmethod
    def of(rows: Tensor, ids: Tensor, vocabulary: int) -> Candidates:
        """rows [m, H] of these target ids [m]."""
        index = torch.full((vocabulary + 1,), rows.shape[0], device=ids.device)
        index[ids] = torch.arange(rows.shape[0], device=ids.device)
        return Candidates(rows, index)

    def labels(self, records: Records, temperature: float) -> Labels:
        m = self.rows.shape[0]
        mass = (records.logits / temperature).softmax(-1)  # [n, W]
        at = self.index[records.top_ids]  # [n, W]
        p = mass.new_zeros(mass.shape[0], m + 1).scatter_add_(1, at, mass)[:, :m]
        covered, drafted = p.sum(-1), self.index[records.drafted]  # [n]
        drafted, best = torch.where(drafted < m, drafted, -1), torch.where(at[:, 0] < m, at[:, 0], -1)
        return Labels(p / covered.clamp(min=1e-6)[:, None], covered, drafted, records.accepted, best)


def loss(scores: Tensor, labels: Labels, mix: Mix, baseline: float) -> Tensor:
    """A scalar from scores [n, m]. Where nothing was drafted, the currently best candidate is rewarded instead."""
    log_q = F.log_softmax(scores, -1)  # [n, m]
    total = mix.distil * (labels.covered * -(labels.p * log_q).sum(-1)).mean()
    if mix.agree or mix.reward:
        top = scores.detach().argmax(-1)  # [n]
        drafted = labels.drafted >= 0
        node = torch.where(drafted, labels.drafted, top)
        reward = torch.where(drafted, labels.accepted, top == labels.best).to(scores.dtype)  # [n]
        log_node = log_q.gather(1, node[:, None])[:, 0]  # [n]
        total = total - (mix.agree * reward * log_node + mix.reward * (reward - baseline) * log_node).mean()
    if mix.back:
        log_p = (labels.p + 1e-4).log()
        total = total + mix.back * (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    return total
