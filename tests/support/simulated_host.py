"""A host of the `ahead` drafter in simulated time: a subclass writes the responses, and no worker is ever started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.drafters.ahead.worker import WorkerHost


class SimulatedHost(WorkerHost):
    """`due` gives the time at which a response has a depth; waiting for it advances the clock of `world`."""

    ready = True  # type: ignore[assignment]
    world: Any
    due: Callable[[int], float] = staticmethod(lambda depth: 0.0)

    def supervise(self) -> None:
        pass

    def wait(self, depth: int, seconds: float) -> bool:
        self.world.now = max(self.world.now, self.due(depth))
        return True

    def _start(self) -> Any:
        raise AssertionError("a simulated host starts no worker")

    def _alive(self) -> bool:
        return True

    def _exit_reason(self) -> str:
        return ""

    def _stop(self) -> None:
        pass
