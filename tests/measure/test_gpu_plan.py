"""The plan of GPU measurements: its commands are understood; a step that ends, lasts or fails leaves what it has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import gpu
import gpu_plan

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


def test_a_name_that_is_no_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_plan.arguments([*GIVEN, "--out", str(tmp_path), "--only", "qwen,tea"])
    assert "there is no step tea" in capsys.readouterr().err
