"""HTTP errors in OpenAI's form: message, type, param, code. They never carry a traceback, a path or a user's text."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from starlette.responses import JSONResponse

from .messages import INTERNAL

_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


class ApiError(HTTPException):  # FastAPI passes its own exception class through wherever it is raised
    """`retry_after` is in seconds; 0: no such header."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None, retry_after: int = 0
    ) -> None:
        headers = {"retry-after": str(retry_after)} if retry_after else {}
        super().__init__(status, message, headers | ({"www-authenticate": "Bearer"} if status == 401 else {}))
        self.status, self.message, self.code, self.param = status, message, code, param

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, code, param)


def internal_error() -> ApiError:
    return ApiError(*INTERNAL)


def shutting_down() -> ApiError:
    return ApiError(503, "The server is shutting down; try again later.", "shutting_down", retry_after=5)
