"""The page's static files, read from the package once at start.

A request's path is looked up among the names found then; it never becomes a path of the file system. The content
security policy lets the page run only these files and contact only this server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from ..web import files, index
from .errors import ApiError

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # revalidate: a newer Outrider has newer files
}
ROOT = "/web/"
DOCS = "/docs"
INDEX = "index.html"


@dataclass(frozen=True)
class File:
    body: bytes
    type: str
    etag: str

    @staticmethod
    def of(body: bytes, suffix: str) -> File:
        return File(body, TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')

    def response(self, if_none_match: str) -> Response:
        headers = HEADERS | {"etag": self.etag}
        if self.etag in if_none_match.replace(",", " ").replace("W/", " ").split():
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.type, headers=headers)


def is_page(path: str) -> bool:
    """Whether a path belongs to the page, which needs no key. What the page requests from the API does."""
    return path in ("/", DOCS) or path.startswith(ROOT)


def read_files(folder: Path, front: str, keyed: bool) -> dict[str, File]:
    """Every file of a known type by its name below the folder; `keyed` tells the front page that a key is needed."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.suffix in TYPES}
    front = front.replace("<title>", '<meta name="outrider-key" content="1">\n<title>', 1) if keyed else front
    found = {name: File.of(path.read_bytes(), path.suffix) for name, path in paths.items()}
    return found | {INDEX: File.of(front.encode(), ".html")}


def pages(keyed: bool, reference: Callable[[], str]) -> APIRouter:
    """The page, and the reference of the API, which is made when it is first read."""
    router, served = APIRouter(), read_files(files(), index(live=True), keyed)

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def front() -> Response:
        return RedirectResponse(ROOT, headers=HEADERS)  # the page's links are relative to it

    @router.api_route(ROOT + "{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        name = name or INDEX
        if name not in served:
            raise ApiError(404, "The page has no such file.", "not_found")
        return served[name].response(request.headers.get("if-none-match", ""))

    @router.api_route(DOCS, methods=["GET", "HEAD"], include_in_schema=False)
    async def docs(request: Request) -> Response:
        if DOCS not in served:
            served[DOCS] = File.of(reference().encode(), ".html")
        return served[DOCS].response(request.headers.get("if-none-match", ""))

    return router
