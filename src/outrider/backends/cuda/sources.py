"""Sources on a device: where the K/V of each sequence's source is, and the passes of the encoders that write it.

Promise: after `read` every plane with an encoder holds the sources of these sequences, in the order of the device's
stream, and each source was read once; the host waits for nothing. A single source is read by a recorded pass, padded to
a few sizes; several that arrive together share one that is not recorded. It knows sources and planes, not texts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ...engine.cache import Cache, Plane, Row
from ...types import Sequence
from ..encoder import Encoder, bidirectional, blocks_of, grouped
from .capture import Field, PinnedBuffer, fill_padded

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)  # tokens that a recorded pass reads
WARM = (32, 64, 128)  # of them, those that are recorded beforehand
I32, I64 = torch.int32, torch.int64


class Sources:
    """The sources of a cache's lines: slots, ids and lengths. The last line is padding, without a source."""

    def __init__(self, cache: Cache, state: Any) -> None:
        """state: the device's `DeviceState`, which records and times."""
        assert cache.sources is not None
        (lines, length), device = cache.sources.shape, state.device
        self.cache, self.state, self.length = cache, state, length
        self.slots, self.ids = (torch.zeros(lines + 1, length, dtype=I32, device=device) for _ in range(2))
        state.driver.poison([self.slots[:-1], self.ids[:-1]])
        self.lengths = torch.zeros(lines + 1, dtype=I32, device=device)
        # Where a source is written for the copy; a line's part is reused only by the line's next owner.
        self._host = torch.zeros(lines, 2 * length + 1, dtype=I32, pin_memory=device.type == "cuda")
        self._owners: dict[int, Row] = {}  # line -> the row whose source every plane holds
        self._readers: list[tuple[Encoder, Plane]] = []
        self._recorded: dict[tuple[int, int], RecordedReading] = {}  # by reader and size

    def add_reader(self, reader: Encoder, plane: Plane) -> None:
        """An encoder that reads every source into this plane."""
        if all(known is not plane for _, known in self._readers):
            self._readers.append((reader, plane))

    def read(self, seqs: Iterable[Sequence]) -> None:
        rows = {seq.id: self.cache.rows[seq.id] for seq in seqs}.values()
        new = [row for row in rows if self._owners.get(row.line) is not row]
        for row in new:
            self.write(row)
        for number, (reader, plane) in enumerate(self._readers):
            missing = [row for row in new if row.source and not plane.has_source(row.source[0])]
            if len(missing) == 1:
                self._reading(number, len(missing[0].source)).read(missing[0])
            elif missing:
                with self.state.timed("read"):
                    reader.read([(row.source_ids, torch.tensor(row.source)) for row in missing], plane)
        self._owners |= {row.line: row for row in new}

    def write(self, row: Row) -> None:
        """Copy a row's source to its line, without waiting."""
        count, host = len(row.source), self._host[row.line]
        host[: 2 * count + 1] = torch.tensor([count, *row.source, *row.source_ids], dtype=I32)
        self.lengths[row.line : row.line + 1].copy_(host[:1], non_blocking=True)
        self.slots[row.line, :count].copy_(host[1 : 1 + count], non_blocking=True)
        self.ids[row.line, :count].copy_(host[1 + count : 1 + 2 * count], non_blocking=True)

    def warm(self) -> None:
        """Record what requests will need, before they arrive."""
        for number in range(len(self._readers)):
            for size in WARM:
                self._reading(number, min(size, self.length))

    def _reading(self, number: int, tokens: int) -> RecordedReading:
        size = min(next(n for n in (*SIZES, tokens) if n >= tokens), self.length)
        if (number, size) not in self._recorded:
            self._recorded[number, size] = RecordedReading(self.state, *self._readers[number], size)
        return self._recorded[number, size]


class RecordedReading:
    """One encoder's pass over one source of up to so many tokens."""

    def __init__(self, state: Any, reader: Encoder, plane: Plane, size: int) -> None:
        self.state, self.reader, self.plane, config = state, reader, plane, reader.network.config
        self.rows = grouped(bidirectional([[0] * size], state.device), [size], config)
        fields: dict[str, Field] = dict.fromkeys(("tokens", "slots"), (I64, (size,)))
        fields |= {"info": (I32, tuple(self.rows.blocks.info.shape)), "lengths": (I32, (1,))}
        self.inputs = PinnedBuffer(state.driver, fields)
        self._fill([], [])
        self.inputs.send()
        self.recording = state.record(self._work)

    def read(self, row: Row) -> None:
        self._fill(row.source_ids, row.source)
        self.state.replay("read", self.recording, self.inputs)
        self.plane.keep_source(row.source[0])

    def _fill(self, ids: list[int], slots: list[int]) -> None:
        """Padding is in no block, and its K/V goes to a slot without an owner."""
        a = self.inputs.next()
        fill_padded(a["tokens"], ids, 0)
        fill_padded(a["slots"], slots, self.state.padding)
        blocks = blocks_of([len(ids)], self.reader.network.config)
        a["info"].fill(0)
        a["info"][: len(blocks)] = blocks or 0
        a["lengths"][0] = len(ids)

    @torch.inference_mode()
    def _work(self) -> None:
        d = self.inputs.device
        blocks = replace(self.rows.blocks, info=d["info"], lengths=d["lengths"])
        states = self.reader.states_of(replace(self.rows, tokens=d["tokens"], blocks=blocks))  # [size, H]
        self.reader.write(states, self.plane, d["slots"])
