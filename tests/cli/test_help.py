"""The help of every command and option: present, in sentences, and without Python types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from outrider.cli.app import app

RAW = re.compile(r"<[a-z]|list\[|tuple\[|\bRANGE\b|\bINTEGER\b|\bFLOAT\b|\bBOOLEAN\b|\bNone\b")


def walk(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, *path, name)


COMMANDS = dict(walk(get_command(app)))


def test_every_command_is_registered() -> None:
    single = {"demo", "generate", "chat", "verify", "serve", "doctor", "cost", "tune", "train", "invent", "export"}
    single |= {"explain", "fetch", "models"}
    groups = {
        "bench serve",
        "trace show",
        "trace html",
        "drafter list",
        "drafter show",
        "drafter save",
        "drafter forget",
        "drafter encode",
        "deploy ray",
    }
    groups |= {"cache list", "cache clear"}
    assert {" ".join(path) for path in COMMANDS} == single | groups | {name.split()[0] for name in groups} | {""}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_commands_and_options_have_help_without_python_types(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    assert command.help
    assert command.help.rstrip().endswith(".")
    for param in command.params:
        name = f"{' '.join(path)} {param.name}"
        assert param.help, name
        assert param.help[-1] in ".)", name
        assert param.metavar or getattr(param, "is_flag", False), name
        assert not RAW.search(f"{param.metavar or ''} {param.help}"), name
    done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, [*path, "--help"])
    assert done.exit_code == 0
    assert not RAW.search(done.stdout), done.stdout


def test_train_shows_ten_options_and_the_rest_on_request() -> None:
    def options(flag: str) -> set[str]:
        shown = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["train", flag]).stdout
        return set(re.findall(r"^[^\w-]*(--[\w-]+)", shown, re.MULTILINE)) - {
            "--help",
            "--help-all",
            "--no-color",
            "--debug",
        }

    few, every = options("--help"), options("--help-all")
    assert len(few) == 10
    assert few < every
    assert {"--model", "--train-tokens", "--draft-vocab", "--json"} <= every


def test_the_same_option_has_the_same_name_everywhere() -> None:
    for path, command in COMMANDS.items():
        names = {option for param in command.params for option in param.opts}
        assert not names & {"--target", "--tokens"}, path
        assert ("--max-tokens" in names) or ("max_tokens" not in {param.name for param in command.params}), path


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout.split()[0]) == (0, "outrider")
    shown = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["--help"]).stdout
    assert re.search(r"--version +Print the version and exit\.", shown)
