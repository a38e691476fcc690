"""The commands about what a drafter has learnt: `outrider drafter show | save | forget`.

They register themselves with the command line when this is imported, and look at folders only; no model is loaded.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..models.paths import cache_folder
from .app import Debug, Json, Model, _sentences, app
from .learning import name_of

drafter_app = typer.Typer(help="What drafters have learnt while serving: look at it, save it, forget it.")
app.add_typer(drafter_app, name="drafter", no_args_is_help=True)

Where = Annotated[Path | None, typer.Argument(help="A folder that --learn-to wrote; default: what is kept.")]


@drafter_app.command("show")
def show(folder: Where = None, model: Model = None, as_json: Json = False, debug: Debug = False) -> None:
    """What was learnt from how much text, and whether a drafter has gone stale."""
    with _sentences(debug):
        from ..control import drift
        from ..drafters.online import store  # torch comes with them

        place = folder or store.kept_folder(name_of(model), {})
        facts = store.facts_of(place)
        name = facts.get("model", "")
        watches = drift.Monitor(name) if name else drift.Monitor()
        if as_json:
            typer.echo(json.dumps(facts | {"folder": str(place), "drift": watches.as_json()}))
            return
        console = Console()
        console.print(_table(place, facts))
        for sentence in watches.sentences():
            console.print(f"[yellow]{sentence}[/yellow]")


@drafter_app.command("save")
def save(folder: Annotated[Path, typer.Argument(help="Where to.")], model: Model = None, debug: Debug = False) -> None:
    """Copy what is kept of a model's drafter to a folder, for --learn-from here or elsewhere."""
    with _sentences(debug):
        from ..drafters.online import store

        store.copy(store.kept_folder(name_of(model), {}), folder)
        Console(stderr=True).print(f"Saved to {folder}; `outrider generate --learn-from {folder} …` uses it.")


@drafter_app.command("forget")
def forget(
    model: Model = None,
    everything: Annotated[bool, typer.Option("--all", help="Of every model, and all notes on acceptance.")] = False,
    debug: Debug = False,
) -> None:
    """Delete what is kept."""
    with _sentences(debug):
        from ..drafters.online import store

        places = [cache_folder() / "learnt", cache_folder() / "drift"] if everything else []
        places = places or [store.kept_folder(name_of(model), {})]
        gone = [place for place in places if place.exists()]
        for place in gone:
            shutil.rmtree(place)
        Console(stderr=True).print("Forgotten." if gone else "Nothing was kept.")


def _table(place: Path, facts: dict[str, Any]) -> Table:
    learning: dict[str, Any] = facts.get("learning", {})
    table = Table.grid(padding=(0, 2))
    table.add_row("folder", str(place))
    table.add_row("model", str(facts.get("model", "unknown")))
    table.add_row("drafts with", f"a {learning.get('drafter', '?')}, {learning.get('vocabulary', '?')} words")
    table.add_row("learnt from", f"{learning.get('records', 0)} verified tokens, {learning.get('updates', 0)} updates")
    table.add_row("accepted lately", f"{learning.get('accepted', 0.0):.0%}")
    return table
