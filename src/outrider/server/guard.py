"""The outermost ASGI layer: API keys, host names, body limits, request ids, the access log.

Keys are compared in constant time and bodies are counted as they arrive. Any exception inside becomes an OpenAI error;
no traceback is sent.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from dataclasses import dataclass, field
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, internal_error
from .pages import is_page
from .settings import Settings
from .telemetry import Metrics

log = logging.getLogger("outrider.server")
PROBES = ("/health", "/ready")  # need no key


@dataclass
class Exchange:
    """One HTTP request and its response."""

    scope: Scope
    receive: Receive
    send: Send
    id: str = field(default_factory=lambda: uuid4().hex)
    client: str = ""  # the key's index, or the address
    status: int = 0  # 0 until the response has started
    arrived: float = field(default_factory=time.monotonic)

    async def reply(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
        await self.send(message)

    async def fail(self, error: ApiError) -> None:
        if not self.status:  # otherwise the response has started and its status cannot change
            await error.response()(self.scope, self.receive, self.reply)

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.scope["headers"] if key == name), b"")


class Guard:
    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self._keys = [key.encode() for key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # websockets are not served
        exchange = Exchange(scope, receive, send)
        try:
            self._authorize(exchange)
            scope.setdefault("state", {}).update(id=exchange.id, client=exchange.client)
            await self.app(scope, self._limited(exchange), exchange.reply)
        except ApiError as error:
            await exchange.fail(error)
        except Exception:
            log.exception("request_failed", extra={"fields": {"id": exchange.id}})
            await exchange.fail(internal_error())
        finally:
            self._log(exchange)

    def _authorize(self, exchange: Exchange) -> None:
        host = exchange.header(b"host").decode("latin-1").rsplit(":", 1)[0].strip("[]") or "localhost"
        if self.settings.hosts and host not in self.settings.hosts:
            raise ApiError(403, "Without an API key this server accepts only a loopback Host header.", "wrong_host")
        address = exchange.scope.get("client")
        exchange.client = address[0] if address else ""
        preflight = exchange.scope["method"] == "OPTIONS" and self.settings.origins
        path = exchange.scope["path"]
        if not self._keys or path in PROBES or is_page(path) or preflight:
            return
        scheme, _, token = exchange.header(b"authorization").partition(b" ")
        token = token.strip() if scheme.lower() == b"bearer" else b""
        matches = [hmac.compare_digest(token, key) for key in self._keys]  # all of them: the time tells nothing
        if not any(matches):
            raise ApiError(401, "The API key is missing or wrong; send 'Authorization: Bearer KEY'.", "invalid_api_key")
        exchange.client = f"key-{matches.index(True)}"

    def _limited(self, exchange: Exchange) -> Receive:
        """`receive` that raises for a body that is too large or too slow."""
        limits, announced = self.settings.limits, exchange.header(b"content-length")
        too_large = ApiError(413, f"The body is larger than the limit of {limits.body_bytes} bytes.", "too_large")
        if announced.isdigit() and int(announced[:20]) > limits.body_bytes:
            raise too_large
        size, complete = 0, False

        async def limited() -> Message:
            nonlocal size, complete
            if complete:
                return await exchange.receive()  # only a disconnect can follow
            left = exchange.arrived + limits.body_seconds - time.monotonic()
            try:
                message = await asyncio.wait_for(exchange.receive(), max(left, 0.1))
            except TimeoutError:
                raise ApiError(408, "The request's body did not arrive in time.", "slow_body") from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > limits.body_bytes:
                raise too_large
            return message

        return limited

    def _log(self, exchange: Exchange) -> None:
        path = exchange.scope["path"]
        if exchange.status >= 400:
            self.metrics.count_error(exchange.status)
        fields = {"id": exchange.id, "client": exchange.client, "method": exchange.scope["method"], "path": path[:128]}
        fields |= {"status": exchange.status, "seconds": round(time.monotonic() - exchange.arrived, 4)}
        quiet = path in (*PROBES, "/metrics") or is_page(path)
        log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"fields": fields})
