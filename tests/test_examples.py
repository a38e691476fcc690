"""The examples, each in a process of its own against a server with the default model; with the real packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider import LLM

from support.serving import listening

EXAMPLES = Path(__file__).parents[1] / "examples"
PYTHON = os.environ.get("OUTRIDER_EXAMPLES_PYTHON", sys.executable)  # has the packages; `make test-examples` sets it
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("OUTRIDER_EXAMPLES_PYTHON" not in os.environ, reason="`make test-examples` has the packages"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[tuple[str, str]]:
    """A server's address and its model's name."""
    llm = LLM(max_batch=4)
    with listening(llm) as (address, _):
        yield f"{address}/v1", llm.name
    llm.close()


def run(name: str, url: tuple[str, str], python: str = PYTHON) -> dict[str, str]:
    """The lines that an example prints, by what they begin with."""
    environment = {"OUTRIDER_URL": url[0], "OUTRIDER_MODEL": url[1], "PATH": os.environ["PATH"]}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a server of its own for prices
    command = [python, str(EXAMPLES / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


@pytest.mark.slow
def test_tools(url: tuple[str, str]) -> None:
    said = run("tools.py", url, sys.executable)
    assert said["call"].startswith("{'year': ")
    assert said["answer"]


@pytest.mark.examples
@pytest.mark.parametrize("framework", ["langchain", "llama_index", "litellm"])
def test_a_framework_needs_nothing_but_the_url(url: tuple[str, str], framework: str) -> None:
    said = run(f"with_{framework}.py", url)
    assert {"text", "stream", "tool"} <= said.keys()
    assert all(said.values())
    values, result = said["tool"].split(" gives ")
    numbers = eval(values, {"__builtins__": {}})  # a literal of two numbers
    assert int(result) == numbers["a"] + numbers["b"]
    if framework == "langchain":
        assert said["text"] == said["stream"]
        assert said["object"].startswith("name='")


@pytest.mark.examples
def test_the_command_line_tool_llm(url: tuple[str, str], tmp_path: Path) -> None:
    """Text, and an object of a schema."""
    models = (EXAMPLES / "extra-openai-models.yaml").read_text()
    assert url[1] in models
    (tmp_path / "extra-openai-models.yaml").write_text(models.replace("http://127.0.0.1:8000/v1", url[0]))
    environment = {"LLM_USER_PATH": str(tmp_path), "PATH": os.environ["PATH"]}
    command = [str(Path(PYTHON).with_name("llm")), "-m", "outrider", "-o", "temperature", "0", "-o", "max_tokens", "24"]
    for more, begins in (([], ""), (["--schema", "name, length int"], '{"name": "')):
        done = subprocess.run(
            [*command, *more, "A river"], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.strip().startswith(begins)
        assert done.stdout.strip()
