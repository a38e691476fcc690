"""What the commands share: loading models and prompts, notes, progress, files, and error messages.

Standard output carries the result; progress, notes and errors go to standard error. Nothing here imports torch before
a model is loaded.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import ConfigError, OutriderError
from ..models.paths import cache_folder

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..engine.trace import Recorder
    from ..llm import LLM
    from ..models.prompts import Prompt

stderr = Console(stderr=True)


def model_name(model: str | None) -> str:
    """The name that the model has once it is loaded."""
    from ..models.checkpoint import open_checkpoint

    return open_checkpoint(model).name


def load_model(model: str | None, given: dict[str, Any], recorder: Recorder | None = None) -> LLM:
    from ..llm import LLM
    from ..models.checkpoint import open_checkpoint

    opened = open_checkpoint(None) if model is None else model  # downloads with its own progress bar
    with _shown_stages() if stderr.is_terminal else nullcontext():
        try:
            llm = LLM(opened, recorder=recorder, **given)
        except OutriderError:
            raise
        except (TypeError, ValueError) as error:  # --set accepts any value; LLM checks it
            raise ConfigError(f"A parameter has the wrong type or value: {error}.") from error
    if llm.backend:
        note(llm.backend, style="dim")
    return llm


@contextmanager
def _shown_stages() -> Iterator[None]:
    """A bar that names what is being done to load a model, and where the results are kept, if there are any."""
    from ..models.stages import listening

    stages: dict[str, Any] = {}
    with _bars() as bars:
        bars.add_task("Loading the model", total=None)

        def report(name: str, share: float) -> None:
            if name not in stages:
                stages[name] = bars.add_task(name, total=1.0)
            bars.update(stages[name], completed=share)

        with listening(report):
            yield
    if stages:
        done = ", ".join(name[0].lower() + name[1:] for name in stages)
        note(f"Done once: {done}. `outrider cache list` shows what is kept in {cache_folder()}.", style="dim")


def encode_prompt(llm: LLM, prompt: str, raw: bool = False) -> list[int]:
    """Token ids of a prompt: of a user's message where the model has a chat template, unless `raw`."""
    from ..models.tokenizer import encode_message

    if raw:
        return list(llm.tokenizer.encode_prompt(prompt))
    if llm.tokenizer.chat_template is not None and not prompt.strip():
        raise ConfigError("The prompt is empty; give at least one word.")
    return encode_message(llm.tokenizer, prompt)


def read_prompts(path: Path | None) -> list[Prompt]:
    from ..models.prompts import bundled, from_file

    return from_file(path) if path else bundled()


# ---------------------------------------------------------------- output


def note(text: str, style: str | None = None) -> None:
    """Print one line on standard error, without markup or wrapping."""
    stderr.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False))


def require_folder(path: Path | None) -> None:
    """Refuse, before minutes are spent, a file whose folder does not exist."""
    if path is not None and not path.expanduser().absolute().parent.is_dir():
        raise OutriderError(f"{path} cannot be written: its folder does not exist.")


def write_page(path: Path, text: str) -> None:
    path = path.expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"The page cannot be written to {path}: {error}.") from error


def _bars() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<36}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal)


@contextmanager
def progress_bar(log_seconds: float = 0.0) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error. Yields a function that takes a description and the share done.

    Where standard error is no terminal, a line is printed every `log_seconds`, or nothing if that is 0.
    """
    last = time.monotonic()

    def update(what: str, done: float) -> None:
        nonlocal last
        bar.update(task, description=what, completed=done)
        if log_seconds and not stderr.is_terminal and (time.monotonic() - last > log_seconds or done >= 1.0):
            last = time.monotonic()
            note(what)

    with _bars() as bar:
        task = bar.add_task("", total=1.0)
        yield update


@contextmanager
def without_colours() -> Iterator[None]:
    """As with NO_COLOR in the environment, which consoles read when they are made."""
    before, os.environ["NO_COLOR"] = os.environ.get("NO_COLOR"), "1"
    stderr.no_color = True
    try:
        yield
    finally:
        stderr.no_color = bool(before)
        os.environ.pop("NO_COLOR")
        if before is not None:
            os.environ["NO_COLOR"] = before


@contextmanager
def readable_errors(debug: bool) -> Iterator[None]:
    """Print errors that the user can repair as one sentence, and exit with code 1. `debug` lets them through."""
    try:
        yield
    except OutriderError as error:
        if debug:
            raise
        stderr.print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        stderr.print("\nInterrupted.")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # `outrider … | head`
        raise typer.Exit(0) from None
