"""What Outrider adds to vLLM's HTTP server: `prediction`, and GET /v1/outrider/doctor.

An endpoint plug-in. A request's `prediction` is tokenised by the server's own /tokenize, handed to the workers under
the name of its prompt, and left out of the request; vLLM never sees it. It lies behind vLLM's authentication. A
prediction that cannot be used changes nothing: the answer says so in the header `x-outrider-prediction`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from .doctor import Counts, report
from .rows import key_of

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]
PATHS = ("/v1/chat/completions", "/v1/completions")
LONGEST = 1 << 22  # bytes of a body that is looked into; longer ones pass as they are
RENDERED = (
    "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "model",
    "continue_final_message", "add_special_tokens",
)  # fmt: skip  # what decides a chat's prompt


class OutriderRoutes:
    """vLLM's `EndpointPlugin`."""

    name = "outrider"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.add_middleware(Predictions)

        @app.get("/v1/outrider/doctor")
        async def doctor(request: Request) -> JSONResponse:
            """What speculation does here: figures and findings."""
            return JSONResponse(report(_counts(), **request.app.state.outrider))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        from importlib.metadata import version

        from .launch import distribution

        config = engine_client.vllm_config.speculative_config
        method = "none" if config is None else str(config.method)
        if method == "custom_class":
            method = str(config.model)
        k = 0 if config is None else int(config.num_speculative_tokens)
        state.outrider = {"method": method, "k": k, "version": version(distribution() or "vllm")}
        state.outrider_predicts = method.startswith("outrider.")
        state.outrider_engine = engine_client


def _counts() -> Counts:
    """Read from the registry that /metrics shows; engines are added up."""
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    samples: dict[tuple[str, str], float] = {}
    for family in get_prometheus_registry().collect():
        if not family.name.startswith("outrider:"):
            continue
        for sample in family.samples:
            key = (sample.name, sample.labels.get("position", ""))
            samples[key] = samples.get(key, 0.0) + sample.value
    return Counts.read(samples)


class Predictions:
    """ASGI middleware: takes `prediction` out of requests and passes it on."""

    def __init__(self, app: Asgi) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("method") != "POST" or scope["path"] not in PATHS:
            await self.app(scope, receive, send)
            return
        body = await _body(receive)
        asked = _object(body)
        prediction = text_of(asked.pop("prediction", None))
        if prediction is None:
            await self.app(scope, _given(body, receive), send)
            return
        trouble = await self._pass_on(scope, asked, prediction)
        body = json.dumps(asked).encode()
        headers = [(n, v) for n, v in scope["headers"] if n != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        words = trouble or "used"
        await self.app({**scope, "headers": headers}, _given(body, receive), _saying(words, send))

    async def _pass_on(self, scope: Message, asked: dict[str, Any], text: str) -> str:
        """Why it cannot be used; empty where it is."""
        state = scope["app"].state
        if not getattr(state, "outrider_predicts", False):
            return "not available with this drafter"
        if (asked.get("n") or 1) != 1 or isinstance(asked.get("prompt"), list):
            return "not available for several answers"
        if "messages" in asked:
            prompt = await self._ids(scope, {name: asked[name] for name in RENDERED if name in asked})
        else:
            prompt = await self._ids(scope, {"prompt": asked.get("prompt", "")})
        tokens = await self._ids(scope, {"prompt": text, "add_special_tokens": False})
        if not prompt or not tokens:
            return "not understood"
        heard = await state.outrider_engine.collective_rpc("outrider_expect", args=(key_of(prompt), tokens))
        return "" if any(heard) else "not available with this drafter"

    async def _ids(self, scope: Message, wish: dict[str, Any]) -> list[int]:
        """What the server's own /tokenize makes of it; empty where it refuses."""
        body, said = json.dumps(wish).encode(), bytearray()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        inner = {**scope, "path": "/tokenize", "raw_path": b"/tokenize", "headers": headers, "query_string": b""}

        async def hear(message: Message) -> None:
            said.extend(message.get("body", b"") if message["type"] == "http.response.body" else b"")

        await self.app(inner, _given(body, _never), hear)
        tokens = _object(bytes(said)).get("tokens")
        return list(tokens) if isinstance(tokens, list) else []


def text_of(prediction: Any) -> str | None:
    """OpenAI's {"type": "content", "content": text or parts}; None for anything else."""
    content = prediction.get("content") if isinstance(prediction, dict) else None
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str)) or None
    return content or None if isinstance(content, str) else None


async def _body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break  # the client has gone
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body) if len(body) <= LONGEST else None
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


async def _never() -> Message:
    """A client that stays."""
    await asyncio.Event().wait()
    raise AssertionError


def _given(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever else comes from the client (its going away)."""
    parts = [body]

    async def given() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return given


def _saying(words: str, send: Send) -> Send:
    async def saying(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"x-outrider-prediction", words.encode())]}
        await send(message)

    return saying
