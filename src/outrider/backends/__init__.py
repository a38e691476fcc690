"""What a model is to the rest of Outrider: rows in, logits out, K/V kept in a plane that somebody else owns.

Three optional arguments (a part of the layers, a hidden state to resume from, taps) are enough for every method
that looks inside a target, so that no method ever forks a model file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..types import Output, Rows

if TYPE_CHECKING:
    from ..engine.cache import Plane
    from ..models.config import ModelConfig


@dataclass(frozen=True)
class Part:
    """Which of a model's blocks run. The default is all of them, with the head."""

    start: int = 0
    stop: int | None = None  # None: to the last layer
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    head: bool = True
    vocab: int | None = None  # the head's first so many ids alone, which is what is frequent; None: all of them


WHOLE = Part()


class PlaneShape(NamedTuple):
    """What a model needs a plane to hold."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype


class Opening(NamedTuple):
    """Where an answer begins."""

    tokens: list[int]  # what it goes on from
    source: list[int]  # what it is made from, where that is another text: what an encoder reads


def opening(model: Any, ids: list[int]) -> Opening:
    """Where an answer to a prompt begins: after it, unless the model says otherwise."""
    begin = getattr(model, "begin", None)
    begun: Opening = Opening(ids, []) if begin is None else begin(ids)
    return begun


def device_of(model: Model) -> torch.device:
    """Where a model lives; one that does not say lives on the CPU."""
    return getattr(model, "device", None) or torch.device("cpu")


def numbered(device: torch.device | str) -> torch.device:
    """`cuda` is `cuda:0`, or whichever is current: two names of one device must not look like two devices."""
    named = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if named.type == "cuda" and named.index is None else named


class Model(Protocol):
    """A causal language model over rows."""

    config: ModelConfig
    dtype: torch.dtype

    @property
    def plane_shape(self) -> PlaneShape: ...

    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output: ...
