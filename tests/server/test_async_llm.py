"""`AsyncLLM`: many tasks on one loop, each with the text of its solo run; cancelling and leaving free the slots."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, ConfigError, OutriderError, SamplingParams
from outrider.server.jobs import Choice, Job
from outrider.types import Sequence

from support.serving import HELLO

PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=4 + i % 16) for i in range(20)]
PROMPTS = ["the quick brown fox " * (1 + i % 4) for i in range(20)]
LONG = SamplingParams(max_tokens=150, ignore_eos=True)


def run(folder: Path, scenario: Callable[[AsyncLLM], Awaitable[Any]], **options: Any) -> Any:
    """Run a scenario; afterwards the engine has nothing of it."""

    async def live() -> Any:
        llm = AsyncLLM(folder, drafter="suffix", dtype="float32", k=4, **options)
        async with llm:
            result = await scenario(llm)
            while not llm._worker.idle:
                await asyncio.sleep(0.005)
            assert not llm.llm.engine.busy
            llm.llm.engine.cache.check()
            assert not llm._worker._jobs
        return result

    return asyncio.run(live())


@pytest.fixture(scope="module")
def solo(llm: LLM) -> list[list[int]]:
    alone = llm.using(drafter="off", max_batch=1)
    return [alone.generate(p, s)[0].token_ids for p, s in zip(PROMPTS, PARAMS, strict=True)]


def test_results_are_the_librarys(folder: Path, llm: LLM) -> None:
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=20, logprobs=2, stop=["zz"])

    async def scenario(each: AsyncLLM) -> None:
        ours, theirs = await each.generate(PROMPTS[0], params), llm.generate(PROMPTS[0], params)[0]
        assert (ours.prompt, ours.prompt_token_ids) == (theirs.prompt, theirs.prompt_token_ids)
        for one, other in zip(ours.outputs, theirs.outputs, strict=True):
            assert (one.text, one.token_ids, one.seed) == (other.text, other.token_ids, other.seed)
            assert (one.finish_reason, one.logprobs) == (other.finish_reason, other.logprobs)
            assert len(one.origins) == len(one.token_ids)
            assert one.origins.count("a") == one.stats.accepted
        assert (await each.generate(HELLO, LONG)).text == llm.chat(HELLO, LONG)[0].text
        pieces = [piece async for piece in each.stream(HELLO, LONG)]
        assert "".join(piece.text for piece in pieces) == llm.chat(HELLO, LONG)[0].text
        assert all(len(piece.origins) == len(piece.token_ids) == len(piece.texts) for piece in pieces)
        assert len((await each.generate(HELLO, max_new_tokens=3, seed=1)).token_ids) == 3
        plain = await each.generate(PROMPTS[0], LONG, speculate=False)
        assert (plain.token_ids, plain.stats.drafted) == (llm.generate(PROMPTS[0], LONG)[0].token_ids, 0)
        form = SamplingParams(guide={"choice": ["yes", "no"]}, prediction="yes")
        assert (await each.generate("fox?", form)).text == llm.generate("fox?", form)[0].text

    run(folder, scenario)


async def one_task(llm: AsyncLLM, i: int) -> list[int] | None:
    """By `generate`, by `stream`, by a stream that is left, and by a task that is cancelled, in turn."""
    prompt, params = PROMPTS[i % 20], PARAMS[i % 20]
    if i % 4 == 0:
        return (await llm.generate(prompt, params)).token_ids
    if i % 4 == 1:
        return [token async for piece in llm.stream(prompt, params) for token in piece.token_ids]
    if i % 4 == 2:
        async for _ in llm.stream(prompt, LONG):
            break
        return None
    task = asyncio.create_task(llm.generate(prompt, LONG))
    await asyncio.sleep(0.001 * (i % 7))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return None


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_two_hundred_tasks_with_cancellations(folder: Path, solo: list[list[int]], rounds: int) -> None:
    """Texts equal solo runs, tasks share batches, and nothing of a round is left in memory after it."""

    async def scenario(llm: AsyncLLM) -> None:
        for _ in range(rounds):
            texts = await asyncio.gather(*(one_task(llm, i) for i in range(200)))
            for i, text in enumerate(texts):
                assert text is None or text == solo[i % 20]
            while not llm._worker.idle:
                await asyncio.sleep(0.005)
            gc.collect()
            left = [each for each in gc.get_objects() if isinstance(each, Job | Choice | Sequence)]
            assert len(left) <= 40  # finished sequences whose prefixes the cache keeps

    run(folder, scenario, max_batch=16)


def test_a_stream_that_is_left_frees_its_slots(folder: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        async for _ in llm.stream("the fox", SamplingParams(max_tokens=200, ignore_eos=True)):
            break
        for _ in range(4):  # turns of the loop in which it closes the generator
            await asyncio.sleep(0)
        assert not any(not choice.ended for job in llm._worker._jobs.values() for choice in job.choices)

    run(folder, scenario)


def test_what_is_wrong_is_reported(folder: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        for prompt, params, sentence in (
            ("fox " * 400, None, "only 256 fit"), (b"fox", None, "bytes"), ([], None, "empty"),
            ("fox", {"temperature": 1}, "SamplingParams"), ("fox", SamplingParams(guide={"regex": "("}), "regex"),
            ([{"role": "user"}], None, "'role' and 'content'"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=sentence):
                await llm.generate(prompt, params)  # type: ignore[arg-type]

    run(folder, scenario)


def test_closing(folder: Path) -> None:
    llm = AsyncLLM(folder, drafter="off", dtype="float32")

    async def read_all(stream: Any) -> None:
        async for _ in stream:
            pass

    async def first() -> None:
        stream = llm.stream("the fox", LONG)
        await anext(stream)
        await llm.close()
        await llm.close()
        with pytest.raises(OutriderError, match="was closed before"):
            await read_all(stream)
        with pytest.raises(ConfigError, match="is closed"):
            await llm.generate("fox")

    asyncio.run(first())
    asyncio.run(AsyncLLM(folder, drafter="off", dtype="float32").close())  # that was never used


def test_one_loop(folder: Path, llm: LLM) -> None:
    each = AsyncLLM(folder, drafter="off", dtype="float32")

    async def use() -> str:
        return (await each.generate("fox", SamplingParams(max_tokens=2))).text

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(use())
    with pytest.raises(ConfigError, match="another event loop"):
        asyncio.run(use())
    loop.run_until_complete(each.close())
    loop.close()
    with pytest.raises(ConfigError, match="give k to LLM"):
        AsyncLLM(llm, k=3)


def test_without_the_servers_packages_it_says_what_to_install() -> None:
    """In a process of its own: modules that are imported twice would not be those that other tests know."""
    code = "import sys; sys.modules['fastapi'] = None; import outrider; outrider.AsyncLLM"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "outrider[serve]" in done.stderr.splitlines()[-1]
