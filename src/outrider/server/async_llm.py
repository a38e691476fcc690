"""`AsyncLLM`: the library for an event loop, over the worker and the engine thread of the server.

    async with AsyncLLM("path/or/name") as llm:
        result = await llm.generate("Once upon a time", SamplingParams(max_tokens=64))
        async for piece in llm.stream([{"role": "user", "content": "Hello"}]):
            print(piece.text, end="")

Promise: requests of all tasks run in one batch, and every text is that of a solo run. A task that is cancelled, or that
leaves a stream, costs the engine no further step. The loop never waits for a pass.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, OutriderError
from ..llm import LLM, Completion, Messages, Result, check_messages
from ..models.detokenizer import Piece
from ..params import SamplingParams, sampling_params
from .errors import ApiError
from .host import HostOptions
from .jobs import Choice, Delta, Job
from .links import LocalEngine
from .requests import ParsedRequest, Prompt
from .worker import Worker

if TYPE_CHECKING:
    from ..models.checkpoint import Checkpoint

_WAIT = 60.0  # seconds of one wait for news; it is repeated


class AsyncLLM:
    """An `LLM` whose calls are awaited. It belongs to the event loop that uses it first."""

    def __init__(self, model: str | Path | Checkpoint | LLM | None = None, **arguments: Any) -> None:
        """As `LLM`: loads the model. An `LLM` that is given belongs to this object from now on."""
        if isinstance(model, LLM) and arguments:
            raise ConfigError(f"The LLM is made already: give {', '.join(arguments)} to LLM().")
        self.llm = model if isinstance(model, LLM) else LLM(model, **arguments)
        self._engine = LocalEngine(self.llm, HostOptions())
        self._worker = Worker(self._engine, queue=sys.maxsize)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def __aenter__(self) -> AsyncLLM:
        self._start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    async def generate(
        self,
        prompt: str | list[int] | Messages,
        params: SamplingParams | None = None,
        speculate: bool = True,
        **names: Any,
    ) -> Result:
        """Continue a prompt, or answer messages. A cancelled task ends its request before the next step."""
        params = sampling_params(params, names) or SamplingParams()
        job = await self._submit(prompt, params, speculate, streams=False)
        try:
            left = len(job.choices)
            while left:
                left -= (await _news(job)).finish is not None
        finally:
            self._worker.cancel(job)
        ids = job.request.prompts[0].ids
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids)
        return Result(text, ids, [_completion(choice) for choice in job.choices])

    async def stream(
        self,
        prompt: str | list[int] | Messages,
        params: SamplingParams | None = None,
        speculate: bool = True,
        **names: Any,
    ) -> AsyncIterator[Piece]:
        """Continue a prompt, or answer messages: one piece for each step, or for several where the reader is slow.

        Leaving the loop cancels the request. `rejected` of the pieces is empty.
        """
        params = sampling_params(params, names) or SamplingParams()
        job = await self._submit(prompt, replace(params, n=1), speculate, streams=True)
        try:
            finish = None
            while finish is None:
                delta = await _news(job)
                finish = delta.finish
                if delta.tokens:
                    yield Piece(delta.text, delta.tokens, delta.origins, delta.texts, [])
        finally:
            self._worker.cancel(job)

    async def close(self) -> None:
        """End what is running, stop the engine and give back its memory. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            await asyncio.to_thread(self._worker.stop)
        self.llm.close()

    def _start(self) -> None:
        if self._closed:
            raise ConfigError("This AsyncLLM is closed; make another one.")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._worker.start()
        elif self._loop is not loop:
            raise ConfigError("This AsyncLLM belongs to another event loop; make one for each loop.")

    async def _submit(
        self, prompt: str | list[int] | Messages, params: SamplingParams, speculate: bool, streams: bool
    ) -> Job:
        """A request that the engine has accepted."""
        self._start()
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"The second argument is SamplingParams, but this is of type {type(params).__name__}.")
        encoded = await asyncio.to_thread(self._encode, prompt)  # tokenising a long prompt takes a while
        if isinstance(params.prediction, str):
            params = replace(params, prediction=tuple(self.tokenizer.encode_answer(params.prediction)))
        plain_reason = "" if speculate else "the call switched speculation off"
        request = ParsedRequest([encoded], params, plain_reason=plain_reason)
        job = Job("", "", streams, request, self._engine.facts, self.tokenizer)
        try:
            self._worker.submit(job)
            await job.accepted
        except ApiError as error:
            raise _library_error(error) from None
        except BaseException:
            self._worker.cancel(job)
            raise
        return job

    def _encode(self, prompt: Any) -> Prompt:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            return Prompt(self.tokenizer.encode_chat(check_messages(prompt)))
        return Prompt(self.llm.encode(prompt), raw=isinstance(prompt, str))


async def _news(job: Job) -> Delta:
    while (event := await job.events.get(_WAIT)) is None:
        pass
    if isinstance(event, ApiError):
        raise _library_error(event)
    return event


def _library_error(error: ApiError) -> OutriderError:
    if error.code == "shutting_down":
        return OutriderError("This AsyncLLM was closed before the answer had ended.")
    return ConfigError(error.message) if error.status == 400 else OutriderError(error.message)


def _completion(choice: Choice) -> Completion:
    logprobs = choice.logprobs if choice.job.request.params.logprobs is not None else None
    texts, stats = list(choice.reader.texts), choice.stats
    return Completion("".join(texts), choice.tokens, choice.finish, choice.origins, stats, choice.seed, logprobs, texts)
