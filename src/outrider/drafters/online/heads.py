"""Learning behind a trained head: an adapter corrects its last output before tokens are scored."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ...backends.linear import summed
from ...backends.loaded_weights import product_rows
from ...backends.rows import Rows
from ...engine.cache import Cache
from ...errors import ConfigError
from .. import Workspace
from ..head.drafter import HEADS, TrainedHead
from ..head.features import FeatureCache
from ..head.network import Head
from ..head.rollout import HeadRollout
from .adapter import FrozenOutput
from .tap import Live, StateKeeping


class AdaptedHead:
    """A trained head with an adapter in front of its output. All else is the head's own."""

    def __init__(self, head: Head) -> None:
        self.bare = head
        c, ids = head.config, head.ids.to(head.device)
        table = product_rows(head.head, c.hidden_size, head.compute, head.device, None)
        frozen = table if head.device.type == "cuda" else table.to(head.stream)
        self.frozen = FrozenOutput.of(frozen, ids, c.vocab_size, head.norm, c.norm_eps, None)
        self.live: Live = dict
        self.scored: deque[tuple[Tensor, int]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)

    def read(self, rows: Rows, plane: Any, hidden: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Head.read`."""
        return self._scored(rows, self.bare.read(_unwanted(rows), plane, hidden, masked)[1])

    def scores(self, rows: Rows, plane: Any, features: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Head.scores`: [R, D] and [T, H]."""
        return self._scored(rows, self.bare.scores(_unwanted(rows), plane, features, masked)[1])

    @torch.inference_mode()
    def _scored(self, rows: Rows, x: Tensor) -> tuple[Tensor, Tensor]:
        """The wanted rows' scores [R, D] with the adapter, and the outputs x [T, H]."""
        if not rows.want.shape[0]:
            return x.new_zeros(0, self.config.draft_vocab_size), x
        state = x[rows.want.to(x.device)]  # [R, H]
        self.scored.extend((each, 0) for each in state)
        normed = self.frozen.adapt(self.live(), state, state.new_zeros(0, dtype=torch.long)).normed
        return summed(self.bare.head(normed.to(self.compute))).to(self.stream), x


class AdaptedHeadRollout(StateKeeping, HeadRollout):
    """A head's rollout that keeps the state behind each drafted token."""

    def __init__(self, head: Any, cache: Cache, plane: Any, features: FeatureCache) -> None:
        super().__init__(head, cache, plane, features)
        self.source, self.states, self.scored = "online", {}, head.scored


def adapted_head(space: Workspace) -> TrainedHead:
    """The drafter `head`, with an adapter behind it."""
    inner = TrainedHead(space)
    plain = inner.rollout
    learns = isinstance(plain, HeadRollout) and plain.head.config.kind in HEADS and not plain.head.config.norm_output
    if not isinstance(plain, HeadRollout) or not learns:
        raise ConfigError(f"{inner.about.format} cannot learn online: use --drafter head with it.")
    inner.tree = False  # only chains are learnt from
    inner.vocabulary = None  # the adapter has a table of its own
    inner.rollout = AdaptedHeadRollout(AdaptedHead(plain.head), space.cache, plain.plane, inner.features)
    return inner


def _unwanted(r: Rows) -> Rows:
    """The same rows without scores."""
    return Rows(
        r.tokens, r.positions, r.slots, r.lines, r.context, r.table, r.ancestors, r.want[:0], blocks=r.blocks
    )  # fmt: skip
