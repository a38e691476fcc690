"""What is kept on disk: shown with its size, deleted by part, never what was learnt unless it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.models.stages import listening, stage


def run(*arguments: str, home: Path) -> tuple[int, str]:
    done = CliRunner(env={"OUTRIDER_HOME": str(home), "COLUMNS": "120"}).invoke(app, ["cache", *arguments])
    return done.exit_code, done.output


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name, size in {"models": 3_000_000, "int8": 500_000, "learnt": 7}.items():
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "file").write_bytes(b"x" * size)
    return tmp_path


def test_it_is_listed_with_its_sizes(home: Path) -> None:
    code, shown = run("list", home=home)
    assert code == 0
    for text in (str(home), "downloaded models", "3.0 MB", "0.5 MB", "3.5 MB"):
        assert text in shown
    listed = json.loads(run("list", "--json", home=home)[1])
    assert listed == {"folder": str(home), "bytes": {"int8": 500_000, "learnt": 7, "models": 3_000_000}}


def test_parts_are_deleted_and_what_was_learnt_only_by_name(home: Path) -> None:
    assert run("clear", "int8", home=home) == (0, "Deleted 0.5 MB: int8.\n")
    code, sentence = run("clear", "int8", home=home)
    assert code == 1
    assert "There is no part 'int8' in the cache. Choose one of: learnt, models." in sentence
    assert run("clear", home=home) == (0, "Deleted 3.0 MB: models.\n")
    assert (home / "learnt" / "sub" / "file").exists()
    assert run("clear", home=home)[1] == "There was nothing to delete.\n"
    assert run("clear", "learnt", home=home)[0] == 0
    assert run("list", home=home / "nothing")[0] == 0


def test_stages_tell_only_who_listens() -> None:
    told: list[tuple[str, float]] = []
    with listening(lambda name, share: told.append((name, share))), stage("Quantising") as done:
        done(0.5)
    with stage("Unheard"):
        pass
    assert told == [("Quantising", 0.0), ("Quantising", 0.5), ("Quantising", 1.0)]
