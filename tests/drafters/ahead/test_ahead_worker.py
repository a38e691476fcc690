"""Workers that fail, are killed, stopped and slowed: the text stays the target's, no step waits for long, and no
process outlives the engine."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.config import Config
from outrider.drafters.ahead import worker as worker_module
from outrider.drafters.ahead.drafter import Ahead
from outrider.drafters.ahead.forks import Forker
from outrider.drafters.ahead.setup import shares_gpu
from outrider.drafters.ahead.shared_queue import QueueSizes
from outrider.drafters.ahead.worker import HANG_TIMEOUT, ProcessHost, ThreadHost
from outrider.llm import build_engine
from outrider.testing import Scenario, decode

from support.toys import reference, toy

TARGET = toy()
OPTIONS = {"ahead_always": True, "ahead_depth": 4, "ahead_fallback": ""}
SIZES = QueueSizes(2, 16, 8)


class SkippableClock:
    """The real clock, and `skipped` seconds more."""

    skipped = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.skipped


# ---------------------------------------------------------------- threads


def test_a_failing_worker_is_reported_and_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "BACKOFF", 0.0)

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("broken pass")

    options = {"draft_model": toy(blur=0.08), **OPTIONS}
    engine = build_engine(TARGET, Config(drafter="ahead", k=5, options=options))
    host = engine.drafter.host
    assert host.wait_ready(30)
    monkeypatch.setattr(Forker, "_forward", broken)
    params, scenario = SamplingParams(max_tokens=30), Scenario("x", batch=2)
    assert decode(engine, scenario, params) == reference(TARGET, scenario, params)
    assert host.deaths > 0
    assert "broken pass" in host.trouble
    assert "broken pass" in engine.drafter.why or host.ready


def test_a_model_on_the_targets_gpu_gets_a_stream_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that the worker starts, from loading on, runs in a stream that first waits for the weights."""
    gpu, calls = torch.device("cuda"), list[str]()
    assert shares_gpu(gpu, torch.device("cuda:0"))
    assert not shares_gpu(gpu, torch.device("cuda:1"))
    assert not shares_gpu(torch.device("cpu"), torch.device("cpu"))

    class Stream:
        def __init__(self, device: torch.device, priority: int) -> None:
            calls.append(f"stream {priority}")

        def wait_stream(self, other: str) -> None:
            calls.append(f"waits for {other}")

    @contextmanager
    def within(context: Any) -> Iterator[None]:
        calls.append("enter stream" if isinstance(context, Stream) else "enter device")
        yield
        calls.append("leave")

    for name, double in (("Stream", Stream), ("stream", within), ("device", within)):
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the engine's")

    def make() -> Forker:
        calls.append("make")
        return Forker(TARGET, 10, 2, 10)

    host = ThreadHost(SIZES, make, gpu)
    assert host.kind == "stream"
    assert host.wait_ready(10)
    assert calls == ["stream 0", "waits for the engine's", "enter device", "enter stream", "make"]
    host.close()
    host._thread.join(10)  # type: ignore[union-attr]
    assert calls[-2:] == ["leave", "leave"]
    calls.clear()
    other = ThreadHost(SIZES, make)
    assert other.kind == "thread"
    assert other.wait_ready(10)
    assert calls == ["make"]
    other.close()


# ---------------------------------------------------------------- processes


def started(folder: Path) -> tuple[LLM, Ahead, ProcessHost, SkippableClock]:
    llm = LLM(folder, drafter="ahead", draft_model=str(folder), k=4, device="cpu", **OPTIONS)
    drafter = llm.engine.drafter
    assert isinstance(drafter, Ahead)
    host = drafter.host
    assert isinstance(host, ProcessHost)
    host.clock = clock = SkippableClock()
    assert host.wait_ready(60), host.trouble
    return llm, drafter, host, clock


def pid_of(host: ProcessHost) -> int | None:
    return host._running[0].pid if host._running else None


def kill(host: ProcessHost) -> None:
    """SIGKILL, and wait for the process to be gone."""
    (process,) = host._running
    process.kill()
    process.wait()


PROMPTS = ["the quick brown", "def add(a", "one two", "fox fox fox", "lazy", "a + b", "three four", "dog jumps"]


@pytest.mark.parametrize(("batch", "temperature"), [(1, 0.9), (8, 0.0)])
def test_a_disturbed_process_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, batch: int, temperature: float
) -> None:
    """Killed, stopped (and continued or not) at random, with skips in time: the same text, and no stream lost."""
    monkeypatch.setattr("outrider.drafters.ahead.drafter.MAX_DEADLINE", 0.2)
    llm, _, host, clock = started(folder)
    dice, sent = random.Random(batch), {"kill": 0, "stop": 0, "continue": 0}
    step = llm.engine.step

    def disturbed() -> object:
        pid, chance = pid_of(host), dice.random()
        if pid is not None and chance < 0.15:
            name = dice.choice(("kill", "stop", "stop", "continue"))
            os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}[name])
            sent[name] += 1
        elif chance < 0.3:
            clock.skipped += HANG_TIMEOUT / 2
        return step()

    monkeypatch.setattr(llm.engine, "step", disturbed)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    expected = [r.token_ids for r in llm.using(drafter="off").generate(PROMPTS[:batch], params)]
    for _ in range(3 if batch == 1 else 1):
        assert [r.token_ids for r in llm.generate(PROMPTS[:batch], params)] == expected
        host.wait_ready(5)
    assert sum(sent.values()) > 0
    host.close()


def test_a_killed_process_is_restarted_and_a_stopped_one_bypassed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.drafters.ahead.drafter.MAX_DEADLINE", 0.1)
    llm, drafter, host, clock = started(folder)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    text = llm.generate("the quick", params)[0].text
    assert drafter.statistics.hits or drafter.statistics.jits
    first = pid_of(host)
    kill(host)
    assert llm.generate("the quick", params)[0].text == text
    clock.skipped += 1  # the backoff
    assert host.wait_ready(60)
    assert pid_of(host) != first
    assert host.deaths == 1
    stopped, bypassed = pid_of(host), host.bypassed
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    assert llm.generate("the quick", params)[0].text == text
    assert host.bypassed == bypassed + 1  # one deadline was waited for, in all steps together
    os.kill(stopped, signal.SIGCONT)
    assert host.wait_ready(30)  # it has answered
    assert pid_of(host) == stopped
    host.close()
    assert not _exists(stopped)


def test_a_process_that_stays_stopped_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.drafters.ahead.drafter.MAX_DEADLINE", 0.1)
    llm, _, host, clock = started(folder)
    pid = pid_of(host)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    llm.generate("the quick", params)
    assert host.deaths == 0
    clock.skipped += HANG_TIMEOUT
    llm.generate("the quick", params)
    assert host.deaths == 1
    assert "no progress" in host.trouble
    assert not _exists(pid)
    host.close()


def test_the_model_is_waited_for_only_before_the_first_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, drafter="ahead", draft_model=str(folder), k=4, device="cpu", **OPTIONS)
    drafter, waits = llm.engine.drafter, list[float]()
    assert isinstance(drafter, Ahead)
    host = drafter.host
    assert isinstance(host, ProcessHost)
    wait_ready = host.wait_ready

    def counted(seconds: float, deaths: int | None = None) -> bool:
        waits.append(seconds)
        return wait_ready(seconds, deaths)

    monkeypatch.setattr(host, "wait_ready", counted)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    llm.generate("the quick", params)
    assert drafter.statistics.hit_rate is not None
    kill(host)
    llm.generate("the quick", params)
    assert waits == [30.0]
    assert host.bypassed == 0  # nor was a dead process waited for
    host.close()


@pytest.mark.parametrize("exit_kind", ["abrupt", pytest.param("normal", marks=pytest.mark.slow)])
def test_no_process_outlives_the_program(folder: Path, exit_kind: str) -> None:
    script = (
        "import sys, os; from outrider import LLM\n"
        f"llm = LLM({str(folder)!r}, drafter='ahead', draft_model={str(folder)!r}, k=4, device='cpu')\n"
        "host = llm.engine.drafter.host; assert host.wait_ready(60)\n"
        "print(host._running[0].pid, flush=True)\n"
        "os._exit(3) if sys.argv[1] == 'abrupt' else None\n"
    )
    done = subprocess.run([sys.executable, "-c", script, exit_kind], capture_output=True, text=True, timeout=120)
    pid = int(done.stdout.strip() or done.stderr)
    deadline = time.perf_counter() + 10
    while _exists(pid) and time.perf_counter() < deadline:
        time.sleep(0.05)
    assert not _exists(pid)


def test_a_process_that_cannot_start_reports_why(folder: Path) -> None:
    host = ProcessHost(SIZES, {"model": str(folder / "missing"), "threads": 1, "device": "cpu"})
    assert not host.wait_ready(60, deaths=1)
    assert host.deaths == 1
    assert "Error" in host.trouble
    host.close()


def _exists(pid: int) -> bool:
    """Alive, or a zombie of this process (those of init do not count)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return not (status.rsplit(")", 1)[1].split()[0] == "Z" and f" {os.getpid()} " not in status)
