"""Device state: what all passes over a cache share on one device. The slot table, unread tokens, and timings.

The promise: the device's table equals the cache's as of the last launch, and unread tokens survive a recording. It
knows neither layers nor rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import nan
from typing import Any

import torch
from torch import Tensor

from ...engine.cache import Cache, Plane
from ...types import Sequence
from .. import Model
from .capture import Driver, PinnedBuffer, fill_padded
from .kernels import attention
from .sources import Sources

PATCH = 512  # table entries that a recorded pass can update
DEPTHS = (16, 64)  # of a draft
LANES = (1, 4, 16, 64)  # sequences for which drafts are recorded: more rows cost a small model little
UNREAD_BUFFERS = 3  # clients that may leave unread tokens in the same step
Phase = tuple[str, Any, Any, float]  # name, start event, end event, share
I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64


def lanes_for(sequences: int) -> int:
    """The number of sequences that draft passes are recorded for: this many, rounded up."""
    return next((n for n in LANES if n >= sequences), -(-sequences // LANES[-1]) * LANES[-1])


class DeviceState:
    """The table, unread tokens and timings of the passes over one cache on one device."""

    def __init__(
        self, cache: Cache, driver: Driver, batch: int, home: bool = True, clock: DeviceState | None = None
    ) -> None:
        self.driver, device = driver, driver.device
        self.cache, self.device, self.home = cache, device, home  # home: drafts are verified on this device
        self.clock = clock or self  # the state that collects the phases of this one
        lines, length = cache.table.shape
        self.table = torch.zeros(lines + 1, length, dtype=I32, device=device)  # the last line is padding
        self.table[:lines] = cache.table.to(device)
        if driver.poisons and not cache.rows:
            driver.poison([self.table[:lines]])
            cache.on_take = self._poison_slots
        self.changes: dict[int, int] = {}  # index in the flat table -> slot, since the last pass
        cache.changes.append(self.changes)
        self.padding = cache.slots  # the slot that padding rows write to
        self.batch = batch  # sequences in a pass
        self.lanes = max(2 * batch, lanes_for(batch))  # of a batch padded to the next size
        self._buffer = self.lanes * DEPTHS[-1]  # of each client in `unread`
        self._claimed = 0
        self.unread = torch.zeros(UNREAD_BUFFERS * self._buffer, dtype=I64, device=device)
        self.no_tail = torch.zeros(1, 1, dtype=I32, device=device)  # of attention blocks whose keys are in the table
        self.phases: list[Phase] = []  # started since the last `take_phases`
        self._scratch: dict[tuple[int, int], attention.Scratch] = {}
        self.sources = None if cache.sources is None else Sources(cache, self)

    def _poison_slots(self, slots: list[int]) -> None:
        """These slots get another owner: nothing may read what they hold now."""
        stored = (each for plane in self.cache.planes for each in (*plane.k, *plane.v, *plane.streams.values()))
        for each in stored:
            each[slots] = nan

    def claim(self) -> int:
        """Where a client's buffer in `unread` starts. Clients beyond UNREAD_BUFFERS share one: drafts may be wrong."""
        self._claimed += 1
        return (self._claimed - 1) % UNREAD_BUFFERS * self._buffer

    def scratch(self, model: Model) -> attention.Scratch:
        shape = (model.config.heads, model.config.head_dim)
        if shape not in self._scratch:
            longest = max(self.cache.length, 0 if self.sources is None else self.sources.length)
            self._scratch[shape] = attention.Scratch(attention.SCRATCH_ROWS, *shape, longest, self.device)
        return self._scratch[shape]

    def blocks(self, info: Tensor, tail: Tensor, model: Model, prompts: bool = False) -> attention.Blocks:
        """Groups of rows of a pass over this cache. prompts: some of them may be many rows of one prompt."""
        sources = None if self.sources is None else (self.sources.slots, self.sources.lengths)
        return attention.Blocks(info, tail, self.table, self.scratch(model), sources=sources, prompts=prompts)

    def add_reader(self, model: Model, plane: Plane) -> None:
        """A model whose encoder, if it has one, reads every sequence's source into this plane."""
        if self.sources is not None and model.reader is not None:
            self.sources.add_reader(model.reader, plane)

    def read_sources(self, seqs: Iterable[Sequence]) -> None:
        """Every plane holds the sources of these sequences, as soon as what is started here has run."""
        if self.sources is not None:
            self.sources.read(seqs)

    def patch(self, arrays: dict[str, Any]) -> None:
        """Write the table's changes into a pass's input arrays; too many for these are copied to the table at once."""
        if len(self.changes) > len(arrays["place"]):
            indices = self._sent(torch.tensor(list(self.changes)))
            self.table.view(-1)[indices] = self._sent(torch.tensor(list(self.changes.values()), dtype=I32))
            self.changes.clear()
        fill_padded(arrays["place"], list(self.changes), -1)
        fill_padded(arrays["slot"], list(self.changes.values()), 0)
        self.changes.clear()

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """On the device, without waiting for the passes in flight."""
        pinned = values.pin_memory() if self.device.type == "cuda" else values
        return pinned.to(self.device, non_blocking=True)

    def record(self, work: Callable[[], Any]) -> Any:
        """Capture work, which runs once on padding for that; unread tokens are restored afterwards.

        It takes as long as dozens of passes, and is a phase of its own: the time is no pass's cost.
        """
        with self.timed("record", 1.0):
            unread = self.unread.clone()
            recording = self.driver.record(work)
            self.unread.copy_(unread)
        return recording

    @contextmanager
    def together(self) -> Iterator[None]:
        """As `Driver.together`; unread tokens are restored at the end."""
        with self.timed("record", 1.0):
            unread = self.unread.clone()
            with self.driver.together():
                yield
            self.unread.copy_(unread)

    def replay(self, phase: str, recording: Any, inputs: PinnedBuffer, share: float = 1.0) -> Any:
        """Send the inputs and run, without waiting. `share` is the part of the work that was requested."""
        with self.timed(phase, share):
            inputs.send()
            return recording.replay()

    def receive(self, results: PinnedBuffer) -> tuple[dict[str, Any], Any]:
        """Start copying what a replay has written to the host: the arrays, and the event after which they are whole."""
        arrays, end = results.next(), self.driver.event()
        results.receive()
        end.record(self.driver.stream)
        return arrays, end

    @contextmanager
    def timed(self, phase: str, share: float = 1.0) -> Iterator[None]:
        """The device's time of what is started inside counts as this phase."""
        start, end = self.driver.event(), self.driver.event()
        start.record(self.driver.stream)
        yield
        end.record(self.driver.stream)
        self.clock.phases.append((phase, start, end, share))

    def take_phases(self) -> list[Phase]:
        """The phases since the last call."""
        phases, self.phases = self.phases, []
        return phases


def seconds(phases: list[Phase]) -> dict[str, float]:
    """Device seconds by phase, and as `spare` those of work that was not requested. All phases must have ended."""
    spent: dict[str, float] = {}
    for phase, start, end, share in phases:
        taken = start.elapsed_time(end) / 1e3
        spent[phase] = spent.get(phase, 0.0) + share * taken
        if share < 1:
            spent["spare"] = spent.get("spare", 0.0) + (1 - share) * taken
    return spent
