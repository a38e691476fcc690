"""Ray's own schemas on the file that `outrider deploy ray` writes (`make test-ray`)."""

from __future__ import annotations

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
