"""--learn, --learn-from, --learn-to and `outrider drafter`: weights are kept, reused, frozen and deleted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.drafters._learning import store

from support import tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    return tiny.save(tmp_path / "tiny", context=4096)


def command(*arguments: object, stdin: str | None = None) -> Any:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, [str(a) for a in arguments], input=stdin)


def generate(folder: Path, *arguments: object) -> dict[str, Any]:
    done = command("generate", "-m", folder, "--dtype", "float32", "--k", 3, "-n", 200, "--json", "one two", *arguments)
    assert done.exit_code == 0, done.stderr
    out: dict[str, Any] = json.loads(done.stdout)
    return out


EAGERLY = ("-s", "learn_share=1000", "-s", "learn_every=1", "-s", "ignore_eos=true")


def test_learn_keeps_weights_and_continues_from_them(folder: Path, tmp_path: Path) -> None:
    plain = generate(folder, "--drafter", "off", "-s", "ignore_eos=true")
    first = generate(folder, "--learn", *EAGERLY)
    second = generate(folder, "--learn", *EAGERLY)
    assert plain["token_ids"] == first["token_ids"] == second["token_ids"]
    assert first["drafter"] == "online"
    assert first["learning"]["updates"] > 0
    assert second["alpha"] > first["alpha"]
    shown = json.loads(command("drafter", "show", "-m", folder, "--json").stdout)
    assert shown["model"] == "tiny"
    assert shown["learning"]["updates"] > 0
    (listed,) = json.loads(command("drafter", "list", "--json").stdout)["learnt"]
    assert (listed["model"], listed["kinds"]) == ("tiny", [])
    unknown = command("drafter", "forget", "-m", folder, "--kind", "law")
    assert unknown.exit_code == 1
    assert "Nothing has been learnt of the kind 'law'" in unknown.stderr
    assert command("drafter", "save", tmp_path / "saved", "-m", folder).exit_code == 0
    frozen = generate(folder, "--no-learn", "--learn-from", tmp_path / "saved", "-s", "ignore_eos=true")
    assert (frozen["token_ids"], frozen["learning"]["state"]) == (plain["token_ids"], "off")
    assert frozen["alpha"] > first["alpha"]
    assert "tiny" in command("drafter", "show", tmp_path / "saved").stdout
    assert command("drafter", "forget", "-m", folder).exit_code == 0
    forgotten = command("drafter", "show", "-m", folder)
    assert (forgotten.exit_code, forgotten.stdout) == (0, "")
    assert "Nothing has been learnt for this model yet" in forgotten.stderr
    assert "nothing to delete" in command("drafter", "forget", "-m", folder, "--kind", "law").stderr


def test_learn_to_and_a_request_that_opts_out(folder: Path, tmp_path: Path) -> None:
    out = generate(folder, "--learn-to", tmp_path / "learnt", *EAGERLY, "-s", "learn=false")
    assert out["learning"]["records"] == 0
    assert store.facts_of(tmp_path / "learnt")["learning"]["records"] == 0
    done = command("chat", "-m", folder, "--dtype", "float32", "-n", 8, "--learn", stdin="one\n\n")
    assert done.exit_code == 0
    assert "learning on" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--learn", "--drafter", "ngram"), "cannot learn"),
        (("--no-learn", "--learn-to", "x"), "contradict"),
        (("--learn-from", "nowhere"), "holds no learnt weights"),
    ],
)
def test_contradictions_are_sentences(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = command("generate", "-m", folder, "one", *arguments)
    assert done.exit_code == 1
    assert message in done.stderr
