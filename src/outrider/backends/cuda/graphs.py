"""Passes on a GPU as captured graphs: one launch for the whole of it, one small copy back.

A pass is recorded once for each shape (rows, wanted rows), padded to a ladder of sizes, and replayed
with new numbers: what to feed, where K/V goes, who sees whom, how each row's sequence chooses. The graph brings the
device's table up to date, runs the model, and lets every row choose; the host gets choices, never logits, unless it
asks. Padding writes to a slot that nobody owns.

The text does not depend on any of this: kernels treat each row as if it were alone. The runner knows rows, not who
drafted them; tokens that the host has not read are found where they were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...backends.rows import Rows
from ...engine.cache import Plane
from ...engine.sampling import adjusts, filters
from ...types import Batch, Output, Sequence
from .. import WHOLE, Model, Part
from .capture import Field, Form, filled
from .kernels import attention, elementwise, sampling
from .kernels.attention import Blocks
from .kernels.sampling import Laws
from .state import DEPTHS, F32, F64, I32, I64, MOST_AHEAD, PATCH, DeviceState, seconds

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SOME = (16, 64, 256, 1024)  # wanted rows of a pass that does not want all of them
CHEAP_ROWS = 64  # a pass reads its weights; from here on it takes time to compute too
PATIENCE = 16  # times that a shape is asked for before it is recorded, if a larger one is there
LAW: dict[str, torch.dtype] = {
    "seed": I64, "position": I64, "temperature": F64, "top_k": I64, "top_p": F64, "min_p": F64
}  # fmt: skip


def rung(n: int) -> int:
    """The size that a number of rows is padded to."""
    return next((size for size in LADDER if size >= n), -(-n // 256) * 256)


@dataclass(frozen=True)
class Shape:
    """Everything that a recording depends on."""

    rows: int
    wanted: int  # as many as there are rows: all of them, in their order
    depth: int
    filtered: bool  # whether some row's law has a top-k, top-p or min-p
    part: Part
    taps: tuple[int, ...]

    def holds(self, other: Shape) -> bool:
        """Whether a pass of that shape can be padded to this one, at a bearable price."""
        same = (self.part, self.taps, self.wanted == self.rows) == (other.part, other.taps, other.wanted == other.rows)
        return (
            same
            and other.rows <= self.rows <= (2 * other.rows + 16 if self.rows <= CHEAP_ROWS else other.rows)
            and other.wanted <= self.wanted
            and other.depth <= self.depth
            and other.filtered <= self.filtered
        )


class Pass:
    """One recorded pass over a model."""

    def __init__(self, graphs: Graphs, shape: Shape) -> None:
        self.graphs, self.shape = graphs, shape
        t, r, driver = shape.rows, shape.wanted, graphs.state.driver
        fields: dict[str, Field] = dict.fromkeys(("tokens", "positions", "slots"), (I64, (t,)))
        fields |= {"info": (I32, (t, 8)), "tail": (I32, (t, shape.depth)), "want": (I64, (r,))}
        fields |= {name: (dtype, (r,)) for name, dtype in LAW.items()}
        fields |= {"place": (I64, (PATCH,)), "slot": (I32, (PATCH,))}
        self.form = Form(driver, fields)
        self.reply = Form(driver, {"choices": (I64, (r,)), "tokens": (I64, (t,)), "highest": (F32, (r,))})
        self.fill(None, (), ())
        self.form.send()
        self.recording = graphs.state.record(self._work)

    def _work(self) -> Output:
        d, state, shape = self.form.device, self.graphs.state, self.shape
        known = elementwise.start_pass(d["tokens"], state.unread, d["place"], d["slot"], state.table)  # [T]
        blocks = Blocks(d["info"], d["tail"], state.table, state.scratch(self.graphs.model))
        none = d["slots"]
        rows = Rows(known, d["positions"], d["slots"], none, none, state.table, None, d["want"], blocks=blocks)
        output = self.graphs.model.forward(rows, self.graphs.plane, shape.part, taps=shape.taps)
        self.reply.device["tokens"].copy_(known)
        if shape.part.head:
            choices, highest, _ = sampling.choose(output.logits, Laws(*(d[name] for name in LAW)), shape.filtered)
            self.reply.device["choices"].copy_(choices)
            self.reply.device["highest"].copy_(highest)
            if shape.wanted <= MOST_AHEAD:
                state.unread[state.choices_at : state.choices_at + shape.wanted].copy_(choices)
        return output

    def fill(self, p: Batch | None, speakers: Listing[Sequence], blocks: Listing[Block]) -> None:
        """Write the numbers of these rows (or of none) and padding behind them."""
        a, state = self.form.next(), self.graphs.state
        fill_rows(a, p, blocks, state)
        fill_laws(a, speakers, [p.positions[i] + 1 for i in p.want] if p else [])


class Graphs:
    """A runner: one model over its plane, every pass captured."""

    def __init__(self, model: Model, plane: Plane, state: DeviceState) -> None:
        self.model, self.plane, self.state = model, plane, state
        self.together = attention.rows_per_block(model.config.heads, model.config.kv_heads)
        self.passes: dict[Shape, Pass] = {}
        self.missed: dict[Shape, int] = {}
        self.started: StartedPass | None = None

    def launch(self, batch: Batch, taps: tuple[int, ...], overlapped: bool, steady: bool = False) -> Pending:
        started, self.started = self.started, None
        if started is not None and started.is_for(batch, taps):
            pending = started.pending
        else:
            pending = self._start("verify", batch, WHOLE, taps)
        if steady:
            self.started = self._start_next(batch, taps)
        return pending

    def warm(self, rows: int) -> None:
        """Record what decoding runs, up to so many rows, before anybody waits for it."""
        for size in LADDER:
            if size <= rung(rows):
                shape = Shape(size, size, DEPTHS[0], False, WHOLE, ())
                if shape not in self.passes:
                    self.passes[shape] = Pass(self, shape)
        self.state.clock.taken()  # no step's time

    def logits(self, batch: Batch, part: Part = WHOLE) -> Tensor:
        """Logits of the wanted rows [R, V], on the device; with a part without a head, nothing. Nobody waits."""
        phase = "draft" if part.head else "read"  # a drafter that catches up with a prompt is not drafting yet
        pending = self._start(phase, batch, part, (), reply=False)
        return pending.output.logits[: len(batch.want)]

    def states(self, batch: Batch, layers: int) -> Tensor:
        """The residual stream of all rows after so many layers [T, H], on the device. Nobody waits."""
        part, tap = Part(stop=layers, head=False), layers - 1
        pending = self._start("draft", batch, part, (tap,), reply=False)
        return pending.output.hidden[tap][: batch.count]

    def chains(self, part: Part, again: int, source: str) -> Any:
        from .chains import Chains

        return Chains(self, part, again, source)

    def _start(self, phase: str, batch: Batch, part: Part, taps: tuple[int, ...], reply: bool = True) -> Pending:
        blocks, choosers = grouped(batch, self.together), batch.choosers
        step = self._recorded(self._shape(batch, choosers, blocks, part, taps))
        step.fill(batch, choosers, blocks)
        output = self.state.replay(phase, step.recording, step.form)
        return Pending(self, step, output, batch, choosers, reply)

    def _recorded(self, shape: Shape) -> Pass:
        """The pass of this shape. Recording takes longer than a pass: a larger one will do for the first times."""
        step = self.passes.get(shape)
        if step is not None:
            return step
        self.missed[shape] = self.missed.get(shape, 0) + 1
        if self.missed[shape] <= PATIENCE:
            larger = [known for known in self.passes if known.holds(shape)]
            if larger:
                return self.passes[min(larger, key=lambda known: (known.rows, known.wanted))]
        step = self.passes[shape] = Pass(self, shape)
        return step

    def _shape(
        self,
        p: Batch,
        choosers: Listing[Sequence],
        blocks: Listing[Block],
        part: Part,
        taps: tuple[int, ...],
    ) -> Shape:
        t, r = len(p.tokens), len(p.want)
        size = rung(t)
        wanted = size if r == t else next((n for n in SOME if n >= r), rung(r)) if r else 0
        if r < t and wanted >= size:  # not all of them, so there must be more rows than that
            size = rung(wanted + 1)
        deepest = max((len(block[8]) for block in blocks), default=0)
        return Shape(
            size,
            wanted,
            next(depth for depth in DEPTHS if depth >= deepest),
            any(filters(seq) for seq in choosers),
            part if r else replace(part, head=False),
            taps,
        )

    def _start_next(self, p: Batch, taps: tuple[int, ...]) -> StartedPass | None:
        """Start the next pass before the host knows this one's choices: one more token for everybody.

        Its tokens are read where they are chosen; its slots are those that the cache would hand out next. If anything
        turns out otherwise, the pass was in vain: what it wrote lies in slots and table places that nobody has, and
        whoever gets them writes before reading.
        """
        n = len(p.tokens)
        slots = self.state.cache.next_free(n)
        if len(p.want) < n or len(slots) < n or n > MOST_AHEAD or taps:
            return None  # what taps show must last until somebody has looked
        if not all(_goes_on(seq, self.state.cache.length) for seq in p.choosers):
            return None
        more = Batch(p.table)
        more.tokens = [-1 - self.state.choices_at - i for i in range(n)]
        more.positions, more.context = [i + 1 for i in p.positions], [i + 1 for i in p.context]
        more.slots, more.lines, more.tails, more.want, more.owners = slots, p.lines, [[]] * n, p.want, p.owners
        places = (line * self.state.cache.length + at for line, at in zip(p.lines, more.positions, strict=True))
        self.state.changes.update(zip(places, slots, strict=True))
        return StartedPass(more, taps, self._start("verify", more, WHOLE, taps))


@dataclass(frozen=True)
class StartedPass:
    """A pass that was started before its tokens were known to the host."""

    batch: Batch
    taps: tuple[int, ...]
    pending: Pending

    def is_for(self, p: Batch, taps: tuple[int, ...]) -> bool:
        """Whether these rows are the ones that were guessed (their tokens are: the host takes what was chosen)."""
        mine = self.batch
        return (
            p.slots == mine.slots
            and p.positions == mine.positions
            and p.lines == mine.lines
            and p.owners == mine.owners
            and taps == self.taps
        )


class Pending:
    """A pass under way."""

    def __init__(
        self,
        graphs: Graphs,
        step: Pass,
        output: Output,
        batch: Batch,
        choosers: Listing[Sequence],
        reply: bool,
    ) -> None:
        self.output, self.batch, self.choosers = output, batch, choosers
        if reply:
            state = graphs.state
            self.arrays = step.reply.next()
            step.reply.receive()
            self.end = state.driver.event()
            self.end.record(state.driver.stream)
            self.phases = state.taken()

    def wait(self) -> Output:
        self.end.synchronize()
        t, r = len(self.batch.tokens), len(self.batch.want)
        choices = self.arrays["choices"][:r].tolist()
        return Output(
            self.output.logits[:r],
            {layer: hidden[:t] for layer, hidden in self.output.hidden.items()},
            self.arrays["highest"][:r].tolist(),
            [-1 if adjusts(seq) else c for c, seq in zip(choices, self.choosers, strict=True)],
            self.arrays["tokens"][:t].tolist() if min(self.batch.tokens) < 0 else None,
            seconds(self.phases),
        )


# ------------------------------------------------------------ from rows to what kernels read


def _goes_on(seq: Sequence, length: int) -> bool:
    """Whether a sequence surely takes what the device chooses, needs no logits for it, and has room for one more."""
    plain = seq.rule == "match" and not adjusts(seq) and seq.params.logprobs is None and not seq.shows_logits
    return plain and seq.room > 1 and len(seq.tokens) + 1 < length


def fill_rows(arrays: dict[str, Any], p: Batch | None, blocks: Listing[Block], state: DeviceState) -> None:
    """The numbers of these rows (or of none), padding behind them, and what is new in the table."""
    tokens, positions, slots, want = (p.tokens, p.positions, p.slots, p.want) if p else ([], [], [], [])
    filled(arrays["tokens"], tokens, 0)
    filled(arrays["positions"], positions, 0)
    filled(arrays["slots"], slots, state.padding)
    filled(arrays["want"], want, 0)
    filled(arrays["info"], [block[:8] for block in blocks], 0) if blocks else arrays["info"].fill(0)
    for i, (*_, tail) in enumerate(blocks):
        arrays["tail"][i, : len(tail)] = tail
    state.patch(arrays) if p else arrays["place"].fill(-1)


def fill_laws(arrays: dict[str, Any], speakers: Listing[Sequence], positions: Any) -> None:
    """How each wanted row chooses, for the token at its position."""
    filled(arrays["position"], positions, 0)
    filled(arrays["seed"], [seq.seed for seq in speakers], 0)
    for name, off in (("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0)):
        filled(arrays[name], [getattr(seq.params, name) for seq in speakers], off)


Block = tuple[int, int, int, int, int, int, int, int, Listing[int]]  # `attention.Blocks.info`, then the tail


def grouped(p: Batch, together: int) -> list[Block]:
    """Rows that one block of threads takes together.

    A row joins the one before it if it sees what that one sees, and itself: a prompt, a chain, the trunk of a tree.
    """
    blocks: list[Block] = []
    start, count = 0, len(p.tokens)
    while start < count:
        stop, limit = start + 1, min(start + together, count)
        while stop < limit and _follows(p, stop):
            stop += 1
        line, base, keys = p.lines[start], p.context[stop - 1], p.positions[start] + 1
        blocks.append((start, stop - start, line, base, keys, 0, 0, 0, p.tails[stop - 1]))
        start = stop
    return blocks


def _follows(p: Batch, row: int) -> bool:
    """Whether a row sees exactly what the row before it sees, and itself."""
    tail = p.tails[row]
    return p.lines[row] == p.lines[row - 1] and (
        tail[:-1] == p.tails[row - 1] if tail else p.positions[row] == p.positions[row - 1] + 1
    )
