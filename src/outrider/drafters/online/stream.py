"""Work beside a busy device: a stream of its own on a GPU, nothing at all on a CPU.

Promise: nobody waits. Work reads what was written before the last `told`, and `idle` says whether all of it is
over. It knows streams and moments, not what runs there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Aside:
    """A second line of work on a device."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.written = torch.cuda.Event() if self.stream else None
        self.done = torch.cuda.Event() if self.stream else None

    @property
    def idle(self) -> bool:
        """Whether everything that was started is over."""
        return self.done is None or self.done.query()

    def told(self) -> None:
        """The main line has written what work may read."""
        if self.written is not None:
            self.written.record()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Work: it does not wait for a pass that was launched after the last `told`."""
        if self.stream is None or self.written is None:
            yield
            return
        self.stream.wait_event(self.written)
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> None:
        """So much was started."""
        if self.done is not None:
            self.done.record(self.stream)
