"""What each kind of drafter minimises, and which of its draft tokens count as hits.

The labels are the target's own distribution over the draft vocabulary, or the tokens themselves. Hits are those of
greedy chains: a chain that continues has been right so far, so true tokens can stand for drafted ones. Steps and files
belong to `loop`.

B sequences of n tokens; M rows of a batch predict a token of an answer; D draft vocabulary; K tokens of one draft.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.speculators import HeadConfig
from .batches import Batch
from .decoder import TargetNet, widened
from .networks import EAGLE3, EXIT, DrafterNet, ExitNet, HeadNet

TOP_TOKENS = 64  # labels of each row
_CHUNK_NUMBERS = 2**27  # numbers of one chunk: the vocabulary times a batch is gigabytes
_CHUNK_ANCHORS = 32  # anchors of one evaluation pass
Net = TypeVar("Net", bound=nn.Module)
Drafting = TypeVar("Drafting", bound=DrafterNet)


# ---------------------------------------------------------------- labels and divergence


@dataclass(frozen=True)
class Labels:
    """The target's most likely tokens in M rows. A row's sum is less than 1 by what the other tokens have."""

    tokens: Tensor  # [M, T] draft ids
    probabilities: Tensor  # [M, T]

    def at(self, rows: Tensor) -> Labels:
        """The labels of some rows [m], which may repeat."""
        return Labels(self.tokens[rows], self.probabilities[rows])


@torch.no_grad()
def soft_labels(logits: Tensor, ids: Tensor | None = None, top: int = TOP_TOKENS) -> Labels:
    """The labels of target logits [M, V] for a draft vocabulary of these ids [D], or all."""
    tokens, probabilities = [], []
    for chunk in logits.split(_chunk_rows(logits)):
        wide = widened(chunk)
        best = (wide if ids is None else wide[:, ids]).topk(min(top, logits.shape[1] if ids is None else len(ids)))
        tokens.append(best.indices)
        probabilities.append((best.values - wide.logsumexp(-1, keepdim=True)).exp())
    return Labels(torch.cat(tokens), torch.cat(probabilities))


def hard_labels(tokens: Tensor, ids: Tensor | None = None) -> Labels:
    """Labels that are these target tokens [M] alone; probability 0 where the draft vocabulary lacks them."""
    draft = tokens if ids is None else torch.searchsorted(ids, tokens).clamp(max=len(ids) - 1)
    present = torch.ones_like(tokens, dtype=torch.float) if ids is None else (ids[draft] == tokens).float()
    return Labels(draft[:, None], present[:, None])


def divergence(labels: Labels, logits: Tensor) -> Tensor:
    """[M] KL from the labels to the softmax of logits [M, D], times the probability mass of the labels.

    Value and gradient are exact in float32; both are computed in chunks of rows.
    """
    value: Tensor = _Divergence.apply(logits, labels.tokens, labels.probabilities)  # type: ignore[no-untyped-call]
    return value


class _Divergence(torch.autograd.Function):
    """Saves the logits and two numbers a row; autograd would save a softmax of all of them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, probabilities: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.cat([chunk.to(wide).logsumexp(-1) for chunk in logits.split(_chunk_rows(logits))])  # [M]
        p, mass = probabilities.to(wide), probabilities.to(wide).sum(-1)
        ctx.save_for_backward(logits, tokens, p, total, mass)
        cross = (p * (logits.gather(1, tokens).to(wide) - total[:, None])).sum(-1)
        entropy: Tensor = torch.special.xlogy(mass, mass) - torch.special.xlogy(p, p).sum(-1)
        return -cross - entropy

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, p, total, mass = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        size = _chunk_rows(logits)
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            wide = (logits[rows].to(total.dtype) - total[rows, None]).exp_().mul_(mass[rows, None])
            wide.scatter_add_(1, tokens[rows], -p[rows])
            gradient[rows] = wide.mul_(slope[rows, None])
        return gradient, None, None


def _chunk_rows(logits: Tensor) -> int:
    return max(_CHUNK_NUMBERS // logits.shape[1], 1)


# ---------------------------------------------------------------- objectives


class Objective(ABC, Generic[Net]):
    """A network and what it learns from the target."""

    def __init__(self, net: Net, target: TargetNet, k: int, soft: bool = True) -> None:
        self.net, self.target, self.k, self.soft = net, target, k, soft

    @property
    def precision(self) -> torch.dtype | None:
        """What products are computed in on a CPU; None: in the type of their weights."""
        return None

    @abstractmethod
    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """For each position of a draft: divergences from the labels [m] and their weights [m]."""

    @abstractmethod
    def hits(self, batch: Batch) -> Tensor:
        """[B, n-1, K]: 1 where the token at each depth of a chain from each head row is right, -1 outside answers."""

    def importance(self, position: int) -> float:
        """The weight of a position of the draft."""
        return 1.0

    def loss(self, batch: Batch) -> Tensor:
        """A scalar: the weighted mean over positions of the mean over rows."""
        losses = self.losses(batch)
        means = [(d * w).sum() / w.sum().clamp(min=1e-6) * self.importance(i) for i, (d, w) in enumerate(losses)]
        return torch.stack(means).sum() / sum(self.importance(i) for i in range(len(losses)))


class DrafterObjective(Objective[Drafting]):
    """What heads and exits share: features of the target, and a draft vocabulary."""

    @torch.no_grad()
    def _labels(self, batch: Batch, last: Tensor) -> Labels:
        """Of the M rows; last [B, n-1, H] are the target's last hidden states at p+1."""
        if self.soft:
            return soft_labels(self.target.logits(last.flatten(0, 1)[batch.rows]), self.net.ids)
        return hard_labels(batch.next_tokens, self.net.ids)

    def _right(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Whether the most likely token of hidden states [B, n-1, H] is t_{p+2}: [B, n-1], False outside the rows."""
        guess = self.net.ids[self.net.logits(hidden.flatten(0, 1)[batch.rows]).argmax(-1)]
        return at_rows(guess == batch.next_tokens, batch)


class HeadObjective(DrafterObjective[HeadNet]):
    """What both kinds of head share."""

    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings of t_{p+1} [B, n-1, H], taps at p [B, n-1, taps*H] and the last states at p+1 [B, n-1, H]."""
        with torch.no_grad():
            taps, last = self.target(batch.tokens, self.net.config.taps)
        return self.net.embed(batch.tokens[:, 1:], self.target), taps[:, :-1], last[:, 1:]


class EagleObjective(HeadObjective):
    """EAGLE-3: the head is unrolled over its own outputs, as in drafting."""

    def importance(self, position: int) -> float:
        return 0.8**position

    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        e, taps, last = self._inputs(batch)
        labels = self._labels(batch, last)
        losses = []
        for i, a in enumerate(self.net.unroll(e, taps, self.k)):
            logits = self.net.logits(a.flatten(0, 1)[batch.rows])  # [M, D]
            losses.append((divergence(labels, logits), (batch.depth >= i).float()))
        return losses

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        e, taps, _ = self._inputs(batch)
        return by_root([self._right(batch, a) for a in self.net.unroll(e, taps, self.k)], batch)


class BlockObjective(HeadObjective):
    """The block drafter: true rows predict their next token, mask rows after random anchors the ones behind it."""

    def importance(self, position: int) -> float:
        return math.exp(-position / max(self.k / 2, 1.0))

    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        e, taps, last = self._inputs(batch)
        labels = self._labels(batch, last)
        true, masked = self.net.anchored(e, taps, batch.anchors)
        logits = self.net.logits(true.flatten(0, 1)[batch.rows])
        first = (divergence(labels, logits), torch.ones_like(batch.depth, dtype=torch.float))
        rows, inside = self._masked_rows(batch, e.shape[1])  # [B, A, K-1]
        label_index = torch.zeros(e.shape[0] * e.shape[1], dtype=torch.long, device=e.device)
        label_index[batch.rows] = torch.arange(len(batch.rows), device=e.device)
        masked_labels = labels.at(label_index[rows.flatten()])
        parts = divergence(masked_labels, self.net.logits(masked.flatten(0, 2)))  # [B*A*(K-1)]
        by_position = parts.unflatten(0, rows.shape).flatten(0, 1).unbind(1)
        return [first, *zip(by_position, inside.flatten(0, 1).unbind(1), strict=True)]

    def _masked_rows(self, batch: Batch, width: int) -> tuple[Tensor, Tensor]:
        """The true rows in place of mask rows, as indices into [B, n-1], and 1 where they are in the answer."""
        ahead = torch.arange(1, self.k, device=batch.anchors.device)
        rows = batch.anchors[:, :, None] + ahead  # [B, A, K-1]
        inside = rows <= batch.lengths[:, None, None] - 3
        rows = torch.where(inside, rows, batch.anchors[:, :, None])
        base = torch.arange(len(rows), device=rows.device)[:, None, None] * width
        return rows + base, inside.float()

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        e, taps, _ = self._inputs(batch)
        tokens = F.pad(batch.tokens[:, 2:], (0, self.k), value=-1)  # [B, n-2+K] t_{p+2}
        right = torch.zeros(*e.shape[:2], self.k, dtype=torch.bool, device=e.device)
        for start in range(int((batch.starts - 1).min()), int(batch.lengths.max()) - 2, _CHUNK_ANCHORS):
            anchors = torch.arange(start, min(start + _CHUNK_ANCHORS, e.shape[1] - 1), device=e.device)
            true, masked = self.net.anchored(e, taps, anchors.expand(len(e), -1))
            outputs = torch.cat([true[:, anchors, None], masked], 2)  # [B, A, K, H]
            guess = self.net.ids[self.net.logits(outputs).argmax(-1)]
            right[:, anchors] = guess == tokens[:, anchors[:, None] + torch.arange(self.k, device=e.device)]
        return _inside_answers(right, batch)


class ExitObjective(DrafterObjective[ExitNet]):
    """One position at a time. The target's first layers stay as they are and have run on true tokens in a chain."""

    @torch.no_grad()
    def _inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The hidden states after the first layers and the last ones, of position p + 1 in row p: [B, n-1, H] both."""
        exits, last = self.target(batch.tokens, self.net.config.taps)
        return exits[:, 1:], last[:, 1:]

    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        exits, last = self._inputs(batch)
        logits = self.net.logits(exits.flatten(0, 1)[batch.rows])  # [M, D]
        return [(divergence(self._labels(batch, last), logits), torch.ones_like(batch.depth, dtype=torch.float))]

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        return by_root([self._right(batch, self._inputs(batch)[0])] * self.k, batch)


def head_objective(
    config: HeadConfig, ids: Tensor, target: TargetNet, device: torch.device, k: int, soft: bool = True, seed: int = 0
) -> Objective[Any]:
    """An untrained head or early exit of this shape, and what it learns. ids [D]: the draft vocabulary."""
    if config.kind == EXIT:
        return ExitObjective(ExitNet(config, ids, target).to(device), target, k, soft)
    head = HeadNet.from_target(target, config, ids, seed).to(device)
    return (EagleObjective if config.kind == EAGLE3 else BlockObjective)(head, target, k, soft)


class ModelObjective(Objective[TargetNet]):
    """A small standalone model. Its logits at p+1 predict t_{p+2}, as a head's row p does."""

    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        with torch.no_grad():
            labels = soft_labels(self._logits(self.target, batch)) if self.soft else hard_labels(batch.next_tokens)
        divergences = divergence(labels, self._logits(self.net, batch))
        return [(divergences, torch.ones_like(divergences))]

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        right = self._logits(self.net, batch).argmax(-1) == batch.next_tokens
        return by_root([at_rows(right, batch)] * self.k, batch)

    def _logits(self, net: TargetNet, batch: Batch) -> Tensor:
        """[M, V]"""
        return net.logits(net(batch.tokens)[1][:, 1:].flatten(0, 1)[batch.rows])


# ---------------------------------------------------------------- hits by row and depth


def at_rows(values: Tensor, batch: Batch) -> Tensor:
    """Values [M] of the batch's rows as [B, n-1]; False elsewhere."""
    shape = (batch.tokens.shape[0], batch.tokens.shape[1] - 1)
    out = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=values.device)
    out[batch.rows] = values
    return out.view(shape)


def by_root(right: list[Tensor], batch: Batch) -> Tensor:
    """right[i] [B, n-1] belongs to the i-th row after a root: gathered by root, [B, n-1, K]."""
    shifted = [F.pad(r[:, i:], (0, i)) for i, r in enumerate(right)]
    return _inside_answers(torch.stack(shifted, -1), batch)


def _inside_answers(right: Tensor, batch: Batch) -> Tensor:
    """[B, n-1, K] as 1, 0, and -1 where the root is in the prompt or the token beyond the text."""
    roots = torch.arange(right.shape[1], device=right.device)
    row = roots[:, None] + torch.arange(right.shape[2], device=right.device)  # [n-1, K] the row that predicts
    inside = (roots[None, :, None] >= batch.starts[:, None, None] - 1) & (row[None] <= batch.lengths[:, None, None] - 3)
    return torch.where(inside, right.to(torch.int8), torch.tensor(-1, dtype=torch.int8, device=right.device))
