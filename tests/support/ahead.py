"""Doubles for tests of the drafter `ahead`: a host in simulated time, and an engine whose mode alternates."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from outrider.config import Config
from outrider.drafters.ahead.statistics import Profitability
from outrider.drafters.ahead.worker import WorkerHost
from outrider.llm import build_engine


def alternating(monkeypatch: pytest.MonkeyPatch, target: Any, options: dict[str, Any], **config: Any) -> Any:
    """An engine whose drafter changes its mode every few steps."""
    steps = itertools.count()

    def add_step(profitability: Profitability, *_: Any) -> None:
        profitability.ahead = next(steps) % 8 < 5

    monkeypatch.setattr(Profitability, "add_step", add_step)
    engine = build_engine(target, Config(drafter="ahead", options=options, **config))
    assert engine.drafter.host.wait_ready(30)
    return engine


class SimulatedHost(WorkerHost):
    """No worker is ever started; a subclass writes the responses.

    `due` is the time at which a response has a depth; waiting for it advances the clock of `world`.
    """

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
