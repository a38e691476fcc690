"""A pass that has begun: rows whose first layers ran before the rest of their pass did.

A drafter that guesses from the target's first layers computes what the verifying pass would compute again. Here those
layers run once: for the last token of each sequence and for a chain of drafted ones after it, in the slots in which the
pass will look for them, so that their K/V is already the target's own. The pass then goes on from the kept states.

The promise: a state is handed on only for a row that the pass would have computed to the same bits: the same token in
the same slot after the same rows, with nothing written to the plane by anybody else since. Everything else runs anew.
It knows tokens and slots; what a drafter makes of the states is not its business, and it takes nobody's word for them.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.cache import Cache, Packing, Plane
from ...types import Output, Rows, Sequence
from .. import Model, Part


@dataclass
class Chain:
    """One sequence's rows that have begun: its last token first, then drafted ones."""

    line: int  # in the table
    length: int  # tokens of the sequence
    written: int  # what the plane counted when the last of them was
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # [H] each


class Shared(NamedTuple):
    """What a pass need not compute."""

    rows: list[int]  # of the pass
    states: list[Tensor]  # [H] each, after the layer before `layers`


class Begun:
    """Runs the first layers ahead of a pass, and keeps what they say until that pass."""

    def __init__(self, model: Model, cache: Cache, plane: Plane) -> None:
        self.model, self.cache, self.plane = model, cache, plane
        self.layers = 0  # how many have run
        self.chains: dict[int, Chain] = {}  # sequence -> its rows
        self.saved = 0  # rows that a pass found begun, ever

    # ------------------------------------------------------------ for drafters

    def roots(self, seqs: list[Sequence], layers: int) -> Tensor:
        """The first layers over each sequence's last token, of which the plane must hold all before: [B, H]."""
        if layers != self.layers:
            self.chains, self.layers = {}, layers
        packed = Packing(self.cache)
        for seq in seqs:
            packed.pending(seq, len(seq.tokens) - 1, len(seq.tokens), want=False)
            self.chains[seq.id] = Chain(self.cache.rows[seq.id].line, len(seq.tokens), -1)
        return self._run(packed, seqs)

    def nodes(self, seqs: list[Sequence], tokens: list[int]) -> Tensor:
        """The same over one more drafted token of each, after those that have begun: [B, H]."""
        packed = Packing(self.cache)
        for seq, token in zip(seqs, tokens, strict=True):
            drafted = [*self.chains[seq.id].tokens[1:], token]
            packed.nodes(seq, drafted, list(range(-1, len(drafted) - 1)), [len(drafted) - 1], range(len(drafted)))
        return self._run(packed, seqs)

    def _run(self, packed: Packing, seqs: list[Sequence]) -> Tensor:
        before = self.plane.written
        states = _first_layers(self.model, packed.rows(), self.plane, self.layers)  # [B, H]
        self.plane.written += 1
        for seq, token, slot, state in zip(seqs, packed.tokens, packed.slots, states, strict=True):
            chain = self.chains[seq.id]
            if chain.tokens and chain.written != before:  # somebody wrote here since: what was begun is worth nothing
                chain.length = -1
            chain.written = self.plane.written
            chain.tokens.append(token)
            chain.slots.append(slot)
            chain.states.append(state)
        for other in self.chains.values():  # our own writing, each in its own slots, disturbs no one
            if other.written == before:
                other.written = self.plane.written
        return states

    # ------------------------------------------------------------ for the runner

    def finish(self, rows: Rows, taps: tuple[int, ...]) -> Output:
        """The whole pass over these rows; what has begun is gone on from, once."""
        shared = self._shared(rows, taps)
        self.chains = {}
        self.plane.written += 1
        if not shared.rows:
            return self.model.forward(rows, self.plane, taps=taps)
        self.saved += len(shared.rows)
        x = self._states(rows, shared)
        output = self.model.forward(rows, self.plane, Part(start=self.layers), x, taps)
        if self.layers - 1 in taps:
            output.hidden[self.layers - 1] = x
        return output

    def _states(self, rows: Rows, shared: Shared) -> Tensor:
        """The stream after the first layers, of all rows: [T, H]. Those that have not begun run now."""
        known = torch.stack(shared.states)  # [S, H]
        begun = set(shared.rows)
        missing = [i for i in range(rows.count) if i not in begun]
        if not missing:
            return known
        x = known.new_empty(rows.count, known.shape[1])
        x[shared.rows] = known
        x[missing] = _first_layers(self.model, _some(rows, missing), self.plane, self.layers)
        return x

    def _shared(self, rows: Rows, taps: tuple[int, ...]) -> Shared:
        """Rows of this pass that have begun. A row goes on only if all that it sees of its chain does."""
        found = Shared([], [])
        packed: Packing | None = rows.packing
        if packed is None or not self.chains or min(taps, default=self.layers) < self.layers - 1:
            return found
        reached = dict.fromkeys(self.chains, 0)  # sequence -> rows of its chain that go on, so far
        for i, seq in enumerate(packed.owners):
            chain, at = self.chains.get(seq.id), reached.get(seq.id, 0)
            if chain is None or chain.written != self.plane.written or at == len(chain.tokens):
                continue
            mine = (packed.tokens[i], packed.positions[i], packed.slots[i], packed.context[i], packed.lines[i])
            begun = (chain.tokens[at], chain.length - 1 + at, chain.slots[at], chain.length, chain.line)
            if mine == begun and packed.tails[i] == chain.slots[1 : at + 1]:
                found.rows.append(i)
                found.states.append(chain.states[at])
                reached[seq.id] = at + 1
        return found


def _first_layers(model: Model, rows: Rows, plane: Plane, layers: int) -> Tensor:
    """The residual stream after the first layers: [T, H]."""
    last = layers - 1
    return model.forward(rows, plane, Part(stop=layers, head=False), taps=(last,)).hidden[last]


def _some(rows: Rows, which: Listing[int]) -> Rows:
    """These rows alone; nobody wants their logits yet."""
    i = torch.tensor(which)
    ancestors = None if rows.ancestors is None else rows.ancestors[i]
    own = (rows.tokens[i], rows.positions[i], rows.slots[i], rows.lines[i], rows.context[i])
    return Rows(*own, rows.table, ancestors, torch.empty(0, dtype=torch.long))
