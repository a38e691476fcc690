"""Mixtures of experts: a router gives each row a few of a layer's MLPs, whose outputs are added by its weights.

Promise: a row's result is the same bits whichever rows share its pass. An expert's products are row-invariant
(`linear`), a row's experts are added in the order of its router, ties go to the lower number, and shares are computed
in float64 and then rounded, so that the form of a call does not show. A pass over several rows reads every expert that
one of them chose: it costs more than a pass over one row, and the measured costs of passes say so. On a GPU every pair
of a row and an expert is a row of one product over all experts' weights, of a fixed shape.
It knows rows, not layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ops
from .linear import summed


class Routing(NamedTuple):
    """What a router decides."""

    used: int  # experts of a row
    normalised: bool  # a row's shares add up to one
    activation: str
    scale: float = 1.0  # of what a row's experts add


def choose(scores: Tensor, routing: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The router's scores [T, E] -> each row's experts [T, k], best first, and their shares [T, k] float32.

    correction [E]: shares are sigmoids, and the best are those whose share and correction add up to most.
    """
    shares = torch.softmax(scores.double(), -1) if correction is None else torch.sigmoid(scores.double())
    ranked = shares if correction is None else shares + correction.double()
    chosen = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : routing.used]
    best = shares.gather(1, chosen)
    if routing.normalised:
        best = best / best.sum(-1, keepdim=True)
    return chosen, (best * routing.scale).float()


class Router:
    """Which experts a row uses, and with which shares."""

    def __init__(self, scores: Any, routing: Routing, correction: Tensor | None = None) -> None:
        """scores: the product [E, H]; correction [E]: as in `choose`."""
        self.scores, self.routing, self.correction = scores, routing, correction

    def __call__(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return choose(summed(self.scores(h)), self.routing, self.correction)


class Experts:
    """The MLP of a layer with experts; each is a pair of products."""

    def __init__(self, router: Router, gate_up: list[Any], down: list[Any]) -> None:
        self.router, self.gate_up, self.down = router, gate_up, down

    def __call__(self, h: Tensor) -> Tensor:
        """h [T, H] -> [T, H]"""
        chosen, shares = self.router(h)
        outputs = shares.new_empty(*chosen.shape, h.shape[1], dtype=torch.promote_types(h.dtype, torch.float32))
        for expert in chosen.unique().tolist():
            row, slot = (chosen == expert).nonzero(as_tuple=True)
            middle = self.gate_up[expert].gated(h[row], self.router.routing.activation)
            outputs[row, slot] = summed(self.down[expert](middle)).to(outputs.dtype)
        return added(outputs, shares)


def added(outputs: Tensor, shares: Tensor) -> Tensor:
    """outputs [T, k, H], shares [T, k] -> [T, H], slot after slot."""
    shares = shares.to(outputs.dtype)
    total = outputs[:, 0] * shares[:, :1]
    for slot in range(1, outputs.shape[1]):
        total = total + outputs[:, slot] * shares[:, slot, None]
    return total


class DeviceExperts:
    """The same on a GPU, with all experts' weights side by side: [E, 2I, H] and [E, H, I], and biases [E, ...]."""

    def __init__(
        self, router: Router, gate_up: Tensor, down: Tensor, biases: tuple[Tensor | None, Tensor | None]
    ) -> None:
        self.router, self.gate_up, self.down, self.biases = router, gate_up, down, biases

    def __call__(self, h: Tensor) -> Any:
        from .cuda.kernels.experts import expert_product

        chosen, shares = self.router(h)
        pairs = chosen.flatten().contiguous()  # [T * k]
        rows = torch.arange(pairs.shape[0], device=h.device) // chosen.shape[1]
        middle = expert_product(
            h, rows, pairs, self.gate_up, self.biases[0], self.router.routing.activation
        )  # [T * k, I]
        every = torch.arange(pairs.shape[0], device=h.device)
        outputs = expert_product(middle, every, pairs, self.down, self.biases[1])  # [T * k, H] float32
        return ops.as_delta(added(outputs.view(*chosen.shape, -1), shares))
