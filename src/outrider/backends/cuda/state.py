"""What all passes of an engine share on one device: the table of slots, tokens that nobody has read, clocks.

The promise: the device's table is the cache's as of the last launch, and what waits to be read outlasts a recording.
It knows slots and moments; it knows neither models nor rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...engine.cache import Cache
from .. import Model
from .capture import Driver, Form, Recording, filled
from .kernels import attention

MOST_AHEAD = 512  # rows of a pass that may be gone on from before it is read
PATCH = 512  # places of the table that one pass can bring up to date on its way
DEPTHS = (16, 64)  # of a draft
DRAFTERS = 3  # that may leave unread drafts in the same step
Phase = tuple[str, Any, Any, float]  # name, begin, end, share
I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64


class DeviceState:
    """What all passes of an engine share on one device: the table, tokens that nobody has read, clocks."""

    def __init__(
        self, cache: Cache, driver: Driver, batch: int, home: bool = True, clock: DeviceState | None = None
    ) -> None:
        self.driver, device = driver, driver.device
        self.cache, self.device, self.home = cache, device, home  # home: drafts are verified on this device
        self.clock = clock or self  # whose phases what runs here is counted among
        lines, length = cache.table.shape
        self.table = torch.zeros(lines + 1, length, dtype=I32, device=device)  # the last line is padding's
        self.table[:lines] = cache.table.to(device)
        self.changes: dict[int, int] = {}
        cache.changes.append(self.changes)
        self.lanes = 2 * batch  # of a batch padded to the next size
        # In `unread`: each drafter's drafts first, then the last pass's choices.
        self.choices_at = DRAFTERS * self.lanes * DEPTHS[-1]
        self._claimed = 0
        self.unread = torch.zeros(self.choices_at + MOST_AHEAD, dtype=I64, device=device)
        self.phases: list[Phase] = []  # what was started since the last `taken`
        self._scratch: dict[tuple[int, int], attention.Scratch] = {}

    @property
    def padding(self) -> int:
        """The slot that nobody owns."""
        return self.cache.slots

    def claim(self) -> int:
        """Where a drafter's places in `unread` begin. One too many shares with the first: a wrong draft, no more."""
        self._claimed += 1
        return (self._claimed - 1) % DRAFTERS * self.lanes * DEPTHS[-1]

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

    def record(self, work: Callable[[], Any]) -> Recording:
        """Capture work. It runs once for that, on padding; what waits to be read must outlast it.

        It takes as long as dozens of passes, once: a phase of its own, so that nobody takes it for a price.
        """
        begin, end = self.driver.event(), self.driver.event()
        begin.record(self.driver.stream)
        unread = self.unread.clone()
        recording = self.driver.record(work)
        self.unread.copy_(unread)
        end.record(self.driver.stream)
        self.clock.phases.append(("record", begin, end, 1.0))
        return recording

    def replay(self, phase: str, recording: Recording, form: Form, share: float = 1.0) -> Any:
        """Send the form and run; nobody waits. `share` is the part of it that somebody asked for."""
        begin, end = self.driver.event(), self.driver.event()
        begin.record(self.driver.stream)
        form.send()
        result = recording.replay()
        end.record(self.driver.stream)
        self.clock.phases.append((phase, begin, end, share))
        return result

    def taken(self) -> list[Phase]:
        """The phases since the last call."""
        phases, self.phases = self.phases, []
        return phases


def seconds(phases: list[Phase]) -> dict[str, float]:
    """What these phases took on the device, and as `spare` what nobody had asked for; they must be over."""
    spent: dict[str, float] = {}
    for phase, begin, end, share in phases:
        taken = begin.elapsed_time(end) / 1e3
        spent[phase] = spent.get(phase, 0.0) + share * taken
        if share < 1:
            spent["spare"] = spent.get("spare", 0.0) + (1 - share) * taken
    return spent
