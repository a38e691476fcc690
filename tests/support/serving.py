"""Servers for tests: in this process without a socket, or on a free port with one."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.testclient import TestClient

from outrider import LLM
from outrider.server.app import Application, make_app
from outrider.server.links import EngineProcess
from outrider.server.settings import Settings

HELLO = [{"role": "user", "content": "the quick brown fox"}]


@contextmanager
def client(llm: LLM, settings: Settings | None = None) -> Iterator[TestClient]:
    """A client without a socket. Exceptions of the application reach the test."""
    application = make_app(llm, settings or Settings())
    with TestClient(application.asgi, base_url="http://localhost") as test_client:
        test_client.service = application.service  # type: ignore[attr-defined]
        yield test_client
    llm.engine.cache.check()
    assert not llm.engine.busy
    assert not llm._rejected


@contextmanager
def listening(llm: LLM | EngineProcess, settings: Settings | None = None) -> Iterator[tuple[str, Application]]:
    """A server on a free port: its address and the application."""
    application = make_app(llm, settings or Settings())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(application.asgi, port=port, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}", application
    finally:
        server.should_exit = True
        thread.join()
    if isinstance(llm, LLM):
        llm.engine.cache.check()
        assert not llm.engine.busy


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ends with [DONE]."""
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def is_openai_error(body: dict[str, Any]) -> bool:
    error = body.get("error")
    return isinstance(error, dict) and set(error) == {"message", "type", "param", "code"} and bool(error["message"])
