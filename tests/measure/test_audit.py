"""`outrider verify --server`: an exact server passes, a lossy one fails, one without a reference proves nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli.app import app
from outrider.measure.audit import REQUEST_SWITCH, SAME_SERVER, SECOND_SERVER, AuditPlan, compare, probe, request, run
from outrider.measure.client import Response, Server

from support import tiny
from support.serving import listening

Chunks = tuple[int, list[dict[str, Any]]]  # HTTP status and the chunks of a response
PROMPTS = ["the quick brown fox", "def add(a, b):", "one two three one two three one two"]


def chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}], **more}


def repeatable(body: dict[str, Any]) -> Chunks:
    """A server that repeats itself and ignores unknown fields."""
    text = f"An answer to {body['messages'][0]['content']}."
    return 200, [chunk(text), chunk("", "stop"), {"choices": [], "usage": {"completion_tokens": 5}}]


def lossy(body: dict[str, Any]) -> Chunks:
    """Accepts wrong drafts: one prompt's response differs, and another ends early."""
    status, chunks = repeatable(body)
    prompt = body["messages"][0]["content"]
    if "fox" in prompt:
        chunks[0] = chunk("An answer to the quick brown dog.")
    if "def" in prompt:
        chunks[0] = chunk("An answer to")
    return status, chunks


@contextmanager
def fake_server(respond: Callable[[dict[str, Any]], Chunks], name: str = "fake") -> Iterator[str]:
    """The address of a server with this behaviour, on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": name}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, chunks = respond(body)
            if status != 200:
                self._send(status, json.dumps(chunks[0]).encode())
                return
            lines = [*(json.dumps(each) for each in chunks), "[DONE]"]
            self._send(200, "".join(f"data: {line}\n\n" for line in lines).encode())

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def outrider_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    llm = LLM(tiny.save(tmp_path_factory.mktemp("tiny")), drafter="suffix", dtype="float32", k=4)
    with listening(llm) as (url, _):
        yield url


def audited(url: str, plain_url: str | None = None, **more: Any) -> Any:
    server, plain = Server(url), None if plain_url is None else Server(plain_url)
    return run(server, plain, probe(server, plain, None), AuditPlan(PROMPTS, max_tokens=16, **more))


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["verify", "--limit", "3", "--max-tokens", "8", "--server", *arguments])


def test_outriders_server_is_exact_and_has_a_switch(outrider_server: str) -> None:
    found = audited(outrider_server, temperatures=(0.0, 0.8), concurrency=3)
    assert found.reference == REQUEST_SWITCH
    assert (found.compared, found.divergences, found.failures) == (6, [], [])
    assert found.compared_tokens > 30
    assert found.drafted > 0
    done = command(outrider_server, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["proves_losslessness"]
    assert report["compared"] == 6  # three prompts, greedy and at 0.8


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    lines = [json.dumps({"question_id": i, "category": "x", "turns": [text]}) for i, text in enumerate(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "prompts.jsonl")


def test_a_lossy_server_fails(prompts_file: str) -> None:
    with fake_server(lossy) as fast, fake_server(repeatable, "other") as slow:
        found = audited(fast, slow)
        assert found.reference == SECOND_SERVER
        assert found.compared == 3
        first, second = found.divergences
        assert (first.prompt, first.position, first.unit) == (0, len("An answer to the quick brown "), "character")
        assert (first.plain, first.speculative) == ("fox.", "dog.")
        assert first.before.endswith("quick brown ")
        assert second.prompt == 1
        assert second.speculative == "(ends: stop)"
        done = command(fast, "--plain-server", slow, "--json", "--prompts", prompts_file)
        assert done.exit_code == 1
        assert [d["position"] for d in json.loads(done.stdout)["divergences"]] == [first.position, second.position]


def test_the_printed_report(prompts_file: str) -> None:
    with fake_server(lossy) as fast, fake_server(repeatable) as slow:
        done = command(fast, "--plain-server", slow, "--prompts", prompts_file)
        assert done.exit_code == 1
        assert "2 divergences" in done.output
        assert "'dog.'" in done.output
        done = command(fast, "--plain-server", slow)
        assert done.exit_code == 0, done.output  # none of the first three bundled prompts has a fox
        assert "0 divergences" in done.output
        assert slow in done.output


def test_a_server_without_a_switch_proves_nothing() -> None:
    """It ignores our fields, so both responses were speculative: exit code 3."""
    with fake_server(repeatable) as url:
        found = audited(url)
        assert found.reference == SAME_SERVER
        assert not found.proves
        assert found.divergences == []
        done = command(url)
        assert done.exit_code == 3
        assert "--plain-server" in done.output


def test_a_server_that_does_not_repeat_itself() -> None:
    count = iter(range(1000))

    def random(body: dict[str, Any]) -> Chunks:
        return 200, [chunk(f"number {next(count)}", "stop")]

    with fake_server(random) as url:
        found = audited(url)
        assert len(found.divergences) == 3
        assert command(url).exit_code == 1


def test_refusals_and_failures_are_reported() -> None:
    """A server that refuses unknown fields gets requests without them; a failed request is a failure of the audit."""
    seen: list[dict[str, Any]] = []

    def strict(body: dict[str, Any]) -> Chunks:
        seen.append(body)
        if "return_token_ids" in body or "speculation" in body:
            return 400, [{"error": {"message": "unknown field"}}]
        if "def" in body["messages"][0]["content"]:
            return 500, [{"error": {"message": "out of memory"}}]
        return repeatable(body)

    with fake_server(strict) as url:
        found = audited(url)
        assert found.compared == 2
        assert "500" in found.failures[0]
        assert "prompt 2" in found.failures[0]
        assert all("return_token_ids" not in body for body in seen[2:])
        done = command("http://127.0.0.1:9")
        assert done.exit_code == 1
        assert "No server answers" in done.output


def test_ids_are_compared_where_both_sides_return_them() -> None:
    def response(text: str, ids: list[int], finish: str = "stop") -> Response:
        return Response(text, finish, 2, ids=ids)

    assert compare(0, 0.0, response("ab", [1, 2]), response("ab", [1, 2])) is None
    divergence = compare(0, 0.0, response("ab", [1, 2]), response("ab", [3]))  # the same text from other tokens
    assert divergence is not None
    assert (divergence.unit, divergence.position) == ("token", 0)
    assert compare(0, 0.0, response("ab", [1, 2]), response("ab", [])) is None
    cut = compare(0, 0.0, response("ab", []), response("ab", [], "length"))
    assert cut is not None
    assert cut.speculative == "(ends: length)"


def test_drafts_are_counted_by_either_name() -> None:
    counts = {"metrics": {"speculative_decoding": {"num_draft_tokens": 7, "num_accepted_draft_tokens": 3}}}
    with fake_server(lambda body: (200, [chunk("x", "stop"), {"choices": [], **counts}])) as url:
        response = request(Server(url), {"messages": []})
        assert (response.drafted, response.accepted) == (7, 3)
