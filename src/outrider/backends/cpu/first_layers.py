"""Passes whose first layers have already run: the verifying pass resumes from the kept states.

A drafter that guesses from the target's first layers computes what the verifying pass would compute again. Here those
layers run once: for the last token of each sequence and for a chain of drafted ones after it, in the slots in which the
pass will look for them, so that their K/V is already the target's own.

Promise: a state is reused only for a row that the pass would have computed to the same bits: the same token in the same
slot after the same rows, with no other pass over the plane since. Everything else runs again. It knows tokens and
slots, not what a drafter makes of the states.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.batch import BatchBuilder
from ...engine.cache import Cache, Plane
from ...types import Batch, Output, Sequence
from .. import Model, Part
from ..rows import Rows, rows_of


@dataclass
class StartedChain:
    """One sequence's rows whose first layers have run: its last token first, then drafted ones."""

    line: int  # in the table
    length: int  # tokens of the sequence
    passes: int  # what the plane counted when the last of them was written
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # [H] each


class Reusable(NamedTuple):
    """Rows of a pass whose first layers need not run."""

    rows: list[int]
    states: list[Tensor]  # [H] each, after the layer before `layers`


class FirstLayers:
    """Runs the first layers ahead of a pass, and keeps their states until that pass."""

    def __init__(self, model: Model, cache: Cache, plane: Plane) -> None:
        self.model, self.cache, self.plane = model, cache, plane
        self.layers = 0  # how many have run
        self.chains: dict[int, StartedChain] = {}  # by sequence
        self.saved = 0  # rows that resumed, ever

    # ------------------------------------------------------------ for drafters

    def roots(self, seqs: list[Sequence], layers: int) -> Tensor:
        """The first layers over each sequence's last token, of which the plane must hold all before: [B, H]."""
        if layers != self.layers:
            self.chains, self.layers = {}, layers
        batch = BatchBuilder(self.cache)
        for seq in seqs:
            batch.pending(seq, len(seq.tokens) - 1, len(seq.tokens), want=False)
            self.chains[seq.id] = StartedChain(self.cache.rows[seq.id].line, len(seq.tokens), -1)
        return self._run(batch, seqs)

    def nodes(self, seqs: list[Sequence], tokens: list[int]) -> Tensor:
        """The same over one more drafted token of each, after those that have started: [B, H]."""
        batch = BatchBuilder(self.cache)
        for seq, token in zip(seqs, tokens, strict=True):
            drafted = [*self.chains[seq.id].tokens[1:], token]
            batch.nodes(seq, drafted, list(range(-1, len(drafted) - 1)), [len(drafted) - 1], range(len(drafted)))
        return self._run(batch, seqs)

    def _run(self, batch: Batch, seqs: list[Sequence]) -> Tensor:
        before = self.plane.passes
        states = first_states(self.model, rows_of(batch), self.plane, self.layers)  # [B, H]
        for seq, token, slot, state in zip(seqs, batch.tokens, batch.slots, states, strict=True):
            chain = self.chains[seq.id]
            if chain.tokens and chain.passes != before:  # another pass wrote here since: nothing can be reused
                chain.length = -1
            chain.passes = self.plane.passes
            chain.tokens.append(token)
            chain.slots.append(slot)
            chain.states.append(state)
        for other in self.chains.values():  # each writes in its own slots and disturbs no other
            if other.passes == before:
                other.passes = self.plane.passes
        return states

    # ------------------------------------------------------------ for the runner

    def finish(self, batch: Batch, taps: tuple[int, ...]) -> Output:
        """The whole pass over these rows; those that have started are resumed, once."""
        reusable, rows = self._reusable(batch, taps), rows_of(batch)
        self.chains = {}
        if not reusable.rows:
            return self.model.forward(rows, self.plane, taps=taps)
        self.saved += len(reusable.rows)
        x = self._states(rows, reusable)
        output = self.model.forward(rows, self.plane, Part(start=self.layers), x, taps)
        if self.layers - 1 in taps:
            output.hidden[self.layers - 1] = x
        return output

    def _states(self, rows: Rows, reusable: Reusable) -> Tensor:
        """The residual stream after the first layers, of all rows: [T, H]. Rows that have not started run now."""
        kept = torch.stack(reusable.states)  # [S, H]
        started = set(reusable.rows)
        missing = [i for i in range(rows.count) if i not in started]
        if not missing:
            return kept
        x = kept.new_empty(rows.count, kept.shape[1])
        x[reusable.rows] = kept
        x[missing] = first_states(self.model, _some(rows, missing), self.plane, self.layers)
        return x

    def _reusable(self, b: Batch, taps: tuple[int, ...]) -> Reusable:
        """Rows of this pass that have started. A row resumes only if all that it sees of its chain does."""
        found = Reusable([], [])
        if not self.chains or min(taps, default=self.layers) < self.layers - 1:
            return found
        reached = dict.fromkeys(self.chains, 0)  # sequence -> rows of its chain that resume, so far
        for i, seq in enumerate(b.owners):
            chain, at = self.chains.get(seq.id), reached.get(seq.id, 0)
            if chain is None or chain.passes != self.plane.passes or at == len(chain.tokens):
                continue
            row = (b.tokens[i], b.positions[i], b.slots[i], b.context[i], b.lines[i])
            started = (chain.tokens[at], chain.length - 1 + at, chain.slots[at], chain.length, chain.line)
            if row == started and b.tails[i] == chain.slots[1 : at + 1]:
                found.rows.append(i)
                found.states.append(chain.states[at])
                reached[seq.id] = at + 1
        return found


def first_states(model: Model, rows: Rows, plane: Plane, layers: int) -> Tensor:
    """The residual stream after the first layers: [T, H]."""
    last = layers - 1
    return model.forward(rows, plane, Part(stop=layers, head=False), taps=(last,)).hidden[last]


def _some(rows: Rows, which: Listing[int]) -> Rows:
    """These rows alone, without logits."""
    i = torch.tensor(which)
    ancestors = None if rows.ancestors is None else rows.ancestors[i]
    own = (rows.tokens[i], rows.positions[i], rows.slots[i], rows.lines[i], rows.context[i])
    return Rows(*own, rows.table, ancestors, torch.empty(0, dtype=torch.long))
