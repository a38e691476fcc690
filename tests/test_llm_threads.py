"""One LLM, many callers: every text equals its solo run, and they run in one batch."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, ConfigError, SamplingParams

from support import tiny

WORDS = tiny.TEXTS[0].split() * 2
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=6 + i % 20) for i in range(40)]
PROMPTS = [" ".join(WORDS[i % 7 : i % 7 + 1 + i % 5]) for i in range(40)]


@pytest.fixture(scope="module")
def solo(llm: LLM) -> list[str]:
    alone = llm.using(drafter="off", max_batch=1)
    return [alone.generate(prompt, params)[0].text for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def answer(llm: LLM, i: int) -> str:
    """By `generate` and by `stream` in turn."""
    prompt, params = PROMPTS[i % 40], PARAMS[i % 40]
    if i % 3:
        return str(llm.generate(prompt, params)[0].text)
    return "".join(piece.text for piece in llm.stream(prompt, params))


def test_sixteen_threads(llm: LLM, solo: list[str]) -> None:
    shared = llm.using()
    engine, together = shared.engine, []
    step = engine.step
    engine.step = lambda: (together.append(len(engine.scheduler.running)), step())[1]  # type: ignore[method-assign]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda i: answer(shared, i), range(160))) == solo * 4
    assert max(together) > 4  # and not one after the other
    assert not shared.engine.busy
    shared.engine.cache.check()


def test_two_hundred_tasks(llm: LLM, solo: list[str]) -> None:
    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(asyncio.to_thread(answer, llm, i) for i in range(200)))

    assert asyncio.run(all_of_them()) == solo * 5


def test_drafters_of_one_target_in_two_threads(llm: LLM, solo: list[str]) -> None:
    """They share the target's buffers, so they take turns."""
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(lambda one: [answer(one, i) for i in range(40)], llm.using(drafter=name))
            for name in ("ngram", "off")
        ]
        assert [run.result() for run in runs] == [solo, solo]


class Disturbed:
    """An engine whose n-th step with several sequences fails, for every caller whose text it would have continued."""

    def __init__(self, llm: LLM, error: BaseException) -> None:
        self.llm, self.error, self.raised = llm, error, threading.Event()
        engine, step = llm.engine, llm.engine.step

        def fails() -> Any:
            if len(engine.scheduler.running) > 2 and not self.raised.is_set():
                self.raised.set()
                raise self.error
            return step()

        engine.step = fails  # type: ignore[method-assign]


def outcomes(llm: LLM) -> list[str | BaseException]:
    def one(i: int) -> str | BaseException:
        try:
            return answer(llm, i)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, range(40)))


def test_a_failed_step_fails_those_that_were_running(llm: LLM, solo: list[str]) -> None:
    shared = llm.using()
    error = RuntimeError("a bug")
    Disturbed(shared, error)
    got = outcomes(shared)
    failed = [i for i, each in enumerate(got) if each is error]
    assert 2 < len(failed) < 9
    assert all(each == solo[i] for i, each in enumerate(got) if i not in failed)


def test_an_interrupt_ends_only_the_call_that_it_interrupts(llm: LLM, solo: list[str]) -> None:
    shared = llm.using()
    interrupt = KeyboardInterrupt()
    Disturbed(shared, interrupt)
    got = outcomes(shared)
    assert got.count(interrupt) == 1
    assert all(each in (interrupt, solo[i]) for i, each in enumerate(got))
    assert not shared.engine.busy


def test_an_llm_can_be_closed(folder: Path) -> None:
    with LLM(folder, dtype="float32") as llm:
        stream = llm.stream("one two", SamplingParams(max_tokens=40))
        next(stream)
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate("one")
    with pytest.raises(ConfigError, match="closed"):
        next(stream)
