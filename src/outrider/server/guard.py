"""The door: who may come in, how much may be carried, and what is said when something breaks inside.

It wraps the whole application. Keys are compared in constant time, bodies are counted as they arrive, and whatever is
raised inside becomes a problem in OpenAI's form: no traceback ever leaves the house.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from dataclasses import dataclass, field
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import Metrics
from .pages import is_open
from .problems import Problem, broken, refused
from .settings import Settings

log = logging.getLogger("outrider.server")
OPEN = ("/health", "/ready")  # for whoever has to know whether this server lives


@dataclass
class Visit:
    """One request on its way through."""

    scope: Scope
    send: Send
    id: str = field(default_factory=lambda: uuid4().hex)
    client: str = ""
    status: int = 0
    begun: float = field(default_factory=time.monotonic)

    async def reply(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self.id.encode())]
        await self.send(message)

    async def refuse(self, problem: Problem) -> None:
        if self.status:
            return  # it has begun: nothing more can be said
        body = json.dumps(problem.body()).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **(problem.headers or {})}
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self.reply({"type": "http.response.start", "status": problem.status, "headers": pairs})
        await self.reply({"type": "http.response.body", "body": body})

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
            return  # there is no websocket here
        visit = Visit(scope, send)
        try:
            self._admit(visit)
            scope.setdefault("state", {}).update(id=visit.id, client=visit.client)
            await self.app(scope, self._counted(visit, receive), visit.reply)
        except Problem as problem:
            await visit.refuse(problem)
        except Exception:
            log.exception("request_failed", extra={"facts": {"id": visit.id}})
            await visit.refuse(broken())
        finally:
            self._note(visit)

    def _admit(self, visit: Visit) -> None:
        host = visit.header(b"host").decode("latin-1").rsplit(":", 1)[0].strip("[]") or "localhost"
        if self.settings.hosts and host not in self.settings.hosts:
            raise Problem(403, "This server answers only to names of its own machine.", "wrong_host")
        address = visit.scope.get("client")
        visit.client = address[0] if address else ""
        preflight = visit.scope["method"] == "OPTIONS" and self.settings.origins
        path = visit.scope["path"]
        if not self._keys or path in OPEN or is_open(path) or preflight:
            return
        scheme, _, said = visit.header(b"authorization").partition(b" ")
        said = said.strip() if scheme.lower() == b"bearer" else b""
        fits = [hmac.compare_digest(said, key) for key in self._keys]  # all of them: how many fit takes the same time
        if not any(fits):
            words = "The API key is missing or wrong; send it as 'Authorization: Bearer …'."
            raise Problem(401, words, "invalid_api_key")
        visit.client = f"key-{fits.index(True)}"

    def _counted(self, visit: Visit, receive: Receive) -> Receive:
        limits, said = self.settings.limits, visit.header(b"content-length")
        if said.isdigit() and int(said[:20]) > limits.body_bytes:
            raise _too_large(limits.body_bytes)
        seen, whole = 0, False

        async def counted() -> Message:
            nonlocal seen, whole
            if whole:
                return await receive()  # what comes now is a client that hangs up
            try:
                message = await asyncio.wait_for(
                    receive(), max(visit.begun + limits.body_seconds - time.monotonic(), 0.1)
                )
            except TimeoutError:
                raise Problem(408, "The request's body did not arrive in time.", "slow_body") from None
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > limits.body_bytes:
                raise _too_large(limits.body_bytes)
            return message

        return counted

    def _note(self, visit: Visit) -> None:
        path = visit.scope["path"]
        if visit.status >= 400:
            self.metrics.refused(visit.status)
        facts = {"id": visit.id, "client": visit.client, "method": visit.scope["method"], "path": path[:128]}
        facts |= {"status": visit.status, "seconds": round(time.monotonic() - visit.begun, 4)}
        quiet = path in (*OPEN, "/metrics") or is_open(path)
        log.log(logging.DEBUG if quiet else logging.INFO, "request", extra={"facts": facts})


def _too_large(most: int) -> Problem:
    return Problem(413, f"The request's body is larger than {most} bytes, the most this server takes.", "too_large")


def unreadable(errors: list[dict[str, object]]) -> Problem:
    """What is wrong with a body, from pydantic's list: where and what, never the value itself."""
    first = errors[0] if errors else {}
    where = ".".join(str(part)[:64] for part in first.get("loc", ()) if part != "body")  # type: ignore[attr-defined]
    what = str(first.get("msg", "it cannot be read"))[:300].rstrip(".")
    if first.get("type") in ("json_invalid", "model_attributes_type"):
        return refused("The body is not a JSON object; send one with content-type application/json.", None, "not_json")
    code = "unknown_parameter" if first.get("type") == "extra_forbidden" else "invalid_value"
    return refused(f"{where or 'The body'}: {what}.", where or None, code)
