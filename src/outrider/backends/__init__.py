"""How a pass runs: `cpu` (eager torch, int8 decoder, C kernels), `cuda` (captured graphs, triton kernels) and
`transformers` (any other model). The same `launch` and `wait` on each.

Promise: a row's logits are the same bits whichever rows share its pass. Backends take rows and return logits and
choices; they offer primitives (parts of the layers, taps, planes, recorded passes) and know no drafting method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..engine.cache import Plane
from ..errors import ConfigError
from ..models.config import ModelConfig
from ..models.mtp import MtpLayer
from ..types import Batch, Draft, Output, Sequence
from .rows import Rows


@dataclass(frozen=True)
class Part:
    """The blocks of a model that run. Default: all of them, with the output product (`head`)."""

    start: int = 0
    stop: int | None = None  # None: to the last layer
    skip_attention: frozenset[int] = frozenset()
    skip_mlp: frozenset[int] = frozenset()
    head: bool = True
    vocab: int | None = None  # logits of the first ids only, which are the frequent ones; None: of all


WHOLE = Part()


class Chain(NamedTuple):
    """Drafted tokens, the second-likeliest token in the place of each, and the survival of all of them."""

    tokens: list[int]
    survival: list[float]
    others: list[int]
    others_survival: list[float]


class PlaneShape(NamedTuple):
    """What a plane holds for a model: `heads` K/V heads of `dim` numbers in each layer."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def slot_bytes(self) -> int:
        """Of K and V of one token."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize


class Opening(NamedTuple):
    """How an answer starts."""

    tokens: list[int]  # the context that the decoder continues
    source: list[int]  # the text that an encoder reads; empty for decoders


class Model(ABC):
    """A causal language model: rows in, logits out, K/V kept in a plane that the cache owns.

    Optional abilities are declared here with their defaults.
    """

    config: ModelConfig
    dtype: torch.dtype  # of most weights
    compute: torch.dtype  # of its products
    device = torch.device("cpu")  # of rows, planes and logits
    kv_dtype: torch.dtype | None = None  # of K and V, on a CPU; None: that of the residual stream
    weights_device: torch.device | None = None  # where the weights are on another device
    has_layers = True  # can run a part of its layers and resume from a hidden state
    keeps_streams = False  # passes on a CPU leave the layers of `plane.streams` there, in the slots of their rows
    block = 1  # positions that a pass computes together: budgets end where a block does
    description = ""  # one sentence about the implementation, where there was a choice
    encoder = False  # an encoder reads the prompt, and answers start with the tokens `starts`
    starts: tuple[int, ...] = ()
    max_source: int | None = None  # tokens that the encoder reads at most; None: any number
    source_length = 0  # the longest source, where cross-attention's K/V is in the plane
    reader: Any = None  # its encoder (`encoder.Encoder`), where that writes to the plane
    mtp: MtpLayer | None = None  # its checkpoint's own layer for further tokens
    drafts_chains = False  # `chains` runs a whole draft in one call
    draft_ids: Tensor | None = None  # [D] the ids that its logits are of, where it has a part of its output rows

    @property
    @abstractmethod
    def plane_shape(self) -> PlaneShape: ...

    @abstractmethod
    def forward(
        self, rows: Rows, plane: Plane, part: Part = WHOLE, x: Tensor | None = None, taps: tuple[int, ...] = ()
    ) -> Output:
        """One pass, which calls `plane.count_pass()`. x [T, H]: the residual stream to resume from at `part.start`;
        taps: layers whose output stream [T, H] is returned."""

    def chains(
        self, rows: Rows, plane: Plane, slots: list[list[int]], budgets: list[int], floor: float, vocab: int | None
    ) -> list[Chain]:
        """Feed these rows; then, after each wanted one, the likeliest tokens, budgets[i] at most, fed into slots[i],
        until a chain's survival is below the floor. vocab: as in `Part`."""
        raise NotImplementedError

    def shorten(self, ids: Tensor) -> bool:
        """Keep the output rows of these ids [D] only: logits are [R, D] from then on. False: it cannot, and has all."""
        return False

    @property
    def precision(self) -> str:
        """What its weights are stored in, in one word: the name of a dtype."""
        return str(self.dtype).removeprefix("torch.")

    def identity(self) -> str | None:
        """A hash of the weights, equal for every file format of one model; None: unknown."""
        return None

    def opening(self, ids: list[int]) -> Opening:
        """How the answer to a prompt starts: after it, or, where an encoder reads the prompt, with `starts`."""
        if not self.encoder:
            return Opening(ids, [])
        if self.max_source is not None and len(ids) > self.max_source:
            raise ConfigError(
                f"The text has {len(ids)} tokens, but this model's encoder reads at most {self.max_source}; "
                "shorten it, or give it in parts."
            )
        return Opening(list(self.starts), ids)

    def as_drafter(self) -> Model:
        """The same weights for drafting only, where passes need not be exact."""
        return self


class RecordedChains(Protocol):
    """Chains of K drafted tokens, each chain one captured graph of K passes."""

    def suits(self, seqs: list[Sequence]) -> bool: ...

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft: ...


class Passes(Protocol):
    """A model's captured passes on a device. Results stay on the device; no call waits for it."""

    def logits(self, batch: Batch, part: Part) -> Tensor:
        """Logits of the wanted rows: [R, V]."""

    def states(self, batch: Batch, layers: int) -> Tensor:
        """The residual stream of all rows after the first `layers` layers: [T, H]."""

    def chains(self, part: Part, again: int, source: str) -> RecordedChains:
        """again: how many of the last committed tokens each chain feeds once more."""


class ResumableLayers(Protocol):
    """The target's first layers, run before the verifying pass, which resumes from their states."""

    def roots(self, seqs: list[Sequence], layers: int) -> Tensor:
        """Over each sequence's last token; the plane holds all tokens before it. States [B, H]."""

    def nodes(self, seqs: list[Sequence], tokens: list[int]) -> Tensor:
        """Over one more drafted token of each sequence. States [B, H]."""


def with_index(device: torch.device | str) -> torch.device:
    """The device with its index: `cuda` becomes the current one, so that equal devices compare equal."""
    named = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if named.type == "cuda" and named.index is None else named
