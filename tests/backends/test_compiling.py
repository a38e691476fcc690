"""Kernels are compiled side by side before recordings are captured, on an invented device and with real kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from outrider.backends.cuda import capture, compiling
from outrider.backends.cuda.capture import Driver
from outrider.backends.cuda.compiling import _Shapes, rehearses

pytest.importorskip("triton")
CPU = torch.device("cpu")


class Recording:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.captured = work, False

    def capture(self) -> None:
        self.work()
        self.captured = True


class Capturing(Driver):
    """A device that captures."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.captures = True

    def _graph(self, work: Callable[[], Any]) -> Any:
        return Recording(work)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_COMPILE_THREADS", "2")


@pytest.mark.usefixtures("two_threads")
def test_recordings_are_captured_in_their_order_when_everything_was_rehearsed() -> None:
    driver, seen = Capturing(), list[tuple[int, bool]]()
    with driver.together():
        made = [driver.record(lambda i=i: seen.append((i, rehearses()))) for i in range(3)]
        assert seen == [(0, True), (1, True), (2, True)]
        assert not any(recording.captured for recording in made)
    assert seen[3:] == [(0, False), (1, False), (2, False)]
    assert driver.record(lambda: None).captured  # at once, from here on


@pytest.mark.usefixtures("two_threads")
def test_contexts_may_be_nested() -> None:
    driver = Capturing()
    with driver.together():
        with driver.together():
            inner = driver.record(lambda: None)
        assert not inner.captured
    assert inner.captured


@pytest.mark.usefixtures("two_threads")
def test_work_that_cannot_be_rehearsed_is_captured_all_the_same() -> None:
    driver = Capturing()

    def work() -> None:
        if rehearses():
            raise NotImplementedError

    with driver.together():
        made = [driver.record(work) for _ in range(2)]
    assert all(recording.captured for recording in made)


@pytest.mark.usefixtures("two_threads")
def test_an_error_of_work_is_raised_where_it_is_captured_and_the_driver_goes_on() -> None:
    driver = Capturing()
    with pytest.raises(ZeroDivisionError), driver.together():
        driver.record(lambda: 1 // 0)
    assert driver.record(lambda: None).captured


@pytest.mark.usefixtures("two_threads")
def test_nothing_is_captured_where_the_context_fails() -> None:
    driver = Capturing()
    made = []

    def fails() -> None:
        with driver.together():
            made.append(driver.record(lambda: None))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not made[0].captured
    assert not compiling._ONE.locked()


@pytest.mark.parametrize("switched_off", [True, False])
def test_without_rehearsals_recordings_are_captured_at_once(
    switched_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_COMPILE_THREADS", "1" if switched_off else "2")
    if not switched_off:  # another triton
        monkeypatch.setattr(compiling, "Rehearsal", None)
    driver = Capturing()
    with driver.together():
        assert driver.record(lambda: None).captured


def test_a_device_without_graphs_runs_work_at_once() -> None:
    driver = Driver(CPU)
    with driver.together():
        assert driver.record(lambda: 3).replay() == 3


@contextmanager
def shapes_only() -> Iterator[None]:
    token = compiling._current.set(object())  # type: ignore[arg-type]
    try:
        with _Shapes():
            yield
    finally:
        compiling._current.reset(token)


def test_operations_have_shapes_and_read_nothing() -> None:
    table, index = torch.zeros(5, 3, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")
    with shapes_only():
        found = table[index]
        assert found.shape == (2, 3)
        assert table.fill_(1.0) is table
        assert table.T.shape == (3, 5)
        for reads in (lambda: found.sum().item(), lambda: found.cpu(), lambda: torch.equal(found, found)):
            with pytest.raises((NotImplementedError, RuntimeError)):
                reads()
        with compiling.live():
            assert torch.ones(2).sum().item() == 2.0


PROGRAM = """
import sys, threading, time
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from outrider.backends.cuda import compiling
from outrider.backends.cuda.kernels import elementwise, rounds

class Card:  # what triton asks of a GPU before it launches something
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

driver.set_active(Card())
together, running, most = threading.Barrier(2, timeout=60), 0, 0
real = compiling.Rehearsal.timed
def timed(self, build):  # both kernels are being compiled at the same time
    together.wait()
    return real(self, build)
compiling.Rehearsal.timed = timed

def work():
    place, slot = torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.int32)
    table, unread = torch.zeros(4, 16, dtype=torch.int32), torch.zeros(64, dtype=torch.long)
    for _ in range(2):
        rounds.patch(place, slot, table)
        elementwise.start_pass(place, unread, place, slot, table)

kernels = rounds._patch, elementwise._start_pass
with compiling.rehearsal(torch.device("cpu")) as rehearse:
    rehearse(work)
    assert not rehearse._over, "work failed"
found = [kernel for each in kernels for kernel in each.device_caches[0][0].values()]
assert [type(each).__name__ for each in found] == ["CompiledKernel"] * 2, found
assert all(each.asm["cubin"] for each in found)

def broken(*arguments, **options):  # a compiler that fails: triton knows nothing of these kernels afterwards
    raise RuntimeError("no space left")
for each in kernels:
    each.device_caches.clear()
    each.device_caches[0]
    each.compile = broken
together = threading.Barrier(2, timeout=60)
with compiling.rehearsal(torch.device("cpu")) as rehearse:
    rehearse(work)
assert not any(each.device_caches[0][0] for each in kernels)
print("done")
"""


def test_real_kernels_are_compiled_at_the_same_time(tmp_path: Any) -> None:
    """In a process of its own: here kernels are interpreted."""
    import os

    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OUTRIDER_COMPILE_THREADS": "2"}
    environment.pop("TRITON_INTERPRET", None)
    made = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert made.stdout.strip() == "done", made.stderr[-3000:]
    assert "compiled again" in made.stderr


def test_a_graph_is_captured_once_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = capture._Graph(lambda: None, CPU, None)
    with pytest.raises(AttributeError):
        graph.replay()  # nothing is replayed before
