"""Passes on a GPU as captured graphs: one launch for the whole of it, one small copy back.

A pass is recorded once for each shape (rows, blocks of rows, wanted rows), padded to a ladder of sizes, and replayed
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

import numpy as np
import torch
from torch import Tensor

from ..cache import Cache, Plane
from ..cuda import attention, choice, small
from ..cuda.attention import Blocks
from ..cuda.choice import Laws
from ..models import WHOLE, Model, Part
from ..sampling import adjusts
from ..types import Output, Rows, Sequence
from .device import Field, Form, Recording, filled, mark, pool

LADDER = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 448, 512)
PATCH = 512  # places of the table that one pass can bring up to date on its way
DEPTHS = (16, 64)  # of a draft
I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64
LAW: dict[str, torch.dtype] = {
    "seed": I64, "position": I64, "temperature": F64, "top_k": I64, "top_p": F64, "min_p": F64
}  # fmt: skip


def rung(n: int) -> int:
    """The size that a number of rows is padded to."""
    return next((size for size in LADDER if size >= n), -(-n // 256) * 256)


class Desk:
    """What all passes of an engine share on one device: the table, tokens that nobody has read, clocks."""

    def __init__(self, cache: Cache, device: torch.device, batch: int, home: bool = True) -> None:
        self.cache, self.device, self.home = cache, device, home  # home: drafts are verified on this device
        lines, length = cache.table.shape
        self.table = torch.zeros(lines + 1, length, dtype=I32, device=device)  # the last line is padding's
        self.table[:lines] = cache.table.to(device)
        self.changes: dict[int, int] = {}
        cache.changes.append(self.changes)
        self.choices_at = batch * DEPTHS[-1]  # in `unread`: drafts first, then the last pass's choices
        self.unread = torch.zeros(self.choices_at + max(LADDER), dtype=I64, device=device)
        self.pool = pool(device)
        self.phases: list[tuple[str, Any, Any]] = []  # what ran since somebody waited: name, begin, end
        self._scratch: dict[tuple[int, int], attention.Scratch] = {}

    @property
    def padding(self) -> int:
        """The slot that nobody owns."""
        return self.cache.slots

    def scratch(self, model: Model) -> attention.Scratch:
        shape = (model.config.heads, model.config.head_dim)
        if shape not in self._scratch:
            rows, length = attention.SCRATCH_ROWS, self.cache.length
            self._scratch[shape] = attention.Scratch(rows, *shape, length, self.device)
        return self._scratch[shape]

    def patch(self, arrays: dict[str, Any]) -> None:
        """What has changed in the table goes into a form; a whole prompt's worth goes ahead of it."""
        if len(self.changes) > PATCH:
            places = torch.tensor(list(self.changes)).to(self.device)
            self.table.view(-1)[places] = torch.tensor(list(self.changes.values()), dtype=I32).to(self.device)
            self.changes.clear()
        filled(arrays["place"], list(self.changes), -1)
        filled(arrays["slot"], list(self.changes.values()), 0)
        self.changes.clear()

    def replay(self, phase: str, recording: Recording, form: Form) -> tuple[Any, Any]:
        """Send the form and run; returns the result and the moment when it is there."""
        begin, end = mark(self.device), mark(self.device)
        begin.record()
        form.send()
        result = recording.replay()
        end.record()
        self.phases.append((phase, begin, end))
        return result, end

    def seconds(self) -> dict[str, float]:
        """What the phases since the last call took on the device; they must be over."""
        spent: dict[str, float] = {}
        for phase, begin, end in self.phases:
            spent[phase] = spent.get(phase, 0.0) + begin.elapsed_time(end) / 1e3
        self.phases = []
        return spent if self.device.type == "cuda" else {}


@dataclass(frozen=True)
class Shape:
    """Everything that a recording depends on."""

    rows: int
    blocks: int
    wanted: int
    depth: int
    filtered: bool  # whether some row's law has a top-k, top-p or min-p
    part: Part
    taps: tuple[int, ...]


class Pass:
    """One recorded pass over a model."""

    def __init__(self, graphs: Graphs, shape: Shape) -> None:
        self.graphs, self.shape = graphs, shape
        t, n, r, device = shape.rows, shape.blocks, shape.wanted, graphs.desk.device
        fields: dict[str, Field] = dict.fromkeys(("tokens", "positions", "slots"), (I64, (t,)))
        fields |= {"info": (I32, (n, 8)), "tail": (I32, (n, shape.depth)), "want": (I64, (r,))}
        fields |= {name: (dtype, (r,)) for name, dtype in LAW.items()}
        fields |= {"place": (I64, (PATCH,)), "slot": (I32, (PATCH,))}
        self.form = Form(device, fields)
        self.reply = Form(device, {"choices": (I64, (r,)), "tokens": (I64, (t,)), "highest": (F32, (r,))})
        self.fill(None)
        self.form.send()
        self.recording = Recording(self._work, device, graphs.desk.pool)

    def _work(self) -> Output:
        d, desk, shape = self.form.device, self.graphs.desk, self.shape
        known = small.begin(d["tokens"], desk.unread, d["place"], d["slot"], desk.table)  # [T]
        blocks = Blocks(d["info"], d["tail"], desk.table, desk.scratch(self.graphs.model))
        none = d["slots"]
        rows = Rows(known, d["positions"], d["slots"], none, none, desk.table, None, d["want"], blocks=blocks)
        output = self.graphs.model.forward(rows, self.graphs.plane, shape.part, taps=shape.taps)
        self.reply.device["tokens"].copy_(known)
        if shape.part.head:
            choices, highest, _ = choice.choose(output.logits, Laws(*(d[name] for name in LAW)), shape.filtered)
            self.reply.device["choices"].copy_(choices)
            self.reply.device["highest"].copy_(highest)
            desk.unread[desk.choices_at : desk.choices_at + shape.wanted].copy_(choices)
        return output

    def fill(self, rows: Rows | None) -> None:
        """Write the numbers of these rows (or of none) and padding behind them."""
        a, empty = self.form.next(), np.empty(0)
        info, tails = grouped(rows, self.graphs.together) if rows is not None else ([], [])
        filled(a["tokens"], empty if rows is None else rows.tokens.numpy(), 0)
        filled(a["positions"], empty if rows is None else rows.positions.numpy(), 0)
        filled(a["slots"], empty if rows is None else rows.slots.numpy(), self.graphs.desk.padding)
        filled(a["want"], empty if rows is None else rows.want.numpy(), 0)
        a["info"][: len(info)] = np.array(info, dtype=np.int32).reshape(len(info), 8)
        a["info"][len(info) :] = 0
        for i, tail in enumerate(tails):
            a["tail"][i, : len(tail)] = tail
        fill_laws(a, () if rows is None else rows.speakers, 1 + rows.positions[rows.want].numpy() if rows else empty)
        if rows is None:
            a["place"][:] = -1
        else:
            self.graphs.desk.patch(a)


class Graphs:
    """A runner: one model over its plane, every pass captured."""

    def __init__(self, model: Model, plane: Plane, desk: Desk) -> None:
        self.model, self.plane, self.desk = model, plane, desk
        self.together = attention.rows_per_block(model.config.heads, model.config.kv_heads)
        self.passes: dict[Shape, Pass] = {}

    def launch(self, rows: Rows, taps: tuple[int, ...], overlapped: bool) -> Pending:
        return Pending(self, *self._start("verify", rows, WHOLE, taps), rows)

    def logits(self, rows: Rows, part: Part = WHOLE) -> Tensor:
        """Logits of the wanted rows [R, V], on the device; with a part without a head, nothing. Nobody waits."""
        _, output, _ = self._start("draft", rows, part, ())
        logits: Tensor = output.logits[: rows.want.shape[0]]
        return logits

    def chains(self, part: Part, again: int, source: str) -> Any:
        from .chains import Chains

        return Chains(self, part, again, source)

    def _start(self, phase: str, rows: Rows, part: Part, taps: tuple[int, ...]) -> tuple[Pass, Any, Any]:
        shape = self._shape(rows, part, taps)
        step = self.passes.get(shape)
        if step is None:
            step = self.passes[shape] = Pass(self, shape)
        step.fill(rows)
        output, end = self.desk.replay(phase, step.recording, step.form)
        return step, output, end

    def _shape(self, rows: Rows, part: Part, taps: tuple[int, ...]) -> Shape:
        t, r = rows.tokens.shape[0], rows.want.shape[0]
        part = part if r else replace(part, head=False)
        blocks, depth = count_blocks(rows, self.together), 0 if rows.ancestors is None else rows.ancestors.shape[1]
        size, wanted = rung(t), rung(r) if r else 0
        if r < t and wanted >= size:  # a pass whose wanted rows are as many as its rows takes them all as they are
            size = rung(size + 1)
        filtered = any(filters(seq) for seq in rows.speakers)
        deep = next(d for d in DEPTHS if d >= depth)
        return Shape(size, rung(blocks), size if r == t else wanted, deep, filtered, part, taps)


class Pending:
    """A pass under way."""

    def __init__(self, graphs: Graphs, step: Pass, output: Output, end: Any, rows: Rows) -> None:
        self.graphs, self.step, self.output, self.rows = graphs, step, output, rows
        self.arrays = step.reply.next()
        step.reply.receive()
        self.end = mark(graphs.desk.device)
        self.end.record()

    def wait(self) -> Output:
        self.end.synchronize()
        t, r = self.rows.tokens.shape[0], self.rows.want.shape[0]
        unread = bool((self.rows.tokens < 0).any())
        choices = self.arrays["choices"][:r].tolist()
        return Output(
            self.output.logits[:r],
            {layer: hidden[:t] for layer, hidden in self.output.hidden.items()},
            self.arrays["highest"][:r].tolist(),
            [-1 if adjusts(seq) else c for c, seq in zip(choices, self.rows.speakers, strict=True)],
            self.arrays["tokens"][:t].tolist() if unread else None,
            self.graphs.desk.seconds(),
        )


# ------------------------------------------------------------ from rows to what kernels read


def filters(seq: Sequence) -> bool:
    """Whether a choice looks at more than noise and temperature."""
    p = seq.params
    return not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)


def fill_laws(arrays: dict[str, Any], speakers: Listing[Sequence], positions: Any) -> None:
    """How each wanted row chooses, for the token at its position."""
    filled(arrays["position"], positions, 0)
    filled(arrays["seed"], [seq.seed for seq in speakers], 0)
    for name, off in (("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0)):
        filled(arrays[name], [getattr(seq.params, name) for seq in speakers], off)


def segments(rows: Rows) -> list[tuple[int, int]]:
    """Where each sequence's rows begin and end."""
    lines = rows.lines.numpy()
    if not len(lines):
        return []
    cuts = [0, *(np.flatnonzero(lines[1:] != lines[:-1]) + 1).tolist(), len(lines)]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


def count_blocks(rows: Rows, together: int) -> int:
    return sum(len(starts) for starts in _starts(rows, together))


def grouped(rows: Rows, together: int) -> tuple[list[list[int]], list[Any]]:
    """Blocks of rows (see `attention.Blocks`) and their tails."""
    lines, contexts, positions = rows.lines.tolist(), rows.context.tolist(), rows.positions.tolist()
    info, tails = [], []
    for starts, (_, stop) in zip(_starts(rows, together), segments(rows), strict=True):
        for start, end in zip(starts, [*starts[1:], stop], strict=True):
            info.append([start, end - start, lines[start], contexts[end - 1], positions[start] + 1, 0, 0, 0])
            tails.append(() if rows.ancestors is None else rows.ancestors[end - 1].numpy())
    return info, tails


def _starts(rows: Rows, together: int) -> list[list[int]]:
    """The first row of each block, for each sequence.

    While positions rise by one from row to row, everyone sees what the last one sees, up to themselves: a prompt, a
    chain, the trunk of a tree. The other rows of a tree see lists of their own and are blocks of one.
    """
    rises = np.diff(rows.positions.numpy()) == 1  # [T-1]
    found = []
    for start, stop in segments(rows):
        falls = np.flatnonzero(~rises[start : stop - 1])
        trunk = start + int(falls[0]) + 1 if len(falls) else stop
        found.append([*range(start, trunk, together), *range(trunk, stop)])
    return found
