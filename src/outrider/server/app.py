"""Assembles the application, and runs it in a process that drains before it exits."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from .. import __version__
from ..errors import OutriderError
from ..llm import LLM
from .errors import ApiError, internal_error
from .guard import Guard
from .host import HostOptions
from .jobs import Listener
from .links import LocalEngine
from .messages import EngineLink
from .pages import pages
from .reference import reference
from .requests import ChatRequest, CompletionRequest, RequestParser
from .responses_api import ResponsesRequest
from .routes import Service, api_router
from .settings import Settings
from .telemetry import Metrics, RequestLog, spans_for
from .tracing import TraceStore
from .validation import validation_error
from .worker import Worker

Notify = Callable[[str], None]  # a sentence for the person at the terminal
GRACE = 5.0  # seconds for a connection to close after its last byte


@dataclass
class Application:
    asgi: ASGIApp
    service: Service


def host_options(settings: Settings) -> HostOptions:
    """What an engine has to know of a server's settings."""
    return HostOptions(settings.drafter_seconds, records=settings.traces is not None)


def make_app(llm: LLM | EngineLink, settings: Settings | None = None) -> Application:
    """Everything but a socket. An `LLM` runs on a thread during the application's lifespan."""
    settings = settings or Settings()
    engine: EngineLink = LocalEngine(llm, host_options(settings)) if isinstance(llm, LLM) else llm
    name = settings.name or engine.facts.name
    metrics = Metrics(name)
    traces = TraceStore(settings.traces, settings.traces_bytes, engine) if settings.traces is not None else None
    listeners: list[Listener] = [metrics, RequestLog(engine, settings.log_text), *spans_for(name)]
    listeners += [traces] if traces else []
    worker = Worker(engine, settings.limits.queue, listeners)
    metrics.attach(worker)
    service = Service(
        engine, name, settings, RequestParser(engine, name, settings.limits, settings.any_name), worker, metrics, traces
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await asyncio.to_thread(worker.stop)
        if traces is not None:
            traces.close()

    app = FastAPI(title="Outrider", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(api_router(service))
    app.include_router(pages(keyed=bool(settings.keys), reference=lambda: reference(app.openapi())))
    _add_error_handlers(app)
    if settings.origins:
        headers = ["authorization", "content-type"]
        app.add_middleware(CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=headers)
    return Application(Guard(app, settings, metrics), service)


def _add_error_handlers(app: FastAPI) -> None:
    """Send every error, the framework's own included, in OpenAI's form."""
    chat, completion, responses = ([*body.model_fields] for body in (ChatRequest, CompletionRequest, ResponsesRequest))
    fields = {"/v1/chat/completions": chat, "/v1/completions": completion, "/v1/responses": responses}

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return internal_error().response()  # Starlette raises it again, for the log

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return validation_error(error.errors(), fields.get(request.url.path, [])).response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        if isinstance(error, ApiError):
            return error.response()
        messages = {404: "There is no such endpoint.", 405: "This endpoint does not take that method."}
        return ApiError(error.status_code, messages.get(error.status_code, "The request cannot be read.")).response()


class DrainingServer(uvicorn.Server):
    """On a signal, the worker accepts no more jobs and running ones may end."""

    def __init__(self, config: uvicorn.Config, worker: Worker, seconds: float, notify: Notify) -> None:
        super().__init__(config)
        self.worker, self.seconds, self.notify = worker, seconds, notify
        self._leaving = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains, the second leaves at once, even while the first is being handled."""
        again, self._leaving = self._leaving, True
        if again:
            logging.getLogger("uvicorn.error").disabled = True  # it would log that its own task is cancelled
        elif not self.worker.idle and sig == signal.SIGINT:
            self.notify(f"Finishing what is running, for {self.seconds:g} s at most; Ctrl-C again leaves at once.")
        self.worker.drain(0.0 if again else self.seconds)
        super().handle_exit(sig, frame)


def bind(host: str, port: int) -> socket.socket:
    """The port, reserved: before a model is loaded, so that one in use costs no time."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, port))  # nobody can connect before the server listens
    except OSError as error:
        reserved.close()
        if error.errno == errno.EADDRINUSE:
            raise OutriderError(f"Port {port} is in use: choose another with --port, or 0 for any free one.") from error
        raise OutriderError(f"{host}:{port} cannot be listened on: {error.strerror or error}.") from error
    return reserved


def serve(
    application: Application, reserved: socket.socket | None = None, notify: Notify = lambda sentence: None
) -> None:
    """Listen until SIGTERM or SIGINT; then drain, and return."""
    settings = application.service.settings
    config = uvicorn.Config(
        application.asgi, host=settings.host, port=settings.port, lifespan="on",
        log_config=None, access_log=False, server_header=False,
        timeout_graceful_shutdown=int(settings.drain_seconds + GRACE),
    )  # fmt: skip
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: None)  # uvicorn raises the signal again after draining: exit code 0
    server = DrainingServer(config, application.service.worker, settings.drain_seconds, notify)
    server.run(sockets=None if reserved is None else [reserved])
