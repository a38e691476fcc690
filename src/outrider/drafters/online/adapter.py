"""What is trained: a small correction of a hidden state in front of a frozen table of words.

Promise: fresh weights change nothing (a trained head goes on saying what it said; a bare tap says what the target would
have said one token before), and every function here is pure in its weights, so that a copy can be trained while another
one drafts. It knows neither buffers nor losses.

    H hidden size   r rank   D draft vocabulary   V the target's vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


class Adapted(NamedTuple):
    stream: Tensor  # [n, H] what a following draft goes on from
    normed: Tensor  # [n, H] what the table is multiplied with


@dataclass(frozen=True)
class Frozen:
    """The part of a drafter that stays as it is."""

    table: Tensor  # [D, H] the output's rows of the draft vocabulary
    ids: Tensor  # [D] the target id of each draft id
    place: Tensor  # [V] the draft id of each target id, or -1
    norm: Tensor  # [H] gain of the norm before the output
    eps: float
    embedding: Tensor | None  # [V, H] of the token beside a state; None: the state knows it already

    @staticmethod
    def of(table: Tensor, ids: Tensor, vocabulary: int, norm: Tensor, eps: float, embedding: Tensor | None) -> Frozen:
        place = torch.full((vocabulary,), -1, dtype=torch.long, device=table.device)
        place[ids.to(table.device)] = torch.arange(ids.shape[0], device=table.device)
        return Frozen(table, ids, place, norm, eps, embedding)

    @property
    def hidden(self) -> int:
        return self.table.shape[1]

    def fresh(self, rank: int, seed: int = 0) -> Weights:
        """Weights that change nothing yet. Of each pair of factors exactly one is zero, or nothing could be learnt."""
        size, wide = self.hidden, self.hidden * (1 if self.embedding is None else 2)
        generator = torch.Generator().manual_seed(seed)
        like = self.norm

        def drawn() -> Tensor:
            noise: Tensor = torch.randn(rank, wide, generator=generator) * wide**-0.5
            return noise.to(like.device, like.dtype)

        weights = {"state": like.new_ones(size), "norm": like.clone()}  # [H]
        weights |= {"gate": drawn(), "down": drawn(), "up": like.new_zeros(size, rank)}  # [r, wide], [H, r]
        return weights if self.embedding is None else weights | {"token": like.new_zeros(size)}  # [H]

    def adapted(self, w: Weights, state: Tensor, beside: Tensor) -> Adapted:
        """States [n, H], and the ids of the tokens beside them [n]."""
        x = _unit(state.to(w["state"].dtype), self.eps)  # [n, H]
        y = w["state"] * x
        if self.embedding is not None:
            e = _unit(self.embedding[beside].to(x.dtype), self.eps)  # [n, H]
            x, y = torch.cat([x, e], 1), y + w["token"] * e
        y = y + F.linear(F.silu(F.linear(x, w["gate"])) * F.linear(x, w["down"]), w["up"])
        return Adapted(y, _unit(y, self.eps) * w["norm"])

    def scores(self, w: Weights, state: Tensor, beside: Tensor, rows: Tensor) -> Tensor:
        """Scores [n, m] of the words whose rows of the table [m, H] are given."""
        return F.linear(self.adapted(w, state, beside).normed.to(rows.dtype), rows).to(w["state"].dtype)


def copied(weights: Weights, trained: bool = False) -> Weights:
    """The same numbers in other tensors; `trained` ones collect gradients."""
    return {name: weight.detach().clone().requires_grad_(trained) for name, weight in weights.items()}


def _unit(x: Tensor, eps: float) -> Tensor:
    """x [n, H] at a mean square of one."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
