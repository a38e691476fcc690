"""Other people's readers on what is exported: Ray's schemas (`make test-ray`), `speculators` (`make test-vllm`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("x") / "out"
    words = ["export", "--to", "vllm", "--out", str(out), "--drafter", "head", "--dtype", "float32"]
    done = CliRunner().invoke(app, words)
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
def test_the_schema_bites(tmp_path: Path) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    with pytest.raises(ValueError, match="import_path"):
        schema.ServeDeploySchema.model_validate({"applications": [{"name": "x"}]})


@pytest.mark.speculators
def test_speculators_reads_the_head(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own reader finds every weight under its own names, and nothing that it does not know."""
    speculators = pytest.importorskip("speculators")
    import torch

    from outrider.models.speculators import read_head

    monkeypatch.chdir(exported)  # the verifier is named as it lies beside the drafter
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = speculators.SpeculatorModelConfig.from_pretrained("drafter")
    ours, tensors = read_head(exported / "drafter")
    assert config.draft_vocab_size == ours.draft_vocab_size
    assert config.eagle_aux_hidden_state_layer_ids == [tap + 1 for tap in ours.taps]
    assert config.speculators_config.verifier.name_or_path == "target"
    model: Any = speculators.SpeculatorModel.from_pretrained("drafter")
    theirs = {name.replace("layers.0.", "midlayer."): value for name, value in model.state_dict().items()}
    for name, tensor in tensors.items():
        assert torch.equal(theirs[name], tensor.to(theirs[name].dtype)), name  # it reads in 16 bits
    assert json.loads((exported / "export.json").read_text())["engine"] == "vllm"
