"""How a pass runs: `cpu` (eager torch, int8 decoder, C kernels), `cuda` (captured graphs, triton kernels) and
`transformers` (any other model). The same `launch` and `wait` on each.

Promise: a row's logits are the same bits whichever rows share its pass. Backends take rows and return logits and
choices; they offer primitives (parts of the layers, taps, planes, recorded passes) and know no drafting method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..engine.cache import Plane
from ..models.config import ModelConfig
from ..types import Batch, Draft, Output, Sequence
from .rows import Rows


@dataclass(frozen=True)
class Part:
    """Which of a model's blocks run. The default is all of them, with the head."""

    start: int = 0
    stop: int | None = None  # None: to the last layer
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    head: bool = True
    vocab: int | None = None  # only the head's first ids, which are the frequent ones; None: all of them


WHOLE = Part()


class PlaneShape(NamedTuple):
    """What a model needs a plane to hold."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype


class Opening(NamedTuple):
    """Where an answer begins."""

    tokens: list[int]  # what it continues
    source: list[int]  # what it is made from, where that is another text: what an encoder reads


class Model(ABC):
    """A causal language model: rows in, logits out, K/V kept in a plane that the cache owns.

    Three optional arguments of `forward` (a part of the layers, a hidden state to resume from, taps) are enough for
    every method that looks inside a target. Optional abilities are declared here with their defaults.
    """

    config: ModelConfig
    dtype: torch.dtype  # of most weights
    compute: torch.dtype  # of its products
    device = torch.device("cpu")  # of rows, planes and logits
    weights_device: torch.device | None = None  # where that is another device
    has_layers = True  # can run a part of its layers and resume from a hidden state
    block = 1  # positions that a pass computes together: budgets end where a block does
    description = ""  # one sentence about who runs it, where that is not the built-in decoder
    encoder = False  # an encoder reads the prompt, and answers begin afresh with `starts`
    starts: tuple[int, ...] = ()

    @property
    @abstractmethod
    def plane_shape(self) -> PlaneShape: ...

    @abstractmethod
    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        """One pass. It calls `plane.count_pass()`: what it writes is never silent."""

    def identity(self) -> str | None:
        """A hash that is the same for every file format of one model; None: not known."""
        return None

    def opening(self, ids: list[int]) -> Opening:
        """Where an answer to a prompt begins."""
        return Opening(ids, [])

    def as_drafter(self) -> Model:
        """The same weights for drafting only, where passes need not be exact."""
        return self


class RecordedChains(Protocol):
    """Whole drafts that a device makes on its own, one captured graph for K passes."""

    def suits(self, seqs: list[Sequence]) -> bool: ...

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft: ...


class Passes(Protocol):
    """How a model runs on a device that is not driven operation by operation."""

    def logits(self, batch: Batch, part: Part) -> Tensor:
        """Logits of the wanted rows: [R, V]."""
        ...

    def states(self, batch: Batch, layers: int) -> Tensor:
        """The residual stream of all rows after so many layers: [T, H]."""
        ...

    def chains(self, part: Part, again: int, source: str) -> RecordedChains: ...


class ResumableLayers(Protocol):
    """The target's own first layers, run ahead of the pass that verifies, which resumes from their states."""

    def roots(self, seqs: list[Sequence], layers: int) -> Tensor:
        """Over each sequence's last token, where all before it is held: states [B, H]."""
        ...

    def nodes(self, seqs: list[Sequence], tokens: list[int]) -> Tensor:
        """Over one more drafted token of each, after those before it: states [B, H]."""
        ...


def numbered(device: torch.device | str) -> torch.device:
    """`cuda` is `cuda:0`, or whichever is current: two names of one device must not look like two devices."""
    named = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if named.type == "cuda" and named.index is None else named
