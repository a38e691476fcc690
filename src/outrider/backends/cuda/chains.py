"""A whole draft as one graph: K passes of a model, each choosing the token that the next one feeds.

The host says where each sequence stands and gets nothing back: the tokens stay where they were chosen (an *unread*
draft), and the verifying pass finds them there. Choices are made as the target would make them, under the same law and
the same noise. It knows a model and a plane; that they belong to a drafter is not its business.
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
from .capture import Field, Form, filled
from .graphs import LAW, Graphs, fill_laws, rung
from .kernels import elementwise, sampling
from .kernels.attention import Blocks
from .kernels.sampling import Laws
from .state import DEPTHS, I32, I64, PATCH

Ints = npt.NDArray[np.int64]
RECORDING = 10  # recording a pass takes about as long as running so many
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # more rows hardly cost a small model anything
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Shape:
    """Everything that a recording depends on."""

    batch: int
    length: int  # tokens drafted for each sequence
    filtered: bool

    def holds(self, other: Shape) -> bool:
        return other.batch <= self.batch and other.length <= self.length and other.filtered <= self.filtered


class Chains:
    """Drafts chains with one model over its plane.

    `again` is how many of the last committed tokens each draft begins with: 2 where the plane is the model's own, so
    that a step that accepted everything needs no special case (the row before the last comes out as the same bits).
    """

    def __init__(self, graphs: Graphs, part: Part, again: int, source: str) -> None:
        self.graphs, self.part, self.again, self.source = graphs, part, again, source
        self.at = graphs.state.claim()  # of its tokens among the unread
        self.recorded: dict[Shape, Recorded] = {}
        self.missed: dict[Shape, int] = {}

    def suits(self, seqs: list[Sequence]) -> bool:
        """Whether a recorded draft can stand in for one that looks at logits on the host."""
        return all(seq.rule == "match" and not adjusts(seq) and len(seq.tokens) >= self.again for seq in seqs)

    def draft(self, seqs: list[Sequence], budget: list[int]) -> Draft:
        """budget[i] tokens after each sequence, of which the plane holds all but the last `again`."""
        longest = next(n for n in LENGTHS if n >= max(budget))
        batch = next((n for n in BATCHES if n >= len(seqs)), rung(len(seqs)))
        recorded = self._recorded(Shape(batch, longest, any(filters(seq) for seq in seqs)))
        shape = recorded.shape
        recorded.fill(seqs, budget)
        share = max(budget) / recorded.shape.length  # a longer one may stand in for what is not recorded yet
        self.graphs.state.replay("draft", recorded.recording, recorded.form, min(share, 1.0))
        places = [[self.at + j * shape.batch + i for j in range(k)] for i, k in enumerate(budget)]
        if self.graphs.state.home:
            return Draft.pack((self._tree([-1 - at for at in some]) for some in places), self.graphs.state.unread)
        said = self.graphs.state.unread.tolist()  # another device verifies: it cannot read here
        return Draft.pack(self._tree([said[at] for at in some]) for some in places)

    def _recorded(self, shape: Shape) -> Recorded:
        """The draft of this shape; or a longer one, until its idle passes have cost as much as recording would."""
        if shape not in self.recorded:
            self.missed[shape] = missed = self.missed.get(shape, 0) + 1
            larger = [known for known in self.recorded if known.holds(shape)]
            nearest = min(larger, key=lambda known: (known.length, known.batch), default=None)
            if nearest and missed * (nearest.length - shape.length) <= RECORDING * shape.length:
                return self.recorded[nearest]
            self.recorded[shape] = Recorded(self, shape)
        return self.recorded[shape]

    def _tree(self, tokens: list[int]) -> Tree:
        return Tree(tokens, list(range(-1, len(tokens) - 1)), source=self.source)


class Recorded:
    """K passes in one graph."""

    def __init__(self, chains: Chains, shape: Shape) -> None:
        self.chains, self.shape = chains, shape
        b, k, again = shape.batch, shape.length, chains.again
        state = chains.graphs.state
        fields: dict[str, Field] = {"tokens": (I64, (b * again,))}
        for name in ("positions", "slots"):
            fields |= {f"first_{name}": (I64, (b * again,)), name: (I64, (k, b))}
        fields |= {"info": (I32, (k, b, 8)), "tail": (I32, (b, DEPTHS[-1])), "want": (I64, (b,))}
        fields |= {name: (dtype, (k, b) if name == "position" else (b,)) for name, dtype in LAW.items()}
        fields |= {"place": (I64, (PATCH,)), "slot": (I32, (PATCH,))}
        self.form = Form(state.driver, fields)
        self.fill([], [])
        self.form.send()
        self.recording = state.record(self._work)

    def _work(self) -> None:
        d, state, b, at = self.form.device, self.chains.graphs.state, self.shape.batch, self.chains.at
        tokens = elementwise.start_pass(d["tokens"], state.unread, d["place"], d["slot"], state.table)  # [B * again]
        logits = self._pass(0, tokens, d["first_positions"], d["first_slots"])
        for j in range(self.shape.length):
            if j:
                logits = self._pass(j, tokens, d["positions"][j], d["slots"][j])
            law = Laws(*(d[name][j] if name == "position" else d[name] for name in LAW))
            tokens, _, _ = sampling.choose(logits, law, self.shape.filtered)  # [B]
            state.unread[at + j * b : at + (j + 1) * b].copy_(tokens)

    def _pass(self, j: int, tokens: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        d, graphs = self.form.device, self.chains.graphs
        blocks = Blocks(d["info"][j], d["tail"], graphs.state.table, graphs.state.scratch(graphs.model))
        want = d["want"]
        rows = Rows(tokens, positions, slots, slots, slots, graphs.state.table, None, want, blocks=blocks)
        return graphs.model.forward(rows, graphs.plane, self.chains.part).logits  # [B, V]

    def fill(self, seqs: list[Sequence], budget: list[int]) -> None:
        """Where each sequence stands; places without a sequence write to the slot that nobody owns."""
        a, again = self.form.next(), self.chains.again
        state = self.chains.graphs.state
        for name, rest in (("positions", 0), ("slots", state.padding), ("info", 0)):
            a[name].fill(rest)
        lengths = [len(seq.tokens) for seq in seqs]
        rows = [state.cache.rows[seq.id] for seq in seqs]
        filled(a["tokens"], [t for seq in seqs for t in seq.tokens[-again:]], 0)
        filled(a["first_positions"], [n - again + i for n in lengths for i in range(again)], 0)
        last = [slot for row, n in zip(rows, lengths, strict=True) for slot in row.slots[n - again : n]]
        filled(a["first_slots"], last, state.padding)
        a["want"][:] = range(again - 1, again * self.shape.batch, again)
        fill_laws(a | {"position": a["position"][0]}, seqs, lengths)
        self._place(a, rows, np.array(lengths, dtype=np.int64), np.array(budget, dtype=np.int64))
        if seqs:
            state.patch(a)
        else:
            a["place"][:] = -1

    def _place(self, a: dict[str, Any], rows: list[Row], lengths: Ints, budget: Ints) -> None:
        """Pass j feeds the token that pass j - 1 drafted, which lives in spare slot j - 1. [B] sequences, [K, B] rows.

        What lies beyond a budget is computed in vain, and nowhere.
        """
        b, k, again = len(rows), self.shape.length, self.chains.again
        for at, row in enumerate(rows):
            a["tail"][at, : len(row.spare)] = row.spare[: DEPTHS[-1]]
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
