"""What is minimised, and what counts as a hit, for each kind of drafter.

Promise: the teacher is the target's own distribution over the draft vocabulary, unless the tokens themselves are asked
for; and hits are exactly those of a greedy chain, because a chain that goes on has been right so far: true tokens may
stand for drafted ones. It knows batches and nets; steps and files are the loop's.

M rows of a batch predict an answer's token; D is the draft vocabulary; K the tokens of one draft.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from .batches import Batch
from .features import TargetNet
from .net import HeadNet
from .teacher import Teacher, divergence, listen, repeat

_CHUNK = 32  # anchors of one evaluation pass


class Student(ABC):
    """Something that learns to say what the target says."""

    net: nn.Module
    k: int

    @abstractmethod
    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """For each position of a draft: divergences from the teacher [m] and their weights [m]."""

    @abstractmethod
    def hits(self, batch: Batch) -> Tensor:
        """[B, n-1, K]: is the token at each depth of a chain from each head row right? -1 outside the answer."""

    @abstractmethod
    def importance(self, position: int) -> float:
        """How much a position of the draft counts."""

    def loss(self, batch: Batch) -> Tensor:
        """The weighted mean over positions of the mean over rows: a scalar."""
        every = self.losses(batch)
        means = [(d * w).sum() / w.sum().clamp(min=1e-6) * self.importance(i) for i, (d, w) in enumerate(every)]
        return torch.stack(means).sum() / sum(self.importance(i) for i in range(len(every)))


class HeadStudent(Student):
    """What heads share: features of the target, and a reduced vocabulary."""

    net: HeadNet

    def __init__(self, net: HeadNet, target: TargetNet, k: int, soft: bool = True) -> None:
        self.net, self.target, self.k, self.soft = net, target, k, soft

    def _seen(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Embeddings of t_{p+1} [B, n-1, H], tapped streams [B, n-1, taps*H] and the last one at p+1 [B, n-1, H]."""
        with torch.no_grad():
            taps, last = self.target(batch.tokens, self.net.config.taps)
        return self.net.embed(batch.tokens[:, 1:], self.target), taps[:, :-1], last[:, 1:]

    @torch.no_grad()
    def _teacher(self, batch: Batch, last: Tensor) -> Teacher:
        """What the target would say in the M rows, as far as the draft vocabulary has it."""
        if self.soft:
            return listen(self.target.logits(last.flatten(0, 1)[batch.rows]), self.net.ids)
        return repeat(batch.tokens[:, 1:].roll(-1, 1).flatten()[batch.rows], self.net.ids)  # t_{p+2}

    def _right(self, batch: Batch, outputs: Tensor) -> Tensor:
        """Whether the likeliest token of outputs [B, n-1, H] is t_{p+2}: [B, n-1], False where nothing is predicted."""
        said = batch.tokens[:, 1:].roll(-1, 1).flatten()[batch.rows]
        guess = self.net.ids[self.net.logits(outputs.flatten(0, 1)[batch.rows]).argmax(-1)]
        return spread(guess == said, batch)


class Eagle(HeadStudent):
    """EAGLE-3: the head is unrolled over its own outputs, as it will run."""

    def __init__(self, net: HeadNet, target: TargetNet, k: int, soft: bool = True, decay: float = 0.8) -> None:
        super().__init__(net, target, k, soft)
        self.decay = decay

    def importance(self, position: int) -> float:
        return self.decay**position

    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        e, taps, last = self._seen(batch)
        teacher = self._teacher(batch, last)
        found = []
        for i, a in enumerate(self.net.unroll(e, taps, self.k)):
            logits = self.net.logits(a.flatten(0, 1)[batch.rows])  # [M, D]
            found.append((divergence(teacher, logits), (batch.depth >= i).float()))
        return found

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        e, taps, _ = self._seen(batch)
        return diagonal([self._right(batch, a) for a in self.net.unroll(e, taps, self.k)], batch)


class Blocks(HeadStudent):
    """The block drafter: true rows predict their next token, mask rows after random anchors the ones behind it."""

    def importance(self, position: int) -> float:
        return math.exp(-position / max(self.k / 2, 1.0))

    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        e, taps, last = self._seen(batch)
        teacher = self._teacher(batch, last)
        true, masked = self.net.anchored(e, taps, batch.anchors)
        logits = self.net.logits(true.flatten(0, 1)[batch.rows])
        found = [(divergence(teacher, logits), torch.ones_like(batch.depth, dtype=torch.float))]
        places, inside = self._places(batch, e.shape[1])  # [B, A, K-1]
        where = torch.zeros(e.shape[0] * e.shape[1], dtype=torch.long, device=e.device)
        where[batch.rows] = torch.arange(len(batch.rows), device=e.device)  # a row's place in the teacher
        label = teacher.of(where[places.flatten()])
        parts = divergence(label, self.net.logits(masked.flatten(0, 2)))  # [B*A*(K-1)]
        by_position = parts.unflatten(0, places.shape).flatten(0, 1).unbind(1)
        return found + list(zip(by_position, inside.flatten(0, 1).unbind(1), strict=True))

    def _places(self, batch: Batch, width: int) -> tuple[Tensor, Tensor]:
        """The true rows that mask rows stand for, as places in [B, n-1], and 1 where they are in the answer."""
        ahead = torch.arange(1, self.k, device=batch.anchors.device)
        rows = batch.anchors[:, :, None] + ahead  # [B, A, K-1]
        inside = rows <= batch.lengths[:, None, None] - 3
        rows = torch.where(inside, rows, batch.anchors[:, :, None])
        base = torch.arange(len(rows), device=rows.device)[:, None, None] * width
        return rows + base, inside.float()

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        e, taps, _ = self._seen(batch)
        length = e.shape[1]
        said = torch.nn.functional.pad(batch.tokens[:, 2:], (0, self.k), value=-1)  # [B, n-2+K] t_{p+2}
        out = torch.zeros(*e.shape[:2], self.k, dtype=torch.bool, device=e.device)
        for at in range(int((batch.starts - 1).min()), int(batch.lengths.max()) - 2, _CHUNK):
            anchors = torch.arange(at, min(at + _CHUNK, length - 1), device=e.device)
            true, masked = self.net.anchored(e, taps, anchors.expand(len(e), -1))
            outputs = torch.cat([true[:, anchors, None], masked], 2)  # [B, A, K, H]
            guess = self.net.ids[self.net.logits(outputs).argmax(-1)]
            out[:, anchors] = guess == said[:, anchors[:, None] + torch.arange(self.k, device=e.device)]
        return bounded(out, batch)


# ---------------------------------------------------------------- pieces


def spread(values: Tensor, batch: Batch) -> Tensor:
    """Values [M] of the batch's rows, in their places [B, n-1]; False elsewhere."""
    shape = (batch.tokens.shape[0], batch.tokens.shape[1] - 1)
    out = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=values.device)
    out[batch.rows] = values
    return out.view(shape)


def diagonal(right: list[Tensor], batch: Batch) -> Tensor:
    """right[i] [B, n-1] belongs to the i-th row behind a root: gather by root, [B, n-1, K]."""
    moved = [torch.nn.functional.pad(r[:, i:], (0, i)) for i, r in enumerate(right)]
    return bounded(torch.stack(moved, -1), batch)


def bounded(right: Tensor, batch: Batch) -> Tensor:
    """[B, n-1, K] as 1, 0, and -1 where the root is in the prompt or the token beyond the text."""
    at = torch.arange(right.shape[1], device=right.device)
    deep = at[:, None] + torch.arange(right.shape[2], device=right.device)  # [n-1, K] the row that predicts it
    inside = (at[None, :, None] >= batch.starts[:, None, None] - 1) & (deep[None] <= batch.lengths[:, None, None] - 3)
    return torch.where(inside, right.to(torch.int8), torch.tensor(-1, dtype=torch.int8, device=right.device))
