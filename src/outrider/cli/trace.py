"""`outrider trace show`, `outrider trace html` and `outrider explain`: recorded runs. No model is loaded."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from ..errors import OutriderError
from ..models.paths import cache_folder
from .common import note, write_page

TraceFile = Annotated[Path, Argument(help="A JSONL file that `generate --trace` wrote.")]


def trace_show(
    file: TraceFile, limit: Annotated[int | None, Option(min=1, help="Print only the first N steps.")] = None
) -> None:
    """Print a recorded run step by step: accepted, rejected and unreached drafts, and the target's own tokens."""
    from ..engine.trace import read
    from . import show

    try:
        show.trace(Console(), read(file), limit)
    except (KeyError, TypeError, ValueError) as error:
        raise OutriderError(f"{file} is damaged: a line is not as Outrider writes it ({error}).") from error


def trace_html(
    file: TraceFile,
    out: Annotated[Path | None, Option(help="The file to write. Default: beside the trace, as .html.")] = None,
) -> None:
    """Write a recorded run as one self-contained HTML page that needs no server and no network."""
    path = out or file.with_suffix(".html")
    write_page(path, _page(file))
    note(f"Wrote {path}; open it in any browser.")


def explain(
    file: Annotated[Path | None, Argument(help="A trace of your own. Default: the bundled run.")] = None,
    browser: Annotated[bool, Option("--open/--no-open", help="Open a browser, or only print the path.")] = True,
) -> None:
    """Explain speculative decoding on a recorded run, in the browser. No model is needed."""
    path = cache_folder() / "pages" / (f"{file.stem}.html" if file else "explain.html")
    write_page(path, _page(file))
    typer.echo(str(path))
    if browser and not webbrowser.open(path.resolve().as_uri()):
        note("No browser could be opened here: open that file in one.")


def _page(file: Path | None) -> str:
    from ..web import page, read_lines

    return page() if file is None else page(read_lines(file), title=file.name)
