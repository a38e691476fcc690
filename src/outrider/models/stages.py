"""Work that is done once and then kept on disk (compile, quantise, time) says what it does and how far it is.

    with stage("Quantising the weights") as done:
        done(0.4)

Nobody listens unless a command does, and then a stage costs nothing. It knows names and shares, no terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, float], None]  # a stage's name, and the share that is done
_listeners: list[Listener] = []


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell `listener` about every stage in between."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def stage(name: str) -> Iterator[Callable[[float], None]]:
    """Yields a function of the share that is done."""

    def report(share: float) -> None:
        for listener in _listeners:
            listener(name, share)

    report(0.0)
    yield report
    report(1.0)
