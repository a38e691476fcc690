"""The plan of GPU measurements: its commands are understood; a step that ends, lasts or fails leaves what it has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import gpu
import gpu_plan
import gpu_tests

GIVEN = ["--small", "small.gguf", "--qwen", "qwen.gguf", "--prompts", "prompts.jsonl"]
SCRIPTS = {
    "ends.py": "print('words'); print('{\"figure\": 1}')",
    "lasts.py": """
import signal, sys, time
def end(*_):
    print('{"figure": 2}', flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(60)
""",
    "fails.py": "raise SystemExit('There is no GPU here.')",
}


def test_every_step_is_a_command_that_its_script_understands(tmp_path: Path) -> None:
    options = gpu_plan.arguments([*GIVEN, "--out", str(tmp_path)])
    steps = gpu_plan.steps(options)
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        assert Path(step.command[1]).is_file()
        if step.words[0] == "gpu.py":
            plans = gpu.plans(step.words[1:])
            assert all(plan.names for plan in plans)
            assert sum(plan.section_seconds for plan in plans if "timeline" not in plan.names) <= step.seconds


def test_a_step_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(gpu_plan, "HERE", tmp_path)

    def run(script: str, seconds: float) -> str:
        return gpu_plan.run(gpu_plan.Step(script, seconds, [f"{script}.py"]), tmp_path, seconds)

    assert run("ends", 20.0) == "ended"
    assert json.loads((tmp_path / "ends.json").read_text()) == {"figure": 1}
    assert run("lasts", 3.0) == "stopped"
    assert json.loads((tmp_path / "lasts.json").read_text()) == {"figure": 2}
    assert run("fails", 20.0) == "failed"
    assert "There is no GPU here." in (tmp_path / "fails.log").read_text()


TESTS = """
import os, signal, pytest
def test_right(): pass
def test_wrong(): assert 1 == 2, "one is not two"
@pytest.mark.skipif(True, reason="no")
def test_skipped(): pass
def test_cut_off(): os.kill(os.getpid(), signal.SIGTERM); signal.pause()
def test_never_run(): pass
"""


@pytest.mark.parametrize("cut_off", [False, True])
def test_failed_tests_have_names_even_if_the_run_is_cut_off(tmp_path: Path, cut_off: bool) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(TESTS if cut_off else TESTS.partition("def test_cut_off")[0])
    command = [sys.executable, gpu_tests.__file__, "--workers", "1", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert (facts["passed"], facts["failed"], facts["skipped"]) == (1, 1, 1)
    ((name, error),) = facts["failures"].items()
    assert name.endswith("test_wrong")
    assert "one is not two" in error
    assert facts["whole"] is not cut_off
    assert done.returncode == (2 if cut_off else 1)


def test_the_tests_that_use_a_gpu_are_found() -> None:
    found = {Path(name).name for name in gpu_tests.gpu_tests()}
    assert {"test_cuda.py", "test_rounds.py", "test_head_gpu.py"} <= found


def test_a_name_that_is_no_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_plan.arguments([*GIVEN, "--out", str(tmp_path), "--only", "qwen,tea"])
    assert "there is no step tea" in capsys.readouterr().err
