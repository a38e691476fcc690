"""The file that `outrider deploy ray` writes, by Ray's own schemas and started on this machine (`make test-ray`)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("x") / "out"
    arguments = ["export", "--to", "vllm", "--out", str(out), "--skip-layers", "10,11", "--dtype", "float32"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    return out


@pytest.mark.ray
@pytest.mark.parametrize(
    "more", [[], ["--accelerator", "L4", "--tensor-parallel", "2"], ["--cpu", "--max-length", "512"]]
)
def test_the_ray_file_passes_rays_own_schemas(exported: Path, tmp_path: Path, more: list[str]) -> None:
    yaml, schema = pytest.importorskip("yaml"), pytest.importorskip("ray.serve.schema")
    file = tmp_path / "app.yaml"
    done = CliRunner().invoke(app, ["deploy", "ray", "--out", str(file), "--export", str(exported), *more])
    assert done.exit_code == 0, done.output
    data = yaml.safe_load(file.read_text())
    (application,) = schema.ServeDeploySchema.model_validate(data).applications
    assert application.import_path == "ray.serve.llm:build_openai_app"
    from ray.serve.llm import LLMConfig

    config = LLMConfig(**application.args["llm_configs"][0])
    assert config.engine_kwargs["speculative_config"]["model"] == str(exported / "drafter")
    assert config.deployment_config["autoscaling_config"]["max_replicas"] == 4


@pytest.mark.ray
def test_the_schema_refuses_a_broken_file(tmp_path: Path) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    with pytest.raises(ValueError, match="import_path"):
        schema.ServeDeploySchema.model_validate({"applications": [{"name": "x"}]})


# What `serve run FILE` does, on a Ray of its own with two processors, and with an end.
START = """
import importlib, json, sys, urllib.request
import ray, yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

file, port, body = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
(app,) = ServeDeploySchema.model_validate(yaml.safe_load(open(file))).applications
module, _, name = app.import_path.partition(":")
build = getattr(importlib.import_module(module), name)
ray.init(num_cpus=2, include_dashboard=False)
try:
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(app.args), name=app.name, route_prefix=app.route_prefix)
    address, kind = f"http://127.0.0.1:{port}/v1/chat/completions", {"content-type": "application/json"}
    answer = json.load(urllib.request.urlopen(urllib.request.Request(address, body, kind), timeout=300))
    print("answer", json.dumps(answer))
finally:
    serve.shutdown()
    ray.shutdown()
"""


@pytest.mark.ray
def test_the_application_starts_and_answers(exported: Path, tmp_path: Path) -> None:
    """One replica of vLLM's CPU build with the exported drafter, behind Ray Serve's own front."""
    pytest.importorskip("ray.serve.llm")
    pytest.importorskip("vllm")
    file = tmp_path / "app.yaml"
    options = ["--cpu", "--max-length", "512", "--max-replicas", "1", "--engine", "enforce_eager=true"]
    arguments = [
        "deploy",
        "ray",
        "--out",
        str(file),
        "--export",
        str(exported),
        "--served-model-name",
        "smol",
        *options,
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    body = {"model": "smol", "messages": [{"role": "user", "content": "Name three rivers."}], "temperature": 0}
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # paths of sockets are short
    # Ray writes a token of its cluster into the home folder: this cluster's goes with it.
    environment = {**os.environ, "HOME": folder, "RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", START, str(file), str(port), json.dumps(body | {"max_tokens": 24})]
    try:
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    answers = [line.removeprefix("answer ") for line in run.stdout.splitlines() if line.startswith("answer ")]
    assert answers, run.stdout[-3000:] + run.stderr[-3000:]
    answer = json.loads(answers[0])
    assert answer["model"] == "smol"
    assert answer["usage"]["completion_tokens"] == 24
    assert answer["choices"][0]["message"]["content"].strip()
