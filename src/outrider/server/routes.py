"""The endpoints: what each is asked and what it says, and nothing of how."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..llm import LLM
from ..types import Sequence
from .answers import Letter
from .job import Job, Mailbox
from .live import Tape
from .metrics import Metrics
from .parsed import Asked, Reading
from .problems import Problem, refused
from .protocol import ChatRequest, CompletionRequest
from .settings import Settings
from .stream import EventStream, collect, unless_gone
from .traces import Traces
from .worker import Worker

HUNG_UP = 499  # nobody reads it: the client has gone


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Error(BaseModel):
    """Every error has this form."""

    error: ErrorBody


_WORDS: dict[int | str, str] = {
    400: "The request asks for what cannot be",
    401: "The key is missing or wrong",
    404: "There is no such thing here",
    408: "It took too long",
    413: "The body is too large",
    429: "The queue is full; Retry-After says when to try again",
    503: "Shutting down",
    "default": "Any other error",
}
ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": Error, "description": w} for code, w in _WORDS.items()}


@dataclass
class Service:
    """Everything an endpoint may need."""

    llm: LLM
    name: str
    settings: Settings
    worker: Worker
    metrics: Metrics
    traces: Traces | None
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.read = Reading(self.llm, self.name, self.settings.limits)

    async def answer(self, request: Request, wish: ChatRequest | CompletionRequest) -> Response:
        """Understand, take on, and tell, at once or as it comes."""
        kind, prefix = ("chat.completion", "chatcmpl") if isinstance(wish, ChatRequest) else ("text_completion", "cmpl")
        self.worker.insist_on_room(1)  # before any work is done for it
        job = Job(f"{prefix}-{request.state.id}", request.state.client, bool(wish.stream), Mailbox())
        # Long prompts take a while to become ids; other streams should not wait for that.
        asked, seqs = await asyncio.to_thread(self._understood, wish)
        job.add(seqs)
        if asked.trace != "off":
            for each in job.answers:
                each.tape = Tape(each.seq, asked.trace)
        deadline = job.arrived + min(wish.timeout or self.settings.limits.seconds, self.settings.limits.seconds)
        self.worker.submit(job)
        letter = Letter(self.llm, self.name, job, asked, bool(wish.return_token_ids), kind)
        if wish.stream:
            with_usage = bool(wish.stream_options and wish.stream_options.include_usage)
            return EventStream(letter, self.worker, deadline, with_usage)
        told = await unless_gone(request, collect(job, self.worker, deadline))
        return Response(status_code=HUNG_UP) if told is None else JSONResponse(letter.whole(told))

    def _understood(self, wish: ChatRequest | CompletionRequest) -> tuple[Asked, list[Sequence]]:
        asked = self.read(wish)
        seqs = asked.sequences(self.llm)
        longest, most = max(seq.prompt_len for seq in seqs), self.settings.limits.prompt_tokens
        if most is not None and longest > most:
            words = f"The prompt has {longest} tokens, but this server takes at most {most}."
            raise refused(words, code="context_length_exceeded")
        return asked, seqs


def endpoints(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=ERRORS, summary="Answer a conversation")
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await service.answer(request, asked)

    @router.post("/v1/completions", responses=ERRORS, summary="Continue a text")
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await service.answer(request, asked)

    @router.get("/v1/models", summary="The one model there is")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(service)]}

    @router.get("/v1/models/{name:path}", responses={404: ERRORS[404]}, summary="What is known about it")
    async def model(name: str) -> dict[str, Any]:
        if name != service.name:
            raise Problem(404, f"This server has only '{service.name}'.", "model_not_found", "model")
        return _card(service)

    @router.get("/v1/drafters", summary="Who may draft for a request")
    async def drafters() -> dict[str, Any]:
        return _drafters(service)

    _add_watching(router, service)
    return router


def _add_watching(router: APIRouter, service: Service) -> None:
    worker = service.worker

    @router.get("/health", summary="Does the engine move?")
    async def health() -> Response:
        return JSONResponse({"status": worker.ill or "ok"}, 503 if worker.ill else 200)

    @router.get("/ready", summary="Would a request be taken on?")
    async def ready() -> Response:
        reason = worker.ill or ("draining" if worker.draining else "")
        return JSONResponse({"status": reason or "ok"}, 503 if reason else 200)

    @router.get("/metrics", summary="For Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/traces", responses={404: ERRORS[404]}, summary="Recorded answers, the newest first")
    async def traces() -> dict[str, Any]:
        kept = _traces(service)
        return {"object": "list", "data": kept.names(), "dropped": kept.dropped, "problem": kept.problem}

    @router.get("/traces/{name}", responses={404: ERRORS[404]}, summary="One of them, as JSONL")
    async def trace(name: str) -> Response:
        data = await asyncio.to_thread(_traces(service).read, name)
        if data is None:
            raise Problem(404, "There is no such trace; it may have made room for newer ones.", "not_found")
        return Response(data, media_type="application/x-ndjson")


def _traces(service: Service) -> Traces:
    if service.traces is None:
        raise Problem(404, "Nothing is recorded here; start the server with --traces FOLDER.", "traces_off")
    return service.traces


def _drafters(service: Service) -> dict[str, Any]:
    """Those that `speculation.drafter` may name, the default first, and how far a request may go."""
    own, told = service.llm.config.drafter_name, service.llm.drafters
    data = [{"id": name, "object": "drafter", "default": name == own, "about": words} for name, words in told.items()]
    limits = {"max_tokens": service.settings.limits.max_tokens, "temperature": 100}
    return {"object": "list", "data": data, "model": service.name, "k": service.llm.config.k, "limits": limits}


def _card(service: Service) -> dict[str, Any]:
    llm = service.llm
    facts = {"max_model_len": llm.engine.cache.length, "dtype": llm.dtype, "device": llm.device}
    facts |= {"drafter": llm.config.drafter_name, "k": llm.config.k, "rule": llm.config.rule}
    return {"id": service.name, "object": "model", "created": service.created, "owned_by": "outrider", **facts}
