"""The HTTP endpoints, and the service that answers a completion request."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import JSONResponse, PlainTextResponse, Response

from .errors import ApiError
from .jobs import Job
from .messages import EngineLink
from .requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestParser,
    TokenizeRequest,
)  # fmt: skip
from .responses import EventStream, ResponseBuilder, accepted, collect, unless_disconnected
from .responses_api import ItemBuilder, ResponsesRequest
from .settings import Settings
from .telemetry import Metrics
from .tracing import TraceStore
from .worker import Worker

CLIENT_CLOSED_REQUEST = 499  # for the log: the client does not read it


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """Every error has this form."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is invalid"},
    401: {"model": ErrorResponse, "description": "The API key is missing or wrong"},
    404: {"model": ErrorResponse, "description": "Not found"},
    408: {"model": ErrorResponse, "description": "The request took too long"},
    413: {"model": ErrorResponse, "description": "The body is too large"},
    429: {"model": ErrorResponse, "description": "The queue is full; Retry-After says when to try again"},
    503: {"model": ErrorResponse, "description": "Shutting down, or the engine is gone"},
    "default": {"model": ErrorResponse, "description": "Any other error"},
}


@dataclass
class Service:
    """Everything that the endpoints need."""

    engine: EngineLink
    name: str
    settings: Settings
    parser: RequestParser
    worker: Worker
    metrics: Metrics
    traces: TraceStore | None
    created: int = field(default_factory=lambda: int(time.time()))

    async def complete(self, http: Request, request: ChatRequest | CompletionRequest) -> Response:
        """Parse the request, queue it, and respond, whole or as a stream."""
        chat = isinstance(request, ChatRequest)
        kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        job, deadline = await self._submit(http, request, prefix)
        with_usage = bool(request.stream_options and request.stream_options.include_usage)
        builder = ResponseBuilder(self.engine, self.name, job, bool(request.return_token_ids), kind, with_usage)
        return await self._respond(http, builder, deadline)

    async def respond(self, http: Request, request: ResponsesRequest) -> Response:
        """As `complete`, in the form of OpenAI's Responses."""
        job, deadline = await self._submit(http, request.as_chat(), "resp")
        return await self._respond(http, ItemBuilder(self.engine, self.name, job, request), deadline)

    async def _submit(self, http: Request, request: ChatRequest | CompletionRequest, prefix: str) -> tuple[Job, float]:
        """A job that the engine has accepted, and its deadline."""
        self.worker.check_capacity(1)  # before any work is done for it
        arrived = time.monotonic()
        parsed = await asyncio.to_thread(self.parser.parse, request)  # tokenising a long prompt takes a while
        id, client, streams = f"{prefix}-{http.state.id}", http.state.client, bool(request.stream)
        job = Job(id, client, streams, parsed, self.engine.facts, self.engine.tokenizer, arrived)
        limit = self.settings.limits.seconds
        deadline = job.arrived + min(request.timeout or limit, limit)
        self.worker.submit(job)
        try:
            await accepted(job, self.worker, deadline)
        except ApiError as error:  # the engine calls any form of text a guide
            if error.param == "guide":
                error.param = "tools" if parsed.tools else "response_format" if request.response_format else None
            raise
        return job, deadline

    async def _respond(self, http: Request, builder: ResponseBuilder | ItemBuilder, deadline: float) -> Response:
        if builder.job.streams:
            return EventStream(builder, self.worker, deadline)
        deltas = await unless_disconnected(http, collect(builder.job, self.worker, deadline))
        return JSONResponse(builder.whole(deltas)) if deltas else Response(status_code=CLIENT_CLOSED_REQUEST)

    def model_card(self) -> dict[str, Any]:
        facts = self.engine.facts
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "outrider"}
        card |= {"max_model_len": facts.length, "dtype": facts.dtype, "device": facts.device}
        return card | {"drafter": facts.drafter, "k": facts.k, "rule": facts.rule}

    def drafters(self) -> dict[str, Any]:
        """The values of `speculation.drafter`, the default first, and the limits that the page needs."""
        own, named = self.engine.facts.drafter, self.engine.facts.drafters
        data = [{"id": id, "object": "drafter", "default": id == own, "about": text} for id, text in named.items()]
        limits = {"max_tokens": self.settings.limits.max_tokens, "temperature": 100}
        return {"object": "list", "data": data, "model": self.name, "k": self.engine.facts.k, "limits": limits}

    def trace_store(self) -> TraceStore:
        if self.traces is None:
            raise ApiError(404, "Nothing is recorded here; start the server with --traces FOLDER.", "traces_off")
        return self.traces


def api_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", responses=ERRORS, summary="Chat completion")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.complete(request, body)

    @router.post("/v1/completions", responses=ERRORS, summary="Text completion")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(request, body)

    @router.post("/v1/responses", responses=ERRORS, summary="Response, without state")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await service.respond(request, body)

    @router.post("/tokenize", responses=ERRORS, summary="Token ids of a text, or of messages under the template")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        ids = await asyncio.to_thread(service.parser.tokenize, body)
        return {"count": len(ids), "max_model_len": service.engine.facts.length, "tokens": ids}

    @router.post("/detokenize", responses=ERRORS, summary="The text of token ids")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        return {"prompt": await asyncio.to_thread(service.parser.detokenize, body)}

    @router.get("/v1/models", summary="The served model, as a list of one")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.model_card()]}

    @router.get("/v1/models/{name:path}", responses={404: ERRORS[404]}, summary="The served model")
    async def model(name: str) -> dict[str, Any]:
        if name != service.name:
            raise ApiError(404, f"This server has only '{service.name}'.", "model_not_found", "model")
        return service.model_card()

    @router.get("/v1/drafters", summary="The drafters that a request may name")
    async def drafters() -> dict[str, Any]:
        return service.drafters()

    _add_operations(router, service)
    return router


def _add_operations(router: APIRouter, service: Service) -> None:
    worker = service.worker

    @router.get("/health", summary="Liveness: does the engine make progress?")
    async def health() -> Response:
        return JSONResponse({"status": worker.unhealthy or "ok"}, 503 if worker.unhealthy else 200)

    @router.get("/ready", summary="Readiness: would a request be accepted?")
    async def ready() -> Response:
        reason = worker.unhealthy or ("draining" if worker.draining else "")
        return JSONResponse({"status": reason or "ok"}, 503 if reason else 200)

    @router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/traces", responses={404: ERRORS[404]}, summary="Names of recorded traces, the newest first")
    async def traces() -> dict[str, Any]:
        store = service.trace_store()
        return {"object": "list", "data": store.names(), "dropped": store.dropped, "problem": store.problem}

    @router.get("/traces/{name}", responses={404: ERRORS[404]}, summary="One recorded trace, as JSONL")
    async def trace(name: str) -> Response:
        data = await asyncio.to_thread(service.trace_store().read, name)
        if data is None:
            raise ApiError(404, "There is no such trace; older ones are deleted for newer ones.", "not_found")
        return Response(data, media_type="application/x-ndjson")
