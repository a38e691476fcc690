"""An endpoint plug-in for vLLM's HTTP server: the field `prediction`, and GET /v1/outrider/doctor.

A `prediction` is tokenised by the server's own /tokenize, sent to the workers under the key of its prompt, and removed
from the request before vLLM sees it. All of it is behind vLLM's authentication. A prediction that cannot be used
changes nothing; the response header `x-outrider-prediction` states the reason. The doctor reads counters only.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from . import version_warning
from .worker import prompt_key

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Asgi = Callable[[Message, Receive, Send], Awaitable[None]]
PATHS = ("/v1/chat/completions", "/v1/completions")
MOST_BYTES = 1 << 22  # of a request body that is parsed; longer ones pass unchanged
CHAT_FIELDS = (
    "messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt", "model",
    "continue_final_message", "add_special_tokens",
)  # fmt: skip  # that determine the prompt of a chat
_FEWEST_DRAFTS = 50  # below which nothing is concluded
_RARELY = 0.1  # share of drafts; a position that fewer reach costs rows and gains little


class OutriderRoutes:
    """vLLM's `EndpointPlugin`."""

    name = "outrider"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        app.add_middleware(Predictions)

        @app.get("/v1/outrider/doctor")
        async def doctor(request: Request) -> JSONResponse:
            """Figures and findings about speculation on this server."""
            from vllm.v1.metrics.prometheus import get_prometheus_registry

            samples = [sample for family in get_prometheus_registry().collect() for sample in family.samples]
            return JSONResponse(report(DraftCounts.read(samples), **request.app.state.outrider))

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


class Predictions:
    """ASGI middleware: takes `prediction` out of requests and passes it to the workers."""

    def __init__(self, app: Asgi) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("method") != "POST" or scope["path"] not in PATHS:
            await self.app(scope, receive, send)
            return
        body = await _read_body(receive)
        request = _json_object(body)
        prediction = prediction_text(request.pop("prediction", None))
        if prediction is None:
            await self.app(scope, _replay(body, receive), send)
            return
        reason = await self._pass_on(scope, request, prediction)
        body = json.dumps(request).encode()
        headers = [(n, v) for n, v in scope["headers"] if n != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self.app({**scope, "headers": headers}, _replay(body, receive), _with_header(reason or "used", send))

    async def _pass_on(self, scope: Message, request: dict[str, Any], text: str) -> str:
        """Why the prediction cannot be used; empty where it is."""
        state = scope["app"].state
        if not getattr(state, "outrider_predicts", False):
            return "not available with this drafter"
        if (request.get("n") or 1) != 1 or isinstance(request.get("prompt"), list):
            return "not available for several answers"
        if "messages" in request:
            prompt = await self._tokenize(scope, {name: request[name] for name in CHAT_FIELDS if name in request})
        else:
            prompt = await self._tokenize(scope, {"prompt": request.get("prompt", "")})
        tokens = await self._tokenize(scope, {"prompt": text, "add_special_tokens": False})
        if not prompt or not tokens:
            return "not understood"
        engine = state.outrider_engine
        taken = await engine.collective_rpc("outrider_add_prediction", args=(prompt_key(prompt), tokens))
        return "" if any(taken) else "not available with this drafter"

    async def _tokenize(self, scope: Message, request: dict[str, Any]) -> list[int]:
        """Token ids by the server's own /tokenize; empty where it refuses."""
        body, response = json.dumps(request).encode(), bytearray()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        inner = {**scope, "path": "/tokenize", "raw_path": b"/tokenize", "headers": headers, "query_string": b""}

        async def collect(message: Message) -> None:
            response.extend(message.get("body", b"") if message["type"] == "http.response.body" else b"")

        await self.app(inner, _replay(body, _never), collect)
        tokens = _json_object(bytes(response)).get("tokens")
        return list(tokens) if isinstance(tokens, list) else []


def prediction_text(prediction: Any) -> str | None:
    """OpenAI's {"type": "content", "content": text or parts}; None for anything else."""
    content = prediction.get("content") if isinstance(prediction, dict) else None
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str)) or None
    return content or None if isinstance(content, str) else None


async def _read_body(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break  # the client has disconnected
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body) if len(body) <= MOST_BYTES else None
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


async def _never() -> Message:
    """The `receive` of a client that stays connected."""
    await asyncio.Event().wait()
    raise AssertionError


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever else the client sends (a disconnect)."""
    parts = [body]

    async def replay() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return replay


def _with_header(text: str, send: Send) -> Send:
    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"x-outrider-prediction", text.encode())]}
        await send(message)

    return send_with_header


# ------------------------------------------------------------ doctor


class DraftCounts(NamedTuple):
    """Counters since the server started, summed over engines."""

    drafts: float = 0.0
    draft_tokens: float = 0.0
    accepted: float = 0.0
    accepted_at: tuple[float, ...] = ()

    @staticmethod
    def read(samples: Iterable[Any]) -> DraftCounts:
        """From the samples of a Prometheus registry."""
        sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        for sample in samples:
            if sample.name.startswith("outrider:spec_decode_num_"):
                name = sample.name.removeprefix("outrider:spec_decode_num_").removesuffix("_total")
                sums[name, sample.labels.get("position", "")] += sample.value
        positions = sorted(int(position) for name, position in sums if name == "accepted_tokens_per_pos" and position)
        drafts, tokens, accepted = (sums[name, ""] for name in ("drafts", "draft_tokens", "accepted_tokens"))
        return DraftCounts(drafts, tokens, accepted, tuple(sums["accepted_tokens_per_pos", str(p)] for p in positions))


def report(counts: DraftCounts, method: str, k: int, version: str) -> dict[str, Any]:
    """Figures, and findings in sentences."""
    figures: dict[str, Any] = {"engine": "vllm", "version": version, "method": method, "k": k}
    figures |= {"drafts": counts.drafts, "draft_tokens": counts.draft_tokens, "accepted_tokens": counts.accepted}
    if counts.drafts and counts.draft_tokens:
        figures["acceptance_rate"] = round(counts.accepted / counts.draft_tokens, 4)
        figures["mean_acceptance_length"] = round(1 + counts.accepted / counts.drafts, 4)
        figures["reached_by_position"] = [round(c / counts.drafts, 4) for c in counts.accepted_at]
    return figures | {"findings": findings(counts, method, k, version)}


def findings(counts: DraftCounts, method: str, k: int, version: str) -> list[str]:
    sentences = [warning] if (warning := version_warning(version)) else []
    if method == "none":
        return [*sentences, "No drafter is configured: every token costs a pass."]
    if counts.drafts < _FEWEST_DRAFTS:
        return [*sentences, f"Only {counts.drafts:.0f} drafts so far: look again after more requests."]
    useful = sum(c / counts.drafts >= _RARELY for c in counts.accepted_at)
    if useful < len(counts.accepted_at):
        sentences.append(
            f"Fewer than one draft in ten gets beyond {useful} tokens, but {k} are drafted: "
            + (f"try --k {useful}." if useful else "another drafter, or none, would be faster.")
        )
    elif counts.accepted_at and counts.accepted_at[-1] / counts.drafts > 0.6:
        sentences.append(f"Most drafts are accepted to their end: try a larger --k than {k}.")
    return sentences or [
        "Nothing looks wrong. `outrider bench serve` on servers with and without drafts shows whether it pays."
    ]
