"""Learning behind a trained head: its last output is corrected before its tokens are scored."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from ...backends.linear import summed
from ...backends.loaded_weights import product_rows
from ...backends.rows import Rows
from ...engine.cache import Cache
from .. import Workspace
from ..head.drafter import TrainedHead
from ..head.features import Features, Kept
from ..head.network import Head
from ..head.rollout import HeadRollout
from .adapter import Frozen
from .taps import Live, Remembering


class AdaptedHead:
    """A trained head whose last output is corrected before its words are scored. All else is the head's own."""

    def __init__(self, head: Head) -> None:
        self.bare = head
        c, ids = head.config, head.ids.to(head.device)
        table = product_rows(head.head, c.hidden_size, head.compute, head.device, None)
        kept = table if head.device.type == "cuda" else table.to(head.stream)
        self.frozen = Frozen.of(kept, ids, c.vocab_size, head.norm, c.norm_eps, None)
        self.live: Live = dict
        self.seen: deque[tuple[Tensor, int]] = deque()  # state [H] of each wanted row, and the token beside it

    def __getattr__(self, name: str) -> Any:
        return getattr(self.bare, name)

    def read(self, rows: Rows, plane: Any, shown: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Head.read`."""
        return self.scores(rows, plane, self.bare.fuse([shown]), masked)

    @torch.inference_mode()
    def scores(self, rows: Rows, plane: Any, features: Tensor, masked: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `Head.scores`: [R, D] and [T, H]."""
        _, x = self.bare.scores(_unwanted(rows), plane, features, masked)
        if not rows.want.shape[0]:
            return x.new_zeros(0, self.config.draft_vocab_size), x
        state = x[rows.want.to(x.device)]  # [R, H]
        self.seen.extend((each, 0) for each in state)
        normed = self.frozen.adapted(self.live(), state, state.new_zeros(0, dtype=torch.long)).normed
        return summed(self.bare.head(normed.to(self.compute))).to(self.stream), x


class HeadRemembering(Remembering, HeadRollout):
    """A head's rollout that remembers the state behind each drafted token."""

    def __init__(self, head: Any, cache: Cache, plane: Any, features: Features | Kept) -> None:
        super().__init__(head, cache, plane, features)
        self.source, self.states, self.seen = "online", {}, head.seen


def adapted_head(space: Workspace) -> TrainedHead:
    """The drafter `head`, with an adapter behind it."""
    inner = TrainedHead(space)
    plain = inner.rollout
    inner.tree = False  # what is learnt are chains
    inner.rollout = HeadRemembering(AdaptedHead(plain.head), space.cache, plain.plane, inner.features)
    return inner


def _unwanted(r: Rows) -> Rows:
    """The same rows, with nobody asking for scores."""
    return Rows(
        r.tokens, r.positions, r.slots, r.lines, r.context, r.table, r.ancestors, r.want[:0], blocks=r.blocks
    )  # fmt: skip
