"""The commands that make the page: `outrider explain` and `outrider trace html`. They load no model and no torch."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ..errors import OutriderError
from ..models.paths import cache_folder
from .app import Debug, _sentences, app, errors, trace_app

TraceFile = Annotated[Path, typer.Argument(help="A JSONL file that `generate --trace` wrote.")]


@trace_app.command("html")
def trace_html(
    file: TraceFile,
    out: Annotated[Path | None, typer.Option(help="Where to; default: beside the trace, with .html.")] = None,
    debug: Debug = False,
) -> None:
    """Write a recorded run as one self-contained page: ribbon, tree, race, dials. It needs no server and no network."""
    with _sentences(debug):
        place = out or file.with_suffix(".html")
        _write(place, _page(file))
        errors.print(f"Wrote {place}; open it in any browser.", soft_wrap=True, highlight=False)


@app.command()
def explain(
    file: Annotated[Path | None, typer.Argument(help="A trace of your own; default: the bundled real run.")] = None,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open a browser, or only say where it is.")] = True,
    debug: Debug = False,
) -> None:
    """See speculative decoding at work: six stations over a real run, in the browser. No model is needed."""
    with _sentences(debug):
        place = cache_folder() / "pages" / (f"{file.stem}.html" if file else "explain.html")
        _write(place, _page(file))
        typer.echo(str(place))
        if browser and not webbrowser.open(place.resolve().as_uri()):
            errors.print("No browser could be opened here: open that file in one.", soft_wrap=True)


def _page(file: Path | None) -> str:
    from ..web import page, read_lines

    return page() if file is None else page(read_lines(file), title=file.name)


def _write(place: Path, text: str) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"The page cannot be written to {place}: {error}.") from error
