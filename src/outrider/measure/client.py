"""A small client for OpenAI-compatible servers, Outrider's or any other: standard library only.

It streams one answer at a time per call and tells when each chunk came. What an answer means is the caller's business.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..errors import OutriderError

Json = dict[str, Any]


class RemoteError(OutriderError):
    """The server said no; `status` is 0 where it said nothing at all."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Server:
    """Where one listens, and the key it wants."""

    url: str
    key: str | None = None
    timeout: float = 600.0

    def models(self) -> list[str]:
        with self._asking("GET", "/v1/models") as answer:
            data = _json(answer.read())
        return [str(model.get("id")) for model in data.get("data", ())]

    def chat(self, body: Json) -> Iterator[tuple[float, Json]]:
        """The chunks of a streamed answer, each with the time it came; leaving the loop hangs up."""
        with self._asking("POST", "/v1/chat/completions", body | {"stream": True}) as answer:
            try:
                for line in answer:
                    if not line.startswith(b"data: "):
                        continue
                    if line.strip() == b"data: [DONE]":
                        return
                    chunk = _json(line[6:])
                    if "error" in chunk:
                        raise RemoteError(f"The server broke off: {_said(chunk)}", 200)
                    yield time.perf_counter(), chunk
            except (OSError, http.client.HTTPException) as error:
                raise RemoteError(f"The server hung up in mid-answer: {error}.") from error

    @contextmanager
    def _asking(self, method: str, path: str, body: Json | None = None) -> Iterator[http.client.HTTPResponse]:
        """An answer that was a yes; it and its connection end together."""
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
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:
            connection.close()
            raise RemoteError(f"No server answers at {self.url}: {error}. Start one with `outrider serve`.") from error
        try:
            if answer.status != 200:
                raise RemoteError(f"The server says {answer.status}: {_said(_json(answer.read()))}", answer.status)
            yield answer
        finally:
            answer.close()
            connection.close()


def text_of(chunk: Json) -> str:
    """What a chunk adds to its first answer."""
    choices = chunk.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")


def _json(data: bytes) -> Json:
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {}


def _said(body: Json) -> str:
    error = body.get("error")
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or "nothing more.")
