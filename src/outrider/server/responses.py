"""Responses: OpenAI's objects as dictionaries, sent whole or as server-sent events.

Promise: however a request ends (last token, deadline, disconnect, bug), its job is cancelled, so that its slots are
free. A stream that has started ends with its last event, or with an error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..models.tool_calls import CallPart, CallReader
from ..types import TokenLogprob
from .errors import ApiError
from .jobs import Choice, Delta, Job
from .messages import EngineLink, Facts, Line
from .requests import ParsedRequest
from .tracing import TraceStream
from .worker import Worker

MIN_LOGPROB = -9999.0  # OpenAI's value for a token with probability 0
KEEPALIVE = 10.0  # seconds without an event after which a stream sends a comment
DONE = b"data: [DONE]\n\n"
Json = dict[str, Any]


@dataclass
class ResponseBuilder:
    """Builds the responses of one request."""

    engine: EngineLink
    model: str
    job: Job
    with_ids: bool
    kind: str = "chat.completion"  # or text_completion
    with_usage: bool = False  # the last event of a stream reports it
    created: int = field(default_factory=lambda: int(time.time()))
    offsets: dict[int, int] = field(default_factory=dict)  # choice index -> characters sent so far
    _templates: dict[int, tuple[bytes, bytes, bytes]] = field(default_factory=dict)
    _readers: dict[int, CallReader] = field(default_factory=dict)  # of choices that may call tools
    _traces: list[TraceStream] = field(init=False)  # one per choice, where a trace is requested

    def __post_init__(self) -> None:
        traced, job = self.job.request.trace_level != "off", self.job
        self._traces = [TraceStream(self.engine, job.request, each) for each in job.choices] if traced else []

    def whole(self, deltas: list[Delta]) -> Json:
        """The response of a request that does not stream: one delta per choice."""
        choices = [self._choice(delta, whole=True) for delta in deltas]
        measured = self._measured(self.job.choices)
        return self._head(chunk=False) | {"choices": choices, "usage": self.usage(), **measured}

    def chunk(self, delta: Delta, trace: list[Line] | None = None) -> Json:
        choice = self._choice(delta, whole=False)
        measured = self._measured([self.job.choices[delta.index]]) if delta.finish else {}
        traced = {} if trace is None else {"trace": trace}
        return self._head(chunk=True) | {"choices": [choice], **measured, **traced}

    def begin(self) -> bytes:
        """What a stream starts with."""
        return b""

    def end(self) -> bytes:
        usage = _event(self._head(chunk=True) | {"choices": [], "usage": self.usage()}) if self.with_usage else b""
        return usage + DONE

    def failed(self, error: ApiError) -> bytes:
        return _event(error.body()) + DONE

    def event(self, delta: Delta) -> bytes:
        """A chunk as an event. Most differ in text and ids only, and are written without building the objects."""
        index, request = delta.index, self.job.request
        trace = self._traces[index].lines(delta) if self._traces else None
        special = request.params.logprobs is not None or request.tools is not None
        if special or index not in self.offsets or delta.finish is not None or trace is not None:
            return _event(self.chunk(delta, trace))
        if index not in self._templates:
            self._templates[index] = self._template(index)
        before, between, after = self._templates[index]
        event = before + json.dumps(delta.text).encode() + between
        return event + b"[%b]" % ",".join(map(str, delta.tokens)).encode() + after if self.with_ids else event

    def _template(self, index: int) -> tuple[bytes, bytes, bytes]:
        """What is before, between and after the text and the ids of a chunk in the middle of a stream."""
        slots: list[Any] = ["\0ids"]
        before, _, after = _event(self.chunk(Delta(index, "\0text", slots, [], None, [], []))).partition(
            _json("\0text")
        )
        between, _, after = after.partition(_json(slots))
        return before, between, after

    def _head(self, chunk: bool) -> Json:
        kind = "chat.completion.chunk" if chunk and self.kind == "chat.completion" else self.kind
        fingerprint = (
            f"outrider-{self.engine.facts.dtype}"  # a seed's text is the same among servers with this fingerprint
        )
        head = {"id": self.job.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": fingerprint, "seed": self.job.choices[0].seed}

    def _choice(self, delta: Delta, whole: bool) -> Json:
        """One of `choices`."""
        index, finish, first = delta.index, delta.finish, delta.index not in self.offsets
        content: Json = {"text": delta.text}
        if self.kind == "chat.completion":
            message, finish = self._message(delta, whole)
            role = {"role": "assistant"} if first else {}
            content = {"message" if whole else "delta": role | message}
        choice = {"index": index, **content, "logprobs": self._logprobs(index, delta.logprobs)}
        choice["finish_reason"] = finish
        if self.with_ids:
            prompt = {"prompt_token_ids": self.job.choices[index].prompt} if first else {}
            choice |= {"token_ids": delta.tokens} | prompt
        return choice

    def _message(self, delta: Delta, whole: bool) -> tuple[Json, str | None]:
        """A chat's message, or what is new in it, and its finish_reason."""
        extra: Json = {"refusal": None} if whole else {}
        if self.job.request.tools is None:
            return {"content": delta.text} | extra, delta.finish
        reader = self._readers.setdefault(delta.index, CallReader(self.job.request.tools.form))
        part = reader.push(delta.text)
        content = part.content + (reader.finish().content if delta.finish else "")
        calls = {"tool_calls": [_call(each, whole) for each in part.calls]} if part.calls else {}
        called = reader.count and not reader.unfinished  # a stop string may cut a call off
        finish = "tool_calls" if delta.finish == "stop" and called else delta.finish
        return {"content": content or (None if calls else "")} | extra | calls, finish

    def usage(self) -> Json:
        prompts = self.job.choices[:: self.job.request.params.n]  # a prompt counts once, whatever its n
        prompt = sum(len(choice.prompt) for choice in prompts)
        generated = sum(len(choice.tokens) for choice in self.job.choices)
        usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
        stats = [choice.stats for choice in self.job.choices]
        predicted = {
            "accepted_prediction_tokens": sum(each.accepted_prediction_tokens for each in stats),
            "rejected_prediction_tokens": sum(each.rejected_prediction_tokens for each in stats),
        }
        cached = {"cached_tokens": sum(choice.stats.reused for choice in prompts)}
        return usage | {"prompt_tokens_details": cached, "completion_tokens_details": predicted}

    def _logprobs(self, index: int, entries: list[TokenLogprob]) -> Json | None:
        start = self.offsets.setdefault(index, 0)
        if self.job.request.params.logprobs is None:
            return None
        if self.kind == "chat.completion":
            top = ([self._token(*pair) for pair in entry.top] for entry in entries)
            tokens = (self._token(entry.token, entry.logprob) for entry in entries)
            content = [token | {"top_logprobs": best} for token, best in zip(tokens, top, strict=True)]
            return {"content": content, "refusal": None}
        piece = self.engine.tokenizer.id_to_piece
        pieces = [piece(entry.token) for entry in entries]
        *offsets, self.offsets[index] = accumulate(map(len, pieces), initial=start)
        return {
            "tokens": pieces,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [{piece(token): _finite(value) for token, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _token(self, token: int, value: float) -> Json:
        tokenizer = self.engine.tokenizer
        piece, data = tokenizer.id_to_piece(token), list(tokenizer.id_to_bytes(token))
        return {"token": piece, "logprob": _finite(value), "bytes": data}

    def _measured(self, choices: list[Choice]) -> Json:
        return measured(self.engine.facts, self.job.request, choices)


def measured(facts: Facts, request: ParsedRequest, choices: list[Choice]) -> Json:
    """What a whole answer, and the last chunk of a streamed one, say of their speed."""
    return {"metrics": {"speculative_decoding": _speculation(facts, request, choices)}, "timings": _timings(choices)}


def _call(part: CallPart, whole: bool) -> Json:
    """One of `tool_calls`, or what is new in it."""
    named = {"id": part.id, "type": "function"} if part.id else {}
    function = ({"name": part.name} if part.id else {}) | {"arguments": part.arguments}
    return ({} if whole else {"index": part.index}) | named | {"function": function}


def _finite(value: float) -> float:
    return max(value, MIN_LOGPROB)


def _speculation(facts: Facts, request: ParsedRequest, choices: list[Choice]) -> Json:
    """vLLM's names; enabled, drafter, reason, alpha, target_passes and drafter_failures are our own."""
    stats = [choice.stats for choice in choices]
    drafts, drafted = sum(s.drafts for s in stats), sum(s.drafted for s in stats)
    accepted, reached = sum(s.accepted for s in stats), sum(s.reached for s in stats)
    deepest = max((len(s.accepted_at) for s in stats), default=0)
    depths = [sum(s.accepted_at[d] for s in stats if d < len(s.accepted_at)) for d in range(deepest)]
    at_least = [drafts, *depths, 0]  # steps that accepted at least 0, 1, 2, … drafted tokens
    return {
        "enabled": not request.plain_reason,
        "drafter": request.drafter_name(facts),
        "reason": request.plain_reason or stats[0].why,
        "num_spec_tokens": facts.k if isinstance(facts.k, int) else request.max_draft_tokens,
        "num_spec_steps": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / drafts if drafts else None,
        "acceptance_histogram": [at_least[i] - at_least[i + 1] for i in range(deepest + 1)],
        "alpha": accepted / reached if reached else None,
        "target_passes": sum(s.passes for s in stats),
        "drafter_failures": sum(s.failures for s in stats),
    }


def _timings(choices: list[Choice]) -> Json:
    """llama.cpp's names. Over several choices: from the first start to the last end."""
    started, first = min(c.started for c in choices), min(c.first for c in choices)
    generated = sum(len(c.tokens) for c in choices)
    prefilled = sum(len(c.prompt) - c.stats.reused for c in choices)
    prompt, predicted = max(first - started, 0.0), max(max(c.latest for c in choices) - first, 0.0)
    return {
        "queue_ms": round(1e3 * (started - choices[0].job.arrived), 3),
        "prompt_n": prefilled,
        "prompt_ms": round(1e3 * prompt, 3),
        "prompt_per_second": round(prefilled / prompt, 3) if prompt else None,
        "predicted_n": generated,
        "predicted_ms": round(1e3 * predicted, 3),
        "predicted_per_second": round((generated - 1) / predicted, 3) if predicted else None,
        "draft_n": sum(c.stats.drafted for c in choices),
        "draft_n_accepted": sum(c.stats.accepted for c in choices),
    }


async def accepted(job: Job, worker: Worker, deadline: float) -> None:
    """Return when the engine has accepted a job, or raise its refusal. At the deadline its reader raises."""
    try:
        await asyncio.wait({job.accepted}, timeout=max(deadline - time.monotonic(), 0.0))
        if job.accepted.done():
            job.accepted.result()
    except BaseException:
        worker.cancel(job)
        raise


async def next_delta(job: Job, deadline: float) -> Delta | None:
    """What is new in one of a job's choices; None after KEEPALIVE seconds without news."""
    event = await job.events.get(min(KEEPALIVE, deadline - time.monotonic()))
    if isinstance(event, ApiError):
        raise event
    if event is None and time.monotonic() >= deadline:
        message = f"The answer took longer than its limit of {deadline - job.arrived:g} s."
        raise ApiError(408, message, "deadline_exceeded", "timeout")
    return event


async def collect(job: Job, worker: Worker, deadline: float) -> list[Delta]:
    """The choices of a job that does not stream, in order: each has one delta, its whole text."""
    deltas: list[Delta] = []
    try:
        while len(deltas) < len(job.choices):
            deltas += [delta] if (delta := await next_delta(job, deadline)) else []
    finally:
        worker.cancel(job)
    return sorted(deltas, key=lambda delta: delta.index)


async def unless_disconnected(request: Request, work: Any) -> Any:
    """The work's result. If the client disconnects first the work is cancelled and the result is None."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class StreamBuilder(Protocol):
    """Turns what is new in a job into events."""

    job: Job

    def begin(self) -> bytes: ...

    def event(self, delta: Delta) -> bytes: ...

    def end(self) -> bytes: ...

    def failed(self, error: ApiError) -> bytes: ...


class EventStream(StreamingResponse):
    """One or more events per step, and those of the end."""

    media_type = "text/event-stream"

    def __init__(self, builder: StreamBuilder, worker: Worker, deadline: float) -> None:
        self.builder, self.worker, self.deadline = builder, worker, deadline
        super().__init__(self._events(), headers={"cache-control": "no-store", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:  # an unfinished generator is closed only when it is collected: too late for the slots
            self.worker.cancel(self.builder.job)

    async def _events(self) -> AsyncIterator[bytes]:
        builder, left = self.builder, len(self.builder.job.choices)
        if begin := builder.begin():
            yield begin
        try:
            while left:
                delta = await next_delta(builder.job, self.deadline)
                if delta is None:
                    yield b": waiting\n\n"
                    continue
                left -= delta.finish is not None
                yield builder.event(delta)
        except ApiError as error:
            yield builder.failed(error)
            return
        yield builder.end()


def _event(data: Json) -> bytes:
    return b"data: " + _json(data) + b"\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
