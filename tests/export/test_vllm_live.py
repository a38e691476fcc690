"""vLLM itself, started by `outrider serve --engine vllm` with SmolLM2 and each kind of drafter (`make test-vllm`).

Minutes on two cores: each server starts once, and everything is tested on it. Not part of `make test`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import drafters

pytestmark = pytest.mark.vllm

openai = pytest.importorskip("openai")
if not os.environ.get("OUTRIDER_TEST_VLLM"):
    pytest.skip("set by `make test-vllm`, which has vLLM installed", allow_module_level=True)

CODE = "def area(width, height): if width < 0 or height < 0: raise ValueError('negative'); return width * height"
MESSAGES = [{"role": "user", "content": f"Rewrite this function with type hints and keep the rest: {CODE}"}]
DRAFTERS = ("ngram", "suffix", "model", *(["head"] if "head" in drafters.names() else []))
PATIENCE = 600.0  # seconds for a start
KEY = "a-key-for-tests"
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


def folder_of(kind: str, home: Path) -> str:
    """What --drafter is given: a name, an exported head, or a draft model in the form that `outrider train` writes."""
    if kind in ("ngram", "suffix"):
        return kind
    from typer.testing import CliRunner

    from outrider.cli.app import app

    arguments = ["export", "--to", "vllm", "--out", str(home / kind), "--dtype", "float32"]
    more = ["--drafter", "head"] if kind == "head" else ["--skip-layers", "10,11"]
    if not (home / kind).exists():
        done = CliRunner().invoke(app, [*arguments, *more])
        assert done.exit_code == 0, done.output
    return str(home / kind / "drafter")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module", params=DRAFTERS)
def served(request: pytest.FixtureRequest, home: Path) -> Iterator[tuple[str, str]]:
    """A server's drafter and address."""
    kind, port = request.param, free_port()
    arguments = ["serve", "--engine", "vllm", "--drafter", folder_of(kind, home), "--k", "4", "--port", str(port)]
    arguments += ["--max-batch", "4", "--served-model-name", "smollm2", "--api-key", KEY]
    arguments += ["--engine-arg=--max-model-len=1024", "--engine-arg=--enforce-eager"]
    log = home / f"{kind}.log"
    settings = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OUTRIDER_API_KEY": KEY}
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "outrider", *arguments],
            stdout=file,
            stderr=file,
            env=settings,
            start_new_session=True,
        )
    try:
        wait(process, f"http://127.0.0.1:{port}/health", log)
        yield kind, f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(url, timeout=5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"no start within {PATIENCE:g} s:\n{log.read_text()[-4000:]}")


def read(url: str) -> str:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {KEY}"})
    return urllib.request.urlopen(request, timeout=60).read().decode()


def counters(url: str) -> dict[str, float]:
    """Our own names on vLLM's /metrics."""
    text = read(f"{url}/metrics")
    return {
        name: sum(float(v) for v in re.findall(rf"^outrider:spec_decode_{name}_total\{{.*\}} (\S+)$", text, re.M))
        for name in COUNTERS
    }


def test_the_official_package_and_our_metrics(served: tuple[str, str]) -> None:
    kind, url = served
    before = counters(url)
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=300) as client:
        assert [model.id for model in client.models.list()] == ["smollm2"]
        request: dict[str, Any] = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": 48}
        whole = client.chat.completions.create(**request)
        text = whole.choices[0].message.content
        assert "def area" in text
        chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        metrics = whole.metrics["speculative_decoding"]
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    after = counters(url)
    assert metrics["num_accepted_draft_tokens"] > 0
    assert after["num_draft_tokens"] - before["num_draft_tokens"] >= metrics["num_draft_tokens"]
    assert after["num_accepted_tokens"] > before["num_accepted_tokens"]
    print(f"\n{kind}: {metrics['num_accepted_draft_tokens']} of {metrics['num_draft_tokens']} drafted tokens accepted")


def test_the_doctor_reads_the_same_counters(served: tuple[str, str]) -> None:
    _, url = served
    found, counted = json.loads(read(f"{url}/v1/outrider/doctor")), counters(url)
    assert (found["engine"], found["k"]) == ("vllm", 4)
    assert found["accepted_tokens"] == counted["num_accepted_tokens"]
    assert found["findings"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url}/v1/outrider/doctor")


def test_predictions_are_drafted_or_refused_clearly(served: tuple[str, str]) -> None:
    kind, url = served
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=300) as client:
        fresh = [{"role": "user", "content": "Say something about the sea in winter."}]
        request: dict[str, Any] = {"model": "smollm2", "messages": fresh, "temperature": 0, "max_tokens": 24}
        plain = client.chat.completions.create(**request).choices[0].message.content
        raw = client.chat.completions.with_raw_response.create(
            **request, prediction={"type": "content", "content": plain}
        )
        header, answer = raw.headers["x-outrider-prediction"], raw.parse()
        assert answer.choices[0].message.content == plain
        metrics = answer.metrics["speculative_decoding"]
        if kind in ("ngram", "suffix"):
            assert header == "used"
            assert metrics["draft_acceptance_rate"] > 0.9
        else:
            assert header == "not available with this drafter"


def test_vllm_takes_our_tables() -> None:
    """K by batch size, by vLLM's own reader: every batch size has the K that the table says, zero included."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    from outrider.control.costs import PassCosts
    from outrider.export.engines import vllm_speculative_config
    from outrider.export.plan import ExportPlan, Measured, k_by_batch

    costs = PassCosts({(s, s * n): 1 + 0.05 * max(s * n - 16, 0) for s in (1, 4, 16, 64) for n in (1, 3, 9)})
    table = k_by_batch(Measured(0.7, costs), 8, 64)
    spec = vllm_speculative_config(ExportPlan("head", 8, k_by_batch=table), Path("drafter"))
    dense = build_dynamic_sd_schedule_lookup(spec["num_speculative_tokens_per_batch_size"], 128, 8)
    assert [dense[low] for low, _, _ in table] == [k for _, _, k in table]
    assert dense[128] == table[-1][2]
    assert len({k for _, _, k in table}) > 2
