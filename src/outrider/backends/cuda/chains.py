"""Chains of tokens as one graph: K passes of a model, each feeding the token that the pass before it sampled.

The host sends where each sequence ends and receives nothing: the tokens stay on the device (an *unread* draft), and the
verifying pass reads them there. They are sampled as the target samples, with the same parameters and the same noise.
It knows a model and a plane, not their use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...engine.cache import Row
from ...engine.sampling import adjusts, filters
from ...types import Draft, Sequence, Tree
from .. import Part
from ..rows import Rows
from .capture import Field, PinnedBuffer, fill_padded
from .graphs import SAMPLING, Graphs, fill_sampling, padded_size
from .kernels import elementwise, sampling
from .kernels.attention import Blocks
from .kernels.sampling import Laws
from .state import DEPTHS, I32, I64, PATCH

Ints = npt.NDArray[np.int64]
RECORDING = 10  # recording a pass takes about as long as running this many
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # few sizes: more rows cost a small model little
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class ChainShape:
    """Everything that a recorded chain depends on."""

    batch: int
    length: int  # tokens of each sequence
    filtered: bool  # whether some sequence samples with top-k, top-p or min-p

    def holds(self, other: ChainShape) -> bool:
        return other.batch <= self.batch and other.length <= self.length and other.filtered <= self.filtered


class Chains:
    """Chains of one model over its plane.

    `again` is how many of the last committed tokens each chain feeds once more: 2 where the plane is the model's own,
    so that a step that accepted everything needs no special case (the row before the last has the same bits).
    """

    def __init__(self, graphs: Graphs, part: Part, again: int, source: str) -> None:
        self.graphs, self.part, self.again, self.source = graphs, part, again, source
        self.offset = graphs.state.claim()  # of its tokens in `unread`
        self.recorded: dict[ChainShape, RecordedChain] = {}
        self.missed: dict[ChainShape, int] = {}  # requests for a shape that was not recorded

    def suits(self, seqs: list[Sequence]) -> bool:
        """Whether the device can sample for these sequences: no logits are changed on the host."""
        return all(seq.rule == "match" and not adjusts(seq) and len(seq.tokens) >= self.again for seq in seqs)

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        """budget[i] tokens after each sequence, of which the plane holds all but the last `again`."""
        state, longest = self.graphs.state, next(n for n in LENGTHS if n >= max(budget))
        batch = next((n for n in BATCHES if n >= len(seqs)), padded_size(len(seqs)))
        recorded = self._recorded(ChainShape(batch, longest, any(filters(seq) for seq in seqs)))
        shape = recorded.shape
        recorded.fill(seqs, budget)
        share = max(budget) / shape.length  # the recorded chain may be longer
        state.replay("draft", recorded.recording, recorded.inputs, min(share, 1.0))
        indices = [[self.offset + j * shape.batch + i for j in range(k)] for i, k in enumerate(budget)]
        if state.home:
            return Draft.pack((self._tree([-1 - index for index in own]) for own in indices), state.unread)
        unread = state.unread.tolist()  # another device verifies, which cannot read this one's memory
        return Draft.pack(self._tree([unread[index] for index in own]) for own in indices)

    def _recorded(self, shape: ChainShape) -> RecordedChain:
        """The chain of this shape; or a longer one, until its idle passes have cost as much as a recording."""
        if shape not in self.recorded:
            self.missed[shape] = missed = self.missed.get(shape, 0) + 1
            larger = [other for other in self.recorded if other.holds(shape)]
            nearest = min(larger, key=lambda other: (other.length, other.batch), default=None)
            if nearest and missed * (nearest.length - shape.length) <= RECORDING * shape.length:
                return self.recorded[nearest]
            self.recorded[shape] = RecordedChain(self, shape)
        return self.recorded[shape]

    def _tree(self, tokens: list[int]) -> Tree:
        return Tree(tokens, list(range(-1, len(tokens) - 1)), source=self.source)


class RecordedChain:
    """K passes in one graph."""

    def __init__(self, chains: Chains, shape: ChainShape) -> None:
        self.chains, self.shape = chains, shape
        b, k, again = shape.batch, shape.length, chains.again
        state = chains.graphs.state
        fields: dict[str, Field] = {"tokens": (I64, (b * again,))}
        for name in ("positions", "slots"):
            fields |= {f"first_{name}": (I64, (b * again,)), name: (I64, (k, b))}
        fields |= {"info": (I32, (k, b, 8)), "tail": (I32, (b, DEPTHS[-1])), "want": (I64, (b,))}
        fields |= {name: (dtype, (k, b) if name == "position" else (b,)) for name, dtype in SAMPLING.items()}
        fields |= {"place": (I64, (PATCH,)), "slot": (I32, (PATCH,))}
        self.inputs = PinnedBuffer(state.driver, fields)
        self.fill([], [])
        self.inputs.send()
        self.recording = state.record(self._work)

    def _work(self) -> None:
        d, state, b, offset = self.inputs.device, self.chains.graphs.state, self.shape.batch, self.chains.offset
        tokens = elementwise.start_pass(d["tokens"], state.unread, d["place"], d["slot"], state.table)  # [B * again]
        logits = self._pass(0, tokens, d["first_positions"], d["first_slots"])
        for j in range(self.shape.length):
            if j:
                logits = self._pass(j, tokens, d["positions"][j], d["slots"][j])
            laws = Laws(*(d[name][j] if name == "position" else d[name] for name in SAMPLING))
            tokens, _, _ = sampling.choose(logits, laws, self.shape.filtered)  # [B]
            state.unread[offset + j * b : offset + (j + 1) * b].copy_(tokens)

    def _pass(self, j: int, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        d, graphs, table = self.inputs.device, self.chains.graphs, self.chains.graphs.state.table
        blocks = Blocks(d["info"][j], d["tail"], table, graphs.state.scratch(graphs.model))
        rows = Rows(tokens, positions, slots, slots, slots, table, None, d["want"], blocks=blocks)
        return graphs.model.forward(rows, graphs.plane, self.chains.part).logits  # [B, V]

    def fill(self, seqs: list[Sequence], budget: list[int]) -> None:
        """Write where each sequence ends, padded: padding writes to a slot that no sequence owns."""
        a, again, state = self.inputs.next(), self.chains.again, self.chains.graphs.state
        for name, padding in (("positions", 0), ("slots", state.padding), ("info", 0)):
            a[name].fill(padding)
        lengths = [len(seq.tokens) for seq in seqs]
        rows = [state.cache.rows[seq.id] for seq in seqs]
        fill_padded(a["tokens"], [t for seq in seqs for t in seq.tokens[-again:]], 0)
        fill_padded(a["first_positions"], [n - again + i for n in lengths for i in range(again)], 0)
        last = [slot for row, n in zip(rows, lengths, strict=True) for slot in row.slots[n - again : n]]
        fill_padded(a["first_slots"], last, state.padding)
        a["want"][:] = range(again - 1, again * self.shape.batch, again)
        fill_sampling(a | {"position": a["position"][0]}, seqs, lengths)
        self._fill_passes(a, rows, np.array(lengths, dtype=np.int64), np.array(budget, dtype=np.int64))
        state.patch(a) if seqs else a["place"].fill(-1)

    def _fill_passes(self, a: dict[str, Any], rows: list[Row], lengths: Ints, budget: Ints) -> None:
        """Pass j feeds the token that pass j - 1 sampled, in spare slot j - 1. [B] sequences, [K, B] rows.

        Rows beyond a budget are computed as padding.
        """
        b, k, again = len(rows), self.shape.length, self.chains.again
        for lane, row in enumerate(rows):
            a["tail"][lane, : len(row.spare)] = row.spare[: DEPTHS[-1]]
        j, i = np.arange(k)[:, None], np.arange(b)
        real = (j >= 1) & (j < budget)  # [K, B]
        a["position"][:, :b] = lengths + j
        a["positions"][:, :b] = np.where(real, lengths - 1 + j, 0)
        spare = a["tail"][:b, : max(k - 1, 1)].T  # [K-1, B]
        a["slots"][1:, :b] = np.where(real[1:], spare[: k - 1], self.chains.graphs.state.padding)
        lines = np.array([row.line for row in rows], dtype=np.int64)
        columns = (np.where(j == 0, again * i, i), np.where(j == 0, again, real), lines, lengths, lengths + j)
        for column, values in enumerate(columns):
            a["info"][:, :b, column] = values
        a["info"][0, :b, 4] = lengths - again + 1
