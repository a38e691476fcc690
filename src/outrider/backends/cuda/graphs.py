"""Passes on a GPU as captured graphs: one launch for a whole pass, one small copy back.

A pass is recorded once for each shape (rows and wanted rows, padded to a few sizes) and replayed with new inputs:
tokens, slots, what each row attends to, how it samples. The graph updates the device's table, runs the model and
samples every wanted row; the host receives choices, and logits only where it reads them. Padding rows write to a slot
that no sequence owns.

Promise: the text does not depend on any of this, because kernels compute each row as if it were alone. Tokens that the
host has not read are taken from the device's unread tokens. It knows rows, not how they were drafted.

`Chains` records K passes as one graph, each feeding the token that the pass before it sampled. The host sends where
each sequence ends and receives nothing: the tokens stay on the device (an *unread* draft), sampled as the target does.

`UncapturedPasses` runs rows once, operation by operation: recording a pass takes longer than running it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence as Listing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...engine.cache import Cache, Plane, Row
from ...engine.sampling import adjusts, filters
from ...types import Batch, Draft, Output, Sequence, Tree
from .. import WHOLE, Model, Part
from ..rows import Rows, rows_of
from .capture import Driver, Field, PinnedBuffer, fill_padded
from .kernels import attention, elementwise, sampling
from .kernels.sampling import Laws
from .state import DEPTHS, F32, F64, I32, I64, PATCH, DeviceState, seconds

Ints = npt.NDArray[np.int64]
CHAIN_RECORDING = 10  # recording a pass takes about as long as running this many
BATCHES = (1, 2, 4, 8, 16, 32, 64)  # few sizes: more rows cost a small model little
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64)
ROW_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
WANTED_SIZES = (16, 64, 256, 1024)  # wanted rows of a pass that does not want all of them
CHEAP_ROWS = 64  # up to here a pass takes the time of reading its weights; beyond, computing takes time too
TIMED_CHAIN = 4  # tokens of a chain that is timed
MISSES = 16  # requests for a shape before it is recorded, if a larger one is recorded
SAMPLING: dict[str, torch.dtype] = {
    "seed": I64, "position": I64, "temperature": F64, "top_k": I64, "top_p": F64, "min_p": F64
}  # fmt: skip


def padded_size(n: int) -> int:
    """The size that a number of rows is padded to."""
    return next((size for size in ROW_SIZES if size >= n), -(-n // 256) * 256)


@dataclass(frozen=True)
class PassShape:
    """Everything that a recorded pass depends on."""

    rows: int
    wanted: int  # equal to `rows`: all of them, in their order
    depth: int
    filtered: bool  # whether some row samples with top-k, top-p or min-p
    part: Part
    taps: tuple[int, ...]

    def holds(self, other: PassShape) -> bool:
        """Whether a pass of the other shape can be padded to this one at little cost."""
        same = (self.part, self.taps, self.wanted == self.rows) == (other.part, other.taps, other.wanted == other.rows)
        return (
            same
            and other.rows <= self.rows <= (2 * other.rows + 16 if self.rows <= CHEAP_ROWS else other.rows)
            and other.wanted <= self.wanted
            and other.depth <= self.depth
            and other.filtered <= self.filtered
        )


class RecordedPass:
    """One recorded pass over a model."""

    def __init__(self, graphs: Graphs, shape: PassShape) -> None:
        self.graphs, self.shape = graphs, shape
        t, r, driver = shape.rows, shape.wanted, graphs.state.driver
        fields: dict[str, Field] = dict.fromkeys(("tokens", "positions", "slots"), (I64, (t,)))
        fields |= {"info": (I32, (t, 8)), "tail": (I32, (t, shape.depth)), "want": (I64, (r,))}
        fields |= {name: (dtype, (r,)) for name, dtype in SAMPLING.items()}
        fields |= {"place": (I64, (PATCH,)), "slot": (I32, (PATCH,))}
        self.inputs = PinnedBuffer(driver, fields)
        self.results = PinnedBuffer(driver, {"choices": (I64, (r,)), "tokens": (I64, (t,)), "highest": (F32, (r,))})
        self.fill(None, (), ())
        self.inputs.send()
        self.recording = graphs.state.record(self._work)

    def _work(self) -> Output:
        d, results, state, shape = self.inputs.device, self.results.device, self.graphs.state, self.shape
        tokens = elementwise.start_pass(d["tokens"], state.unread, d["place"], d["slot"], state.table)  # [T]
        blocks = state.blocks(d["info"], d["tail"], self.graphs.model, shape.rows > CHEAP_ROWS)
        unused = d["slots"]
        rows = Rows(tokens, d["positions"], d["slots"], unused, unused, state.table, None, d["want"], blocks=blocks)
        output = self.graphs.model.forward(rows, self.graphs.plane, shape.part, taps=shape.taps)
        results["tokens"].copy_(tokens)
        if shape.part.head:
            laws = Laws(*(d[name] for name in SAMPLING))
            choices, highest, _ = sampling.choose(output.logits, laws, shape.filtered)
            results["choices"].copy_(choices)
            results["highest"].copy_(highest)
        return output

    def fill(self, batch: Batch | None, choosers: Listing[Sequence], blocks: Listing[Block]) -> None:
        """Write the inputs of these rows (or of none), padded."""
        arrays = self.inputs.next()
        fill_rows(arrays, batch, blocks, self.graphs.state)
        fill_sampling(arrays, choosers, [batch.positions[i] + 1 for i in batch.want] if batch else [])


class Graphs:
    """Runs one model over its plane; every pass is captured."""

    def __init__(self, model: Model, plane: Plane, state: DeviceState) -> None:
        self.model, self.plane, self.state = model, plane, state
        self.rows_per_block = attention.rows_per_block(model.config.heads, model.config.kv_heads)
        self.passes: dict[PassShape, RecordedPass] = {}
        self.missed: dict[PassShape, int] = {}  # requests for a shape that was not recorded
        self.rounds: Any = None  # `rounds.Rounds`, where this is the target's
        state.add_reader(model, plane)

    def encode(self, sources: list[tuple[list[int], Tensor]]) -> None:
        """Passes read their sources themselves."""

    def launch(self, batch: Batch, taps: tuple[int, ...], overlapped: bool) -> PendingPass:
        return PendingPass(self.state, *self._replay("verify", batch, WHOLE, taps), batch)

    def warm(self, rows: int) -> None:
        """Record the passes of plain decoding up to this many rows, before requests arrive."""
        self.prepare(size for size in ROW_SIZES if size <= padded_size(rows))
        self.state.clock.take_phases()  # belong to no step

    def prepare(self, sizes: Iterable[int]) -> None:
        """Record the passes of plain decoding over so many rows; their kernels are compiled side by side."""
        with self.state.together():
            for size in sorted({padded_size(rows) for rows in sizes}):
                shape = PassShape(size, size, DEPTHS[0], False, WHOLE, ())
                if shape not in self.passes:
                    self.passes[shape] = RecordedPass(self, shape)

    def logits(self, batch: Batch, part: Part = WHOLE) -> Tensor:
        """Logits of the wanted rows [R, V], on the device, without waiting; empty for a part without logits."""
        phase = "draft" if part.head else "read"  # a pass without logits only fills the plane
        return self._replay(phase, batch, part, ())[1].logits[: len(batch.want)]

    def states(self, batch: Batch, layers: int) -> Tensor:
        """The residual stream of all rows after the first `layers` layers [T, H], on the device, without waiting."""
        part, tap = Part(stop=layers, head=False), layers - 1
        return self._replay("draft", batch, part, (tap,))[1].hidden[tap][: batch.count]

    def chains(self, part: Part, again: int, source: str) -> Chains:
        return Chains(self, part, again, source)

    def _replay(self, phase: str, batch: Batch, part: Part, taps: tuple[int, ...]) -> tuple[RecordedPass, Output]:
        blocks, choosers = group_rows(batch, self.rows_per_block), batch.choosers
        self.state.read_sources(batch.owners)
        recorded = self._recorded(_shape(batch, choosers, blocks, part, taps))
        recorded.fill(batch, choosers, blocks)
        return recorded, self.state.replay(phase, recorded.recording, recorded.inputs)

    def _recorded(self, shape: PassShape) -> RecordedPass:
        """The pass of this shape, or at first a larger one: recording takes longer than a pass."""
        if shape not in self.passes:
            self.missed[shape] = self.missed.get(shape, 0) + 1
            larger = [other for other in self.passes if other.holds(shape)]
            if larger and self.missed[shape] <= MISSES:
                return self.passes[min(larger, key=lambda other: (other.rows, other.wanted))]
            self.passes[shape] = RecordedPass(self, shape)
        return self.passes[shape]


class PendingPass:
    """A pass that was launched, and the copy of its results to the host."""

    def __init__(self, state: DeviceState, recorded: RecordedPass, output: Output, batch: Batch) -> None:
        self.output, self.batch = output, batch
        self.arrays, self.end = state.receive(recorded.results)
        self.phases = state.take_phases()

    def wait(self) -> Output:
        self.end.synchronize()
        t, r = len(self.batch.tokens), len(self.batch.want)
        choices = self.arrays["choices"][:r].tolist()
        return Output(
            self.output.logits[:r],
            {layer: hidden[:t] for layer, hidden in self.output.hidden.items()},
            self.arrays["highest"][:r].tolist(),
            [-1 if adjusts(seq) else c for c, seq in zip(choices, self.batch.choosers, strict=True)],
            self.arrays["tokens"][:t].tolist() if min(self.batch.tokens) < 0 else None,
            seconds(self.phases),
        )


def _shape(
    p: Batch, choosers: Listing[Sequence], blocks: Listing[Block], part: Part, taps: tuple[int, ...]
) -> PassShape:
    t, r = len(p.tokens), len(p.want)
    rows = padded_size(t)
    wanted = rows if r == t else next((n for n in WANTED_SIZES if n >= r), padded_size(r)) if r else 0
    if r < t and wanted >= rows:  # `wanted` equal to `rows` would mean all of them
        rows = padded_size(wanted + 1)
    deepest = max((len(block[8]) for block in blocks), default=0)
    depth = next(depth for depth in DEPTHS if depth >= deepest)
    part = part if r else replace(part, head=False)
    return PassShape(rows, wanted, depth, any(filters(seq) for seq in choosers), part, taps)


def fill_rows(arrays: dict[str, Any], p: Batch | None, blocks: Listing[Block], state: DeviceState) -> None:
    """Write these rows (or none), padded, and the changes of the table."""
    tokens, positions, slots, want = (p.tokens, p.positions, p.slots, p.want) if p else ([], [], [], [])
    fill_padded(arrays["tokens"], tokens, 0)
    fill_padded(arrays["positions"], positions, 0)
    fill_padded(arrays["slots"], slots, state.padding)
    fill_padded(arrays["want"], want, 0)
    fill_padded(arrays["info"], [block[:8] for block in blocks], 0) if blocks else arrays["info"].fill(0)
    for i, (*_, tail) in enumerate(blocks):
        arrays["tail"][i, : len(tail)] = tail
    state.patch(arrays) if p else arrays["place"].fill(-1)


def fill_sampling(arrays: dict[str, Any], choosers: Listing[Sequence], positions: Any) -> None:
    """Write how each wanted row samples the token at its position."""
    fill_padded(arrays["position"], positions, 0)
    fill_padded(arrays["seed"], [seq.seed for seq in choosers], 0)
    for name, off in (("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0)):
        fill_padded(arrays[name], [getattr(seq.params, name) for seq in choosers], off)


Block = tuple[int, int, int, int, int, int, int, int, Listing[int]]  # `attention.Blocks.info`, then the tail


def group_rows(p: Batch, most: int) -> list[Block]:
    """Groups of rows, `most` each, that one block of threads computes together.

    A row joins the one before it if it attends to the same keys and itself: a prompt, a chain, the trunk of a tree.
    """
    blocks: list[Block] = []
    start, count = 0, len(p.tokens)
    while start < count:
        stop, limit = start + 1, min(start + most, count)
        while stop < limit and _follows(p, stop):
            stop += 1
        line, base, keys = p.lines[start], p.context[stop - 1], p.positions[start] + 1
        blocks.append((start, stop - start, line, base, keys, 0, 0, 0, p.tails[stop - 1]))
        start = stop
    return blocks


def _follows(p: Batch, row: int) -> bool:
    """Whether a row attends to exactly the keys of the row before it, and itself."""
    tail = p.tails[row]
    return p.lines[row] == p.lines[row - 1] and (
        tail[:-1] == p.tails[row - 1] if tail else p.positions[row] == p.positions[row - 1] + 1
    )


class UncapturedPasses:
    """Passes that are not recorded, over a plane of a cache whose sequences have all their slots; timed chains."""

    def __init__(self, model: Model, cache: Cache, plane: Plane) -> None:
        self.device = model.device
        self.graphs = Graphs(model, plane, DeviceState(cache, Driver(self.device), 1))
        self._chains: dict[Part, Any] = {}

    def rows(self, batch: Batch) -> Rows:
        """The batch on the model's device, grouped for its kernels."""
        state, device, host = self.graphs.state, self.device, rows_of(batch)
        groups = group_rows(batch, self.graphs.rows_per_block)
        depth = next(n for n in DEPTHS if n >= max(len(group[8]) for group in groups))
        info = torch.tensor([group[:8] for group in groups], dtype=I32)  # [N, 8]
        tail = torch.zeros(len(groups), depth, dtype=I32)
        for i, group in enumerate(groups):
            tail[i, : len(group[8])] = torch.tensor(group[8], dtype=I32)
        prompts = batch.count > CHEAP_ROWS
        blocks = state.blocks(info.to(device), tail.to(device), self.graphs.model, prompts)
        state.read_sources(batch.owners)
        tokens, positions, slots, want = (x.to(device) for x in (host.tokens, host.positions, host.slots, host.want))
        return Rows(tokens, positions, slots, slots, slots, state.table, None, want, blocks=blocks)

    def seconds(self, seq: Sequence, part: Part, repeats: int = 3) -> float:
        """Seconds per token of a recorded chain of this part: the minimum of a few.

        It writes to the slots of the sequence's last token and of its drafts.
        """
        if part not in self._chains:
            self._chains[part] = self.graphs.chains(part, 1, "timing")
            self._chain_seconds(part, seq)  # records
        return min(self._chain_seconds(part, seq) for _ in range(repeats)) / TIMED_CHAIN

    def _chain_seconds(self, part: Part, seq: Sequence) -> float:
        self._synchronize()
        start = time.perf_counter()
        self._chains[part].draft([seq], [TIMED_CHAIN])
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


# ------------------------------------------------------------ chains: K passes as one graph


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
        state.read_sources(seqs)
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
            if nearest and missed * (nearest.length - shape.length) <= CHAIN_RECORDING * shape.length:
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
        blocks = graphs.state.blocks(d["info"][j], d["tail"], graphs.model)
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
