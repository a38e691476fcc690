"""Passes as they are, on a CPU (or any device without captured graphs).

`launch` starts a pass and `wait` gives its output. Where the drafter has something to do meanwhile, the pass runs in a
worker thread (torch releases the interpreter lock inside its operations); otherwise it runs inline, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ...engine.cache import Plane
from ...types import Output, Rows
from .. import Model, ops
from .early_exit import Begun


class Pending:
    """A pass under way."""

    def __init__(self, wait: Callable[[], Output]) -> None:
        self.wait = wait


class Eager:
    """Runs one model over its plane; where a pass has begun, it goes on from there."""

    def __init__(self, model: Model, plane: Plane, begun: Begun | None = None) -> None:
        self.model, self.plane, self.begun = model, plane, begun
        self._worker: ThreadPoolExecutor | None = None

    def launch(self, rows: Rows, taps: tuple[int, ...], overlapped: bool, steady: bool = False) -> Pending:
        def run() -> Output:
            output = self._pass(rows, taps)
            highest, greedy = ops.top(output.logits)
            plain = (who.params.plain and who.matcher is None for who in rows.speakers)
            choices = [c if bare else -1 for c, bare in zip(greedy.tolist(), plain, strict=True)]
            return replace(output, highest=highest.tolist(), choices=choices)

        if not overlapped:
            return Pending(run)
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "target")
        future: Future[Output] = self._worker.submit(run)
        return Pending(future.result)

    def _pass(self, rows: Rows, taps: tuple[int, ...]) -> Output:
        if self.begun is not None:
            return self.begun.finish(rows, taps)
        return self.model.forward(rows, self.plane, taps=taps)
