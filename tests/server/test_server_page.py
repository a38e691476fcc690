"""The page's static files: these and no others, with a content security policy, without a key."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from outrider import LLM
from outrider.server.pages import POLICY, TYPES, File, read_files
from outrider.server.settings import Settings
from outrider.web import files

from support.serving import client, is_openai_error, listening

KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def web(llm: LLM) -> Iterator[TestClient]:
    with client(llm) as one:
        yield one


def test_the_front_page_knows_that_it_is_served(web: TestClient) -> None:
    front = web.get("/")
    assert (front.status_code, front.url.path) == (200, "/web/")
    assert front.headers["content-type"] == "text/html; charset=utf-8"
    assert '<meta name="outrider-live" content="1">' in front.text
    assert "outrider-key" not in front.text
    assert web.get("/web/index.html").text == front.text
    assert web.head("/web/").status_code == 200


def test_every_file_has_its_type_and_the_policy(web: TestClient) -> None:
    names = [path.relative_to(files()).as_posix() for path in files().rglob("*") if path.suffix in TYPES]
    assert {"app.js", "live.js", "live.css", "page.css", "trace.js"} <= set(names)
    for name in names:
        answer = web.get(f"/web/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"] == TYPES[Path(name).suffix]
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        if name != "index.html":
            assert answer.content == (files() / name).read_bytes()


def test_the_policy_lets_nothing_foreign_run() -> None:
    rules = dict(rule.strip().split(" ", 1) for rule in POLICY.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in POLICY


def test_a_file_that_has_not_changed_is_not_sent_again(web: TestClient) -> None:
    first = web.get("/web/app.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = web.get("/web/app.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert web.get("/web/app.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert File.of(b"one", ".js").etag != File.of(b"two", ".js").etag


ASTRAY = (
    "__init__.py", "nothing.js", "..", "../", "../server/app.py", "../__init__.py", "%2e%2e/server/app.py",
    "..%2fserver%2fapp.py", "vendor/../__init__.py", "vendor", "examples/", "/etc/passwd", "//etc/passwd",
    "%2fetc%2fpasswd", "..\\server\\app.py", "app.js%00", "app.js/", "APP.JS", "a" * 5000, "%ff%fe", "%252e%252e/",
    f"{files()}/__init__.py", f"{files()}/app.js",
)  # fmt: skip


def test_no_other_file_is_ever_sent(llm: LLM) -> None:
    """Over a socket: an HTTP client library would normalise these paths."""
    with listening(llm) as (address, _):
        for path in ASTRAY:
            line = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
            line.putrequest("GET", f"/web/{path}")
            line.endheaders()
            answer = line.getresponse()
            text = answer.read().decode()
            line.close()
            assert answer.status == 404, path
            assert is_openai_error(json.loads(text))
            assert "import annotations" not in text


def test_other_files_in_the_folder_are_not_served(tmp_path: Path) -> None:
    for name in ("index.html", "app.js", "secret.py", "notes.md", ".env"):
        (tmp_path / name).write_text("x")
    assert set(read_files(tmp_path, "<title>", keyed=False)) == {"index.html", "app.js"}


def test_the_page_needs_no_key_and_the_api_does(llm: LLM) -> None:
    with client(llm, Settings(keys=(KEY,))) as web:
        front = web.get("/")
        assert front.status_code == 200
        assert '<meta name="outrider-key" content="1">' in front.text
        assert KEY not in front.text
        assert web.get("/web/live.js").status_code == 200
        for path in ("/v1/drafters", "/v1/models", "/metrics", "/openapi.json", "/webx", "/web"):
            assert web.get(path).status_code == 401, path
        assert web.get("/v1/drafters", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
        foreign = web.get("/", headers={"host": "evil.example"})
        assert foreign.status_code == 200  # the API has a key; without one the host is checked:
    with client(llm) as web:
        assert web.get("/", headers={"host": "evil.example"}).status_code == 403


def test_the_page_is_no_part_of_the_api(web: TestClient) -> None:
    paths = web.get("/openapi.json").json()["paths"]
    assert "/v1/drafters" in paths
    assert not any(path == "/" or path.startswith("/web") for path in paths)
    assert web.post("/web/app.js").status_code == 405
