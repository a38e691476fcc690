"""The page: its files as they lie in the package, read once, and nothing else from the disk ever after.

A request's path is looked up among the names that were found at the start; it never becomes a path of the machine. What
is sent may run nothing but these files and may ask nobody but this server, whatever text they show: the browser holds
them to it (`POLICY`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from ..web import files, index
from .problems import Problem

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
    ".jsonl": "application/x-ndjson",
    ".txt": "text/plain; charset=utf-8",
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
    "cache-control": "no-cache",  # ask whether it has changed: a newer Outrider has newer files
}
HOME = "/web/"
FRONT = "index.html"


@dataclass(frozen=True)
class File:
    body: bytes
    type: str
    tag: str

    @staticmethod
    def of(body: bytes, suffix: str) -> File:
        return File(body, TYPES[suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')

    def answer(self, known: str) -> Response:
        """The file, or that it is still the one the client has."""
        headers = HEADERS | {"etag": self.tag}
        if self.tag in known.replace(",", " ").replace("W/", " ").split():
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.type, headers=headers)


def is_open(path: str) -> bool:
    """The page itself is for everybody; what it asks for needs the key like any other request."""
    return path == "/" or path.startswith(HOME)


def read_files(folder: Path, front: str, keyed: bool) -> dict[str, File]:
    """Every file that a browser may have, by its name below the folder; the front page says if a key is wanted."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.suffix in TYPES}
    front = front.replace("<title>", '<meta name="outrider-key" content="1">\n<title>', 1) if keyed else front
    read = {name: File.of(path.read_bytes(), path.suffix) for name, path in found.items()}
    return read | {FRONT: File.of(front.encode(), ".html")}


def pages(keyed: bool) -> APIRouter:
    router, known = APIRouter(), read_files(files(), index(live=True), keyed)

    def found(name: str, request: Request) -> Response:
        if name not in known:
            raise Problem(404, "The page has no such file.", "not_found")
        return known[name].answer(request.headers.get("if-none-match", ""))

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def front() -> Response:
        return RedirectResponse(HOME, headers=HEADERS)  # where the page's files are beside it

    @router.api_route(HOME + "{name:path}", methods=["GET", "HEAD"], include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        return found(name or FRONT, request)

    return router
