"""Graph capture: work recorded once and replayed, with its inputs sent in one copy and its results received in one.

On a device without graphs (a CPU under triton's interpreter) the same work runs directly, which is how it is tested; a
test may also supply a `Driver` with its own clock. It knows bytes, streams and graphs; it knows neither models nor
sequences.

For debugging a driver *poisons*: what nobody has written (K/V slots, lines of state, inputs, rows, reports) holds NaN
or ids that do not exist, at the start and again whenever it changes hands. What reads it fails or says NaN, instead of
finding what an earlier round left there. OUTRIDER_POISON=1 does that in any program; it takes time and changes no text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import nan, prod
from threading import Lock
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from ..machine import gc_paused
from . import compiling

Field = tuple[torch.dtype, tuple[int, ...]]
_ALIGNMENT = 64  # bytes
_CAPTURING = Lock()  # one capture at a time in the process
IMPOSSIBLE = 1 << 30  # a token id, slot or position that does not exist
_COPIES = 4  # host buffers, used in rotation: one may still be in flight while the next is filled


class _Immediate:
    """Events (as `torch.cuda.Event`) and recordings (as `_Graph`) of a device that runs work at once."""

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

    def __init__(self, device: torch.device, poisons: bool | None = None) -> None:
        self.device, self.captures = device, device.type == "cuda"
        self.poisons = os.environ.get("OUTRIDER_POISON") == "1" if poisons is None else poisons
        self.stream = torch.cuda.current_stream(device) if self.captures else None
        self._rehearsal: compiling.Rehearsal | None = None
        self._waiting: list[Any] = []  # recordings to be captured when the rehearsal has ended
        if self.captures:  # all recordings share one memory pool: they never run at the same time
            self._pool = torch.cuda.graph_pool_handle()
            # torch cannot record into a pool whose recordings have all been dropped: this one is kept.
            self._first = self.record(lambda: torch.zeros(1, device=device))

    def allocated(self) -> None:
        """Called after an allocation of pinned memory, which takes the host milliseconds."""

    def poison(self, tensors: Iterable[Tensor]) -> None:
        """What these hold is not written: in debugging it must not be read either."""
        for tensor in tensors if self.poisons else ():
            tensor.fill_(nan if tensor.is_floating_point() else IMPOSSIBLE)

    def event(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.captures else _Immediate()

    def record(self, work: Callable[[], Any]) -> Any:
        """Work that is run by its `replay()`, which returns the result's tensors."""
        if not self.captures:
            return _Immediate(work)
        graph = self._graph(work)
        if self._rehearsal is None:
            graph.capture()
        else:
            self._rehearsal(work)
            self._waiting.append(graph)
        return graph

    def _graph(self, work: Callable[[], Any]) -> Any:
        return _Graph(work, self.device, self._pool)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Recordings that are made inside are captured at its end, in their order, after their kernels have been
        compiled side by side. None of them may be replayed before."""
        if not self.captures or self._rehearsal is not None:
            yield
            return
        try:
            with compiling.rehearsal(self.device) as self._rehearsal:
                yield
            for graph in self._waiting:
                graph.capture()
        finally:
            self._rehearsal, self._waiting = None, []


class PinnedBuffer:
    """Named arrays in pinned host memory and their mirrors on the device, copied together in one transfer."""

    def __init__(self, driver: Driver, fields: dict[str, Field]) -> None:
        device = driver.device
        size = sum(_aligned(field) for field in fields.values())
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(_COPIES)]
        driver.allocated()
        self._mirror = torch.zeros(size, dtype=torch.uint8, device=device)
        self.device = _views(self._mirror, fields)
        self._current, self._driver = 0, driver
        self._views = [_views(host, fields) for host in self._hosts]
        self._arrays = [{name: view.numpy() for name, view in views.items()} for views in self._views]
        self._sent = [driver.event() for _ in range(_COPIES)]

    def next(self) -> dict[str, npt.NDArray[Any]]:
        """The next host copy, to be filled and sent, or to be received into."""
        self._current = (self._current + 1) % _COPIES
        self._sent[self._current].synchronize()  # waits only if many passes were started without waiting for one
        self._driver.poison(self._views[self._current].values())
        return self._arrays[self._current]

    def send(self) -> None:
        self._mirror.copy_(self._hosts[self._current], non_blocking=True)
        self._sent[self._current].record()

    def receive(self) -> None:
        self._hosts[self._current].copy_(self._mirror, non_blocking=True)


def _aligned(field: Field) -> int:
    """Bytes of a field with its padding."""
    return -(-prod(field[1]) * field[0].itemsize // _ALIGNMENT) * _ALIGNMENT


def _views(buffer: Tensor, fields: dict[str, Field]) -> dict[str, Tensor]:
    views, offset = {}, 0
    for name, (dtype, shape) in fields.items():
        views[name] = buffer[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        offset += _aligned((dtype, shape))
    return views


class _Graph:
    """Work that is captured once and then replayed."""

    def __init__(self, work: Callable[[], Any], device: torch.device, pool: Any) -> None:
        self._work: Callable[[], Any] | None = work
        self._device, self._pool = device, pool

    def capture(self) -> None:
        assert self._work is not None
        work, device, self._work = self._work, self._device, None  # it may hold what the recording does not need
        # Recorded work of the engine's own stream goes before that of other streams.
        own = torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
        stream = torch.cuda.Stream(device, priority=-1 if own else 0)
        stream.wait_stream(torch.cuda.current_stream(device))
        # Not torch.cuda.graph: it empties caches and collects garbage first, which takes longer than the capture.
        # The collector is paused: another engine's graphs must not be freed during a capture.
        with _CAPTURING, gc_paused(), torch.cuda.device(device), torch.cuda.stream(stream):
            work()  # kernels are compiled and libraries initialise outside the capture
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # By default a capture fails when another thread allocates; one may work in its own stream.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._result = work()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self) -> Any:
        self._graph.replay()
        return self._result


def fill_padded(array: npt.NDArray[Any], values: Any, padding: Any) -> None:
    """Write the values to the front of the array and padding to the rest."""
    array[: len(values)] = values
    array[len(values) :] = padding
