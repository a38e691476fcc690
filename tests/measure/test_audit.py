"""`outrider verify --server`: an exact server passes, a lossy one is found out, and nobody is praised for nothing."""

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
from outrider.measure.audit import ITSELF, SECOND, SWITCH, Answer, Plan, compare, probed, run
from outrider.measure.client import Server

from support import tiny
from support.serving import listening

Say = Callable[[dict[str, Any]], tuple[int, list[dict[str, Any]]]]
PROMPTS = ["the quick brown fox", "def add(a, b):", "one two three one two three one two"]


def chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}], **more}


def plainly(body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """A server that always says the same and ignores what it does not know."""
    said = f"An answer to {body['messages'][0]['content']}."
    return 200, [chunk(said), chunk("", "stop"), {"choices": [], "usage": {"completion_tokens": 5}}]


def lossy(body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Drafts are believed a little too often: one prompt's answer differs, and another ends early."""
    status, chunks = plainly(body)
    prompt = body["messages"][0]["content"]
    if "fox" in prompt:
        chunks[0] = chunk("An answer to the quick brown dog.")
    if "def" in prompt:
        chunks[0] = chunk("An answer to")
    return status, chunks


@contextmanager
def pretending(say: Say, name: str = "fake") -> Iterator[str]:
    """A server of this behaviour on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": name}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, chunks = say(body)
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
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    llm = LLM(tiny.save(tmp_path_factory.mktemp("tiny")), drafter="suffix", dtype="float32", k=4)
    with listening(llm) as (url, _):
        yield url


def audited(url: str, plain: str | None = None, **more: Any) -> Any:
    there, other = Server(url), None if plain is None else Server(plain)
    return run(there, other, probed(there, other, None), Plan(PROMPTS, max_tokens=16, **more))


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["verify", "--limit", "3", "--max-tokens", "8", "--server", *words])


def test_our_own_server_is_exact_and_has_a_switch(ours: str) -> None:
    found = audited(ours, temperatures=(0.0, 0.8), concurrency=3)
    assert found.reference == SWITCH
    assert (found.compared, found.divergences, found.failures) == (6, [], [])
    assert found.compared_tokens > 30
    assert found.drafted > 0
    done = command(ours, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["proves_losslessness"]
    assert report["compared"] == 6  # three prompts, greedy and at 0.8


@pytest.fixture
def asked(tmp_path: Path) -> str:
    """The prompts as a file."""
    lines = [json.dumps({"question_id": i, "category": "x", "turns": [text]}) for i, text in enumerate(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "prompts.jsonl")


def test_a_lossy_server_is_found_out(asked: str) -> None:
    with pretending(lossy) as fast, pretending(plainly, "other") as slow:
        found = audited(fast, slow)
        assert found.reference == SECOND
        assert found.compared == 3
        first, second = found.divergences
        assert (first.prompt, first.position, first.unit) == (0, len("An answer to the quick brown "), "character")
        assert (first.plain, first.speculative) == ("fox.", "dog.")
        assert first.before.endswith("quick brown ")
        assert second.prompt == 1
        assert second.speculative == "(ends: stop)"
        done = command(fast, "--plain-server", slow, "--json", "--prompts", asked)
        assert done.exit_code == 1
        assert [d["position"] for d in json.loads(done.stdout)["divergences"]] == [first.position, second.position]


def test_words_for_people(asked: str) -> None:
    with pretending(lossy) as fast, pretending(plainly) as slow:
        done = command(fast, "--plain-server", slow, "--prompts", asked)
        assert done.exit_code == 1
        assert "2 divergences" in done.output
        assert "'dog.'" in done.output
        done = command(fast, "--plain-server", slow)
        assert done.exit_code == 0, done.output  # none of the bundled three speaks of foxes
        assert "0 divergences" in done.output
        assert slow in done.output


def test_a_server_without_a_switch_is_not_praised() -> None:
    """It ignores our fields, so both answers were speculative: that proves nothing, and the exit code says so."""
    with pretending(plainly) as url:
        found = audited(url)
        assert found.reference == ITSELF
        assert not found.proves
        assert found.divergences == []
        done = command(url)
        assert done.exit_code == 3
        assert "--plain-server" in done.output


def test_a_server_that_does_not_repeat_itself() -> None:
    count = iter(range(1000))

    def moody(body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        return 200, [chunk(f"number {next(count)}", "stop")]

    with pretending(moody) as url:
        found = audited(url)
        assert len(found.divergences) == 3
        assert command(url).exit_code == 1


def test_refusals_and_failures_are_told() -> None:
    """One that refuses unknown fields is asked without them; one that fails is no success."""
    seen: list[dict[str, Any]] = []

    def strict(body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
        seen.append(body)
        if "return_token_ids" in body or "speculation" in body:
            return 400, [{"error": {"message": "unknown field"}}]
        if "def" in body["messages"][0]["content"]:
            return 500, [{"error": {"message": "out of memory"}}]
        return plainly(body)

    with pretending(strict) as url:
        found = audited(url)
        assert found.compared == 2
        assert "500" in found.failures[0]
        assert "prompt 2" in found.failures[0]
        assert all("return_token_ids" not in body for body in seen[2:])
        done = command("http://127.0.0.1:9")
        assert done.exit_code == 1
        assert "No server answers" in done.output


def test_ids_are_compared_where_both_sides_tell_them() -> None:
    def answer(text: str, ids: tuple[int, ...] | None, finish: str = "stop") -> Answer:
        return Answer(text, finish, 2, ids=ids)

    assert compare(0, 0.0, answer("ab", (1, 2)), answer("ab", (1, 2))) is None
    parted = compare(0, 0.0, answer("ab", (1, 2)), answer("ab", (3,)))  # the same text, spelt otherwise
    assert parted is not None
    assert (parted.unit, parted.position) == ("token", 0)
    assert compare(0, 0.0, answer("ab", (1, 2)), answer("ab", None)) is None
    cut = compare(0, 0.0, answer("ab", None), answer("ab", None, "length"))
    assert cut is not None
    assert cut.speculative == "(ends: length)"


def test_drafts_are_counted_by_either_name() -> None:
    from outrider.measure.audit import ask

    told = {"metrics": {"speculative_decoding": {"num_draft_tokens": 7, "num_accepted_draft_tokens": 3}}}
    with pretending(lambda body: (200, [chunk("x", "stop"), {"choices": [], **told}])) as url:
        answer = ask(Server(url), {"messages": []})
        assert (answer.drafted, answer.accepted) == (7, 3)
