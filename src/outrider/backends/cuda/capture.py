"""What captured passes stand on: numbers sent in one copy, answers brought back in one copy, work recorded as a graph.

On a device without graphs (a CPU under triton's interpreter) the same work simply runs, which is how it is tested. It
knows bytes, streams and graphs; it knows neither models nor sequences.
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
_COPIES = 4  # host buffers in turn: one may still be under way while the next is filled


class Form:
    """Named arrays on the host and their twins on the device, which travel together in one copy."""

    def __init__(self, device: torch.device, fields: dict[str, Field]) -> None:
        places, size = {}, 0
        for name, (dtype, shape) in fields.items():
            places[name] = size
            size += -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(_COPIES)]
        self._twin = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views = [_views(host, fields, places) for host in self._hosts]
        self._arrays = [{name: view.numpy() for name, view in views.items()} for views in self._views]
        self.device: dict[str, Tensor] = _views(self._twin, fields, places)
        self._turn = 0
        self._sent = [mark(device) for _ in range(_COPIES)]

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


class Mark(Protocol):
    """A moment in the device's stream of work."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Any) -> float: ...


class _Now:
    """The same where work is done at once."""

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Any) -> float:
        return 0.0


def mark(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _Now()


class Recording:
    """Work that was captured once and is replayed; where nothing can be captured, it is done anew each time."""

    def __init__(self, work: Callable[[], Any], device: torch.device, pool: Pool | None) -> None:
        self._work, self._graph, self.result = work, None, None
        if pool is None:
            return
        stream = torch.cuda.Stream(device, priority=_priority(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        # Not torch.cuda.graph: it empties caches and collects garbage first, which takes longer than the capture.
        # Without a collection: another engine's graphs must not be freed in the middle of a capture.
        with _CAPTURING, no_collection(), torch.cuda.device(device), torch.cuda.stream(stream):
            work()  # kernels are compiled and libraries wake up outside the capture
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # By default a capture fails when another thread allocates meanwhile: one may draft in its own stream.
            self._graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            try:
                self.result = work()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self) -> Any:
        if self._graph is None:
            return self._work()
        self._graph.replay()
        return self.result


def _priority(device: torch.device) -> int:
    """Of recorded work: what the engine's own stream runs goes before what others do beside it."""
    return -1 if torch.cuda.current_stream(device) == torch.cuda.default_stream(device) else 0


class Pool:
    """Memory that all recordings of an engine share: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        # torch refuses to record into a pool whose recordings have all been dropped: this one never is.
        self._first = Recording(lambda: torch.zeros(1, device=device), device, self)


def pool(device: torch.device) -> Pool | None:
    return Pool(device) if device.type == "cuda" else None


def filled(array: npt.NDArray[Any], values: Any, rest: Any) -> None:
    """Write values to the front of an array and `rest` behind them."""
    n = len(values)
    array[:n] = values
    array[n:] = rest
