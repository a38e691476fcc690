"""Rows that are run once on a GPU, operation by operation, and what a recorded draft of them takes.

A search scores each set of blocks once over a few hundred rows: recording such a pass would take longer than running
it, and with so many rows the device, not the host, sets the pace. What a drafted token costs is another matter: a
drafter replays recorded chains, and so those are timed. It knows rows and parts of a model, not what is searched.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from ...backends.cuda.capture import Driver
from ...engine.batch import BatchBuilder
from ...engine.cache import Cache, Plane
from ...types import Sequence
from .. import Model, Part
from ..rows import Rows, rows_of
from .graphs import Graphs, grouped
from .kernels.attention import Blocks
from .state import DEPTHS, I32, DeviceState

CHAIN = 4  # tokens of a draft that is timed


class UncapturedPasses:
    """A model over a plane of a cache whose sequences have all their slots."""

    def __init__(self, model: Model, cache: Cache, plane: Plane) -> None:
        self.device = model.device
        self.graphs = Graphs(model, plane, DeviceState(cache, Driver(self.device), 1))
        self._chains: dict[Part, Any] = {}

    def rows(self, packing: BatchBuilder) -> Rows:
        """These rows where the model lives, grouped as its kernels want them."""
        state, given = self.graphs.state, rows_of(packing)
        blocks = grouped(packing, self.graphs.together)
        depth = next(n for n in DEPTHS if n >= max(len(block[8]) for block in blocks))
        info = torch.tensor([block[:8] for block in blocks], dtype=I32)  # [N, 8]
        tail = torch.zeros(len(blocks), depth, dtype=I32)
        for i, block in enumerate(blocks):
            tail[i, : len(block[8])] = torch.tensor(block[8], dtype=I32)
        tokens, positions, slots, want = (
            getattr(given, name).to(self.device) for name in ("tokens", "positions", "slots", "want")
        )
        laid = Blocks(info.to(self.device), tail.to(self.device), state.table, state.scratch(self.graphs.model))
        return Rows(tokens, positions, slots, slots, slots, state.table, None, want, blocks=laid)

    def seconds(self, seq: Sequence, part: Part, repeats: int = 3) -> float:
        """Of one token of a recorded draft with only these blocks: the fastest of a few.

        It writes to the places of the sequence's last token and of its drafts.
        """
        if part not in self._chains:
            self._chains[part] = self.graphs.chains(part, 1, "skip")
            self._draft(part, seq)  # records
        return min(self._draft(part, seq) for _ in range(repeats)) / CHAIN

    def _draft(self, part: Part, seq: Sequence) -> float:
        self._wait()
        begin = time.perf_counter()
        self._chains[part].draft([seq], [CHAIN])
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
