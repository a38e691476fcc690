"""Passes as they are, on a CPU (or any device without captured graphs).

`launch` starts a pass and `wait` gives its output. Where the drafter has something to do meanwhile, the pass runs in a
worker thread (torch releases the interpreter lock inside its operations); otherwise it runs inline, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ...engine.cache import Plane
from ...types import Batch, Output
from .. import Model, ops
from ..rows import rows_of
from .first_layers import FirstLayers


class Pending:
    """A pass under way."""

    def __init__(self, wait: Callable[[], Output]) -> None:
        self.wait = wait


class Eager:
    """Runs one model over its plane; where a pass has begun, it goes on from there."""

    def __init__(self, model: Model, plane: Plane, first_layers: FirstLayers | None = None) -> None:
        self.model, self.plane, self.first_layers = model, plane, first_layers
        self._worker: ThreadPoolExecutor | None = None

    def launch(self, batch: Batch, taps: tuple[int, ...], overlapped: bool, steady: bool = False) -> Pending:
        def run() -> Output:
            output = self._pass(batch, taps)
            highest, greedy = ops.top(output.logits)
            plain = (seq.params.plain and seq.matcher is None for seq in batch.choosers)
            choices = [c if bare else -1 for c, bare in zip(greedy.tolist(), plain, strict=True)]
            return replace(output, highest=highest.tolist(), choices=choices)

        if not overlapped:
            return Pending(run)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "target")
        future: Future[Output] = self._worker.submit(run)
        return Pending(future.result)

    def _pass(self, batch: Batch, taps: tuple[int, ...]) -> Output:
        if self.first_layers is not None:
            return self.first_layers.finish(batch, taps)
        return self.model.forward(rows_of(batch), self.plane, taps=taps)
