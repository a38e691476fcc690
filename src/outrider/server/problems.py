"""Everything that can go wrong for a client, in OpenAI's form: one sentence, a type, a parameter, a code.

A problem is said to the client as it is, so it never carries a traceback, a path or anybody's text.
"""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


class Problem(HTTPException):  # the framework lets its own kind through, wherever it is raised
    """Answered with `status` and `body()`. `retry_after` is in seconds, where trying again makes sense."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        headers = {"retry-after": str(retry_after)} if retry_after else {}
        super().__init__(status, message, headers | ({"www-authenticate": "Bearer"} if status == 401 else {}))
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def kind(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refused(message: str, param: str | None = None, code: str | None = None) -> Problem:
    """The request asks for something that cannot be: 400."""
    return Problem(400, message, code, param)


def broken() -> Problem:
    """A bug of ours or a fault of the machine; the log knows more than the client is told."""
    return Problem(500, "The server failed while answering; its log says why. Please try again.", "internal_error")


def leaving() -> Problem:
    return Problem(503, "The server is shutting down; ask another one, or this one later.", "shutting_down", None, 5)
