"""The application from its parts, and a process around it that leaves in good order."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from ..llm import LLM
from .guard import Guard, unreadable
from .logs import Journal
from .metrics import Metrics
from .pages import pages
from .problems import Problem, broken
from .routes import Service, endpoints
from .settings import Settings
from .spans import spans_for
from .traces import Traces
from .worker import Watcher, Worker

GRACE = 5.0  # seconds that a connection may take to close after its last word


@dataclass
class Application:
    """`asgi` is what a server runs; the rest is for whoever started it."""

    asgi: ASGIApp
    service: Service


def make_app(llm: LLM, settings: Settings | None = None) -> Application:
    """Everything but a socket. The engine's thread lives as long as the application does."""
    settings = settings or Settings()
    name = settings.name or llm.name
    metrics = Metrics(name)
    traces = Traces(settings.traces, settings.traces_bytes, llm) if settings.traces is not None else None
    watchers: list[Watcher] = [metrics, Journal(llm, settings.log_text), *spans_for(name)]
    watchers += [traces] if traces is not None else []
    worker = Worker(llm, settings.limits.queue, watchers, settings.drafter_seconds)
    metrics.watch(worker)
    service = Service(llm, name, settings, worker, metrics, traces)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()
        if traces is not None:
            traces.close()

    app = FastAPI(title="Outrider", version=_version(), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(endpoints(service))
    app.include_router(pages(keyed=bool(settings.keys)))
    _speak_openai(app)
    if settings.origins:
        carried = ["authorization", "content-type"]
        app.add_middleware(CORSMiddleware, allow_origins=settings.origins, allow_methods=["*"], allow_headers=carried)
    return Application(Guard(app, settings, metrics), service)


def _speak_openai(app: FastAPI) -> None:
    """Whatever the framework refuses is refused in our form."""

    def said(problem: Problem) -> Response:
        return JSONResponse(problem.body(), problem.status, problem.headers)

    @app.exception_handler(Problem)
    async def known(_: Request, problem: Problem) -> Response:
        return said(problem)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> Response:
        return said(broken())  # it is raised again afterwards, for the log

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return said(unreadable(list(error.errors())))

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        words = {404: "There is no such endpoint here.", 405: "This endpoint does not take that method."}
        return said(Problem(error.status_code, words.get(error.status_code, "The request cannot be read.")))


class Leaving(uvicorn.Server):
    """A server that takes nothing on after a signal, and lets what is under way end."""

    def __init__(self, config: uvicorn.Config, leave: Callable[[], None]) -> None:
        super().__init__(config)
        self.leave = leave

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.leave()
        super().handle_exit(sig, frame)


def serve(application: Application) -> None:
    """Listen until a signal says to stop; then drain, and return."""
    settings = application.service.settings
    config = uvicorn.Config(
        application.asgi,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.drain_seconds + GRACE),
        lifespan="on",
    )
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(
            name, lambda *_: None
        )  # uvicorn raises the signal again when it has drained: that is the end, not a crash
    Leaving(config, lambda: application.service.worker.drain(settings.drain_seconds)).run()


def _version() -> str:
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "0"
