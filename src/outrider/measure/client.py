"""A small client for OpenAI-compatible servers, Outrider's or any other: standard library only.

It streams one response per call and timestamps each chunk; `Response` adds the chunks up.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from ..errors import OutriderError

Json = dict[str, Any]


class RemoteError(OutriderError):
    """The server refused or broke off; `status` is the HTTP status, 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Server:
    """The address of a server, and its API key. `timeout` is in seconds."""

    url: str
    key: str | None = None
    timeout: float = 600.0

    def models(self) -> list[str]:
        with self._request("GET", "/v1/models") as response:
            data = _json(response.read())
        return [str(model.get("id")) for model in data.get("data", ())]

    def chat(self, body: Json) -> Iterator[tuple[float, Json]]:
        """The chunks of a streamed response, each with its arrival time; leaving the loop closes the connection."""
        with self._request("POST", "/v1/chat/completions", body | {"stream": True}) as response:
            try:
                for line in response:
                    if not line.startswith(b"data: "):
                        continue
                    if line.strip() == b"data: [DONE]":
                        return
                    chunk = _json(line[6:])
                    if "error" in chunk:
                        raise RemoteError(f"The server reported an error in the stream: {_message(chunk)}", 200)
                    yield time.perf_counter(), chunk
            except (OSError, http.client.HTTPException) as error:
                raise RemoteError(f"The server closed the connection in the middle of a response: {error}.") from error

    @contextmanager
    def _request(self, method: str, path: str, body: Json | None = None) -> Iterator[http.client.HTTPResponse]:
        """A response with status 200, open together with its connection."""
        parts = urlsplit(self.url if "//" in self.url else f"http://{self.url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OutriderError(f"'{self.url}' is not the address of a server; give one like http://127.0.0.1:8000.")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.timeout)
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        try:
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prefix = parts.path.rstrip("/").removesuffix("/v1")
            connection.request(method, prefix + path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            raise RemoteError(f"No server answers at {self.url}: {error}. Start one with `outrider serve`.") from error
        try:
            if response.status != 200:
                message = _message(_json(response.read()))
                raise RemoteError(f"The server answered with status {response.status}: {message}", response.status)
            yield response
        finally:
            response.close()
            connection.close()


@dataclass
class Response:
    """The chunks of one streamed response, added up."""

    text: str = ""
    finish: str = ""
    tokens: int = 0  # as the server counts them
    drafted: int = 0
    accepted: int = 0
    ids: list[int] = field(default_factory=list)  # empty where the server does not return them

    def add(self, chunk: Json) -> None:
        choice = (chunk.get("choices") or [{}])[0]
        self.text += text_of(chunk)
        self.finish = choice.get("finish_reason") or self.finish
        self.ids += choice.get("token_ids") or []
        self.tokens = (chunk.get("usage") or {}).get("completion_tokens", self.tokens)
        timings = chunk.get("timings") or {}  # llama.cpp's names
        metrics = (chunk.get("metrics") or {}).get("speculative_decoding") or {}  # vLLM's
        self.drafted += timings.get("draft_n") or metrics.get("num_draft_tokens") or 0
        self.accepted += timings.get("draft_n_accepted") or metrics.get("num_accepted_draft_tokens") or 0


def text_of(chunk: Json) -> str:
    """The text that a chunk adds to the first choice."""
    choices = chunk.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")


def _json(data: bytes) -> Json:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _message(body: Json) -> str:
    error = body.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "no reason given.")
