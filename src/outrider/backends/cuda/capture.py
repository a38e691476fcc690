"""What captured passes stand on: inputs sent in one copy, results received in one copy, work recorded as a graph.

On a device without graphs (a CPU under triton's interpreter) the same work simply runs, which is how it is tested; a
test may also supply a `Driver` with a clock of its own. It knows bytes, streams and graphs; it knows neither models nor
sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from threading import Lock
from typing import Any, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from ..gc_pause import no_collection

Field = tuple[torch.dtype, tuple[int, ...]]
_ALIGNMENT = 64  # bytes
_CAPTURING = Lock()  # one capture at a time, whichever thread records
_COPIES = 4  # host buffers in turn: one may still be in flight while the next is filled


class Event(Protocol):
    """A moment in the device's stream of work."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds."""
        ...


class Recording(Protocol):
    """Work that can be run again and again."""

    def replay(self) -> Any: ...


class _Immediate:
    """Events and recordings where work is done at once."""

    def __init__(self, work: Callable[[], Any] = lambda: None) -> None:
        self.replay = work

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


class Driver:
    """Records and times work on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.captures = device, device.type == "cuda"
        self.stream = torch.cuda.current_stream(device) if self.captures else None
        if self.captures:  # memory that all recordings share: they never run at the same time
            self._pool = torch.cuda.graph_pool_handle()
            # torch refuses to record into a pool whose recordings have all been dropped: this one never is.
            self._first = self.record(lambda: torch.zeros(1, device=device))

    def allocated(self) -> None:
        """Pinned memory was allocated, which takes the host milliseconds."""

    def event(self) -> Event:
        return torch.cuda.Event(enable_timing=True) if self.captures else _Immediate()

    def record(self, work: Callable[[], Any]) -> Recording:
        return _Graph(work, self.device, self._pool) if self.captures else _Immediate(work)


class Form:
    """Named arrays on the host and their twins on the device, which travel together in one copy."""

    def __init__(self, driver: Driver, fields: dict[str, Field]) -> None:
        device = driver.device
        places, size = {}, 0
        for name, (dtype, shape) in fields.items():
            places[name] = size
            size += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(_COPIES)]
        driver.allocated()
        self._twin = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views = [_views(host, fields, places) for host in self._hosts]
        self._arrays = [{name: view.numpy() for name, view in views.items()} for views in self._views]
        self.device: dict[str, Tensor] = _views(self._twin, fields, places)
        self._turn = 0
        self._sent = [driver.event() for _ in range(_COPIES)]

    def next(self) -> dict[str, npt.NDArray[Any]]:
        """The next host buffer, to be filled and sent, or to be received into."""
        self._turn = (self._turn + 1) % _COPIES
        self._sent[self._turn].synchronize()  # long since, unless many passes were started without waiting for one
        return self._arrays[self._turn]

    def send(self) -> None:
        self._twin.copy_(self._hosts[self._turn], non_blocking=True)
        self._sent[self._turn].record()

    def receive(self) -> None:
        self._hosts[self._turn].copy_(self._twin, non_blocking=True)


def _views(buffer: Tensor, fields: dict[str, Field], places: dict[str, int]) -> dict[str, Tensor]:
    views = {}
    for name, (dtype, shape) in fields.items():
        part = buffer[places[name] : places[name] + prod(shape) * dtype.itemsize]
        views[name] = part.view(dtype).view(shape)
    return views


class _Graph:
    """Work that was captured once and is replayed."""

    def __init__(self, work: Callable[[], Any], device: torch.device, pool: Any) -> None:
        stream = torch.cuda.Stream(device, priority=_priority(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        # Not torch.cuda.graph: it empties caches and collects garbage first, which takes longer than the capture.
        # Without a collection: another engine's graphs must not be freed in the middle of a capture.
        with _CAPTURING, no_collection(), torch.cuda.device(device), torch.cuda.stream(stream):
            work()  # kernels are compiled and libraries initialise outside the capture
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # By default a capture fails when another thread allocates meanwhile: one may draft in its own stream.
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._result = work()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self) -> Any:
        self._graph.replay()
        return self._result


def _priority(device: torch.device) -> int:
    """Of recorded work: what the engine's own stream runs goes before what others do beside it."""
    return -1 if torch.cuda.current_stream(device) == torch.cuda.default_stream(device) else 0


def filled(array: npt.NDArray[Any], values: Any, rest: Any) -> None:
    """Write values to the front of an array and `rest` behind them."""
    n = len(values)
    array[:n] = values
    array[n:] = rest
