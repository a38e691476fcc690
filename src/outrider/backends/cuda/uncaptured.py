"""Passes that run once on a GPU, operation by operation, and the time of a recorded chain.

Recording a pass that runs once over a few hundred rows takes longer than running it. Chains are replayed, and so they
are timed as recorded. It knows rows and parts of a model, not what they are compared for.
"""

from __future__ import annotations

import time

import torch

from ...engine.batch import BatchBuilder
from ...engine.cache import Cache, Plane
from ...types import Sequence
from .. import Model, Part
from ..rows import Rows, rows_of
from .capture import Driver
from .chains import Chains
from .graphs import Graphs, group_rows
from .kernels.attention import Blocks
from .state import DEPTHS, I32, DeviceState

CHAIN = 4  # tokens of a chain that is timed


class UncapturedPasses:
    """A model over a plane of a cache whose sequences have all their slots."""

    def __init__(self, model: Model, cache: Cache, plane: Plane) -> None:
        self.device = model.device
        self.graphs = Graphs(model, plane, DeviceState(cache, Driver(self.device), 1))
        self._chains: dict[Part, Chains] = {}

    def rows(self, batch: BatchBuilder) -> Rows:
        """The batch on the model's device, grouped for its kernels."""
        state, device, host = self.graphs.state, self.device, rows_of(batch)
        groups = group_rows(batch, self.graphs.rows_per_block)
        depth = next(n for n in DEPTHS if n >= max(len(group[8]) for group in groups))
        info = torch.tensor([group[:8] for group in groups], dtype=I32)  # [N, 8]
        tail = torch.zeros(len(groups), depth, dtype=I32)
        for i, group in enumerate(groups):
            tail[i, : len(group[8])] = torch.tensor(group[8], dtype=I32)
        blocks = Blocks(info.to(device), tail.to(device), state.table, state.scratch(self.graphs.model))
        tokens, positions, slots, want = (x.to(device) for x in (host.tokens, host.positions, host.slots, host.want))
        return Rows(tokens, positions, slots, slots, slots, state.table, None, want, blocks=blocks)

    def seconds(self, seq: Sequence, part: Part, repeats: int = 3) -> float:
        """Seconds per token of a recorded chain of this part: the minimum of a few.

        It writes to the slots of the sequence's last token and of its drafts.
        """
        if part not in self._chains:
            self._chains[part] = self.graphs.chains(part, 1, "timing")
            self._chain_seconds(part, seq)  # records
        return min(self._chain_seconds(part, seq) for _ in range(repeats)) / CHAIN

    def _chain_seconds(self, part: Part, seq: Sequence) -> float:
        self._synchronize()
        start = time.perf_counter()
        self._chains[part].draft([seq], [CHAIN])
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
