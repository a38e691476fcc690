"""Passes on a CPU (or any device without captured graphs), and the first layers run ahead of them.

`launch` starts a pass and `wait` returns its output. An overlapped pass runs in a worker thread (torch releases the
interpreter lock inside its operations); others run inline, which is faster.

`FirstLayers` runs the first layers of a pass ahead of it: for the last token of each sequence and for a chain of
drafted ones after it, in the slots of the pass, so that their K/V is the target's own. Promise: a state is reused only
for a row that the pass would have computed to the same bits: the same token in the same slot after the same rows, with
no other pass over the plane since. All other rows are computed. It knows tokens and slots, not the use of the states.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...engine.batch import BatchBuilder
from ...engine.cache import Cache, Plane
from ...engine.sampling import CHOICE, adjusts, filters, key
from ...types import Batch, Output, Sequence
from .. import Model, Part, ops
from ..rows import Rows, rows_of

LENT, TOUCHED = 32, 5  # rows of a pass whose logits have memory of their own: a small batch; of a usual draft


@dataclass(frozen=True)
class PendingPass:
    """A pass that was launched."""

    wait: Callable[[], Output]


class Eager:
    """Runs one model over its plane; rows whose first layers have run resume from there."""

    rounds: Any = None  # there is no loop beside the engine's

    def __init__(self, model: Model, plane: Plane, first_layers: FirstLayers | None = None) -> None:
        self.model, self.plane, self.first_layers = model, plane, first_layers
        logits = torch.empty(LENT, model.config.vocab_size)
        logits[:TOUCHED] = 0  # the system's pages are there before the first answer takes them
        self._logits = [logits[:n] for n in range(1, LENT + 1)]  # for 1, 2, … rows the same memory, in every pass
        self._worker: ThreadPoolExecutor | None = None

    def encode(self, sources: list[tuple[list[int], Tensor]]) -> None:
        if self.model.reader is not None:
            self.model.reader.read(sources, self.plane)

    def launch(self, batch: Batch, taps: tuple[int, ...], overlapped: bool) -> PendingPass:
        batch.logits = self._lent(len(batch.want))

        def run() -> Output:
            if self.first_layers is not None:
                output = self.first_layers.finish(batch, taps)
            else:
                output = self.model.forward(rows_of(batch), self.plane, taps=taps)
            if not output.leaders:
                highest, leaders = ops.top(output.logits)
                output.highest, output.leaders = highest.tolist(), leaders.tolist()
            output.choices = _choices(batch, output.logits, output.leaders)
            return output

        if not overlapped:
            return PendingPass(run)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "target")
        return PendingPass(self._worker.submit(run).result)

    def _lent(self, rows: int) -> Tensor | None:
        """Memory for the logits of a few rows. A pass that takes its own gets new pages again and again."""
        return self._logits[rows - 1] if 0 < rows <= LENT else None


def _choices(batch: Batch, logits: Tensor, leaders: list[int]) -> list[int]:
    """[R] what each row's sequence chooses there, where that takes no more than temperature and noise; else -1."""
    choosers = batch.choosers
    if all(seq.is_plain for seq in choosers):
        return leaders
    plain = [not (adjusts(seq) or filters(seq)) for seq in choosers]
    temperatures = [seq.params.temperature if bare else 0.0 for seq, bare in zip(choosers, plain, strict=True)]
    chosen: list[int] | None = leaders
    if any(temperatures):
        keys = [key(batch.owners[row].seed, batch.positions[row] + 1, CHOICE) for row in batch.want]
        chosen = ops.choose(logits, leaders, keys, temperatures)
    if chosen is None:  # greedy ones are known
        chosen, plain = leaders, [b and not t for b, t in zip(plain, temperatures, strict=True)]
    return [token if bare else -1 for token, bare in zip(chosen, plain, strict=True)]


@dataclass
class StartedChain:
    """One sequence's rows whose first layers have run: its last token first, then drafted ones."""

    line: int  # in the table
    length: int  # tokens of the sequence; -1: nothing can be reused
    passes: int  # the plane's count of passes when the last row was written
    tokens: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)  # [H] each


class FirstLayers:
    """Runs the first layers ahead of a pass, and keeps their states until that pass."""

    def __init__(self, model: Model, cache: Cache, plane: Plane) -> None:
        self.model, self.cache, self.plane = model, cache, plane
        self.layers = 0  # how many have run
        self.chains: dict[int, StartedChain] = {}  # by sequence
        self.saved = 0  # rows that resumed since the start

    def roots(self, seqs: list[Sequence], layers: int) -> Tensor:
        """The first layers over each sequence's last token; the plane must hold all tokens before it: [B, H]."""
        if layers != self.layers:
            self.chains, self.layers = {}, layers
        batch = BatchBuilder(self.cache)
        for seq in seqs:
            batch.pending(seq, len(seq.tokens) - 1, len(seq.tokens), want=False)
            self.chains[seq.id] = StartedChain(self.cache.rows[seq.id].line, len(seq.tokens), -1)
        return self._run(batch, seqs)

    def nodes(self, seqs: list[Sequence], tokens: list[int]) -> Tensor:
        """The first layers over one more drafted token of each started chain: [B, H]."""
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
            if chain.tokens and chain.passes != before:  # another pass has written since
                chain.length = -1
            chain.passes = self.plane.passes
            chain.tokens.append(token)
            chain.slots.append(slot)
            chain.states.append(state)
        for other in self.chains.values():  # chains write to their own slots only
            if other.passes == before:
                other.passes = self.plane.passes
        return states

    def finish(self, batch: Batch, taps: tuple[int, ...]) -> Output:
        """The whole pass over these rows. Rows that have started resume; all states are dropped."""
        kept, rows = self._reusable(batch, taps), rows_of(batch)
        self.chains = {}
        if not kept:
            return self.model.forward(rows, self.plane, taps=taps)
        self.saved += len(kept)
        x = self._states(rows, kept)
        output = self.model.forward(rows, self.plane, Part(start=self.layers), x, taps)
        if self.layers - 1 in taps:
            output.hidden[self.layers - 1] = x
        return output

    def _states(self, rows: Rows, kept: dict[int, Tensor]) -> Tensor:
        """The residual stream of all rows after the first layers: [T, H]. Rows that have not started run now."""
        states = torch.stack(list(kept.values()))  # [S, H]
        missing = [i for i in range(rows.count) if i not in kept]
        if not missing:
            return states
        x = states.new_empty(rows.count, states.shape[1])
        x[list(kept)] = states
        i = torch.tensor(missing)
        own = (rows.tokens[i], rows.positions[i], rows.slots[i], rows.lines[i], rows.context[i])
        ancestors = None if rows.ancestors is None else rows.ancestors[i]
        sources = None if rows.sources is None else rows.sources.at(i)
        others = Rows(*own, rows.table, ancestors, torch.empty(0, dtype=torch.long), sources=sources)
        x[missing] = first_states(self.model, others, self.plane, self.layers)
        return x

    def _reusable(self, b: Batch, taps: tuple[int, ...]) -> dict[int, Tensor]:
        """States [H] of the rows of this pass that have started. A row resumes only if all rows before it in its chain
        do."""
        kept: dict[int, Tensor] = {}
        if not self.chains or min(taps, default=self.layers) < self.layers - 1:
            return kept
        reached = dict.fromkeys(self.chains, 0)  # sequence -> rows of its chain that resume, so far
        for i, seq in enumerate(b.owners):
            chain, at = self.chains.get(seq.id), reached.get(seq.id, 0)
            if chain is None or chain.passes != self.plane.passes or at == len(chain.tokens):
                continue
            row = (b.tokens[i], b.positions[i], b.slots[i], b.context[i], b.lines[i])
            started = (chain.tokens[at], chain.length - 1 + at, chain.slots[at], chain.length, chain.line)
            if row == started and b.tails[i] == chain.slots[1 : at + 1]:
                kept[i] = chain.states[at]
                reached[seq.id] = at + 1
        return kept


def first_states(model: Model, rows: Rows, plane: Plane, layers: int) -> Tensor:
    """The residual stream after the first layers: [T, H]."""
    last = layers - 1
    return model.forward(rows, plane, Part(stop=layers, head=False), taps=(last,)).hidden[last]
