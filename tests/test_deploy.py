"""The files in deploy/: what they copy, mount, start and scrape exists, and options are the server's own."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from outrider.cli.app import app

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")


def instructions(name: str) -> list[tuple[str, str]]:
    text = (DEPLOY / name).read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_does_the_readmes_commands(name: str) -> None:
    steps = instructions(name)
    readme = (ROOT / "README.md").read_text()
    assert "pip install '.[serve]'" in readme
    (install,) = [rest for word, rest in steps if word == "RUN" and "pip" in rest]
    assert "'.[serve]'" in install
    assert ("https://download.pytorch.org/whl/cpu" in install) == (name == "Dockerfile")
    assert "https://download.pytorch.org/whl/cpu" in readme
    assert ("USER", "outrider") in steps  # not root
    copied = [part for word, rest in steps if word == "COPY" for part in rest.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().split()
    for path in copied:
        assert (ROOT / path).exists()
        assert f"!{path}" in ignored
    needed = re.findall(r'"(hatch_build.py|README.md|LICENSE)"', (ROOT / "pyproject.toml").read_text())
    assert set(needed) <= set(copied)  # what the build reads


def served_options(words: list[str]) -> None:
    help_text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    assert words[0] == "serve"
    assert all(word in help_text for word in words if word.startswith("--"))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_starts_the_server(name: str) -> None:
    steps = dict(instructions(name))
    assert yaml.safe_load(steps["ENTRYPOINT"]) == ["outrider"]
    served_options(yaml.safe_load(steps["CMD"]))


def test_compose_mounts_what_exists_and_scrapes_the_server() -> None:
    compose: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), source
    assert (DEPLOY / services["outrider"]["build"]["context"] / "deploy/Dockerfile").exists()
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["outrider:8000"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{services['prometheus']['secrets'][0]}"
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    assert any(provider["options"]["path"] in volume for volume in services["grafana"]["volumes"])


def test_the_unit_is_valid(tmp_path: Path) -> None:
    text = (DEPLOY / "outrider.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    served_options(shlex.split(command)[1:])
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd-analyze")
    unit = tmp_path / "outrider.service"
    unit.write_text(text.replace("/opt/outrider/.venv/bin/outrider", "/bin/true"))
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
