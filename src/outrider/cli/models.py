"""`outrider fetch` and `outrider models`: what can be downloaded, and what is here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from typer import Argument

from .cache import megabytes
from .common import note, print_json, progress_bar
from .options import Json

if TYPE_CHECKING:
    from ..models.library import Entry

Name = Annotated[str, Argument(metavar="NAME", help="A hub name, such as owner/name or owner/name@revision.")]


def fetch(name: Name, as_json: Json = False) -> None:
    """Download a model or a head from the hub, continue where a download ended, and compare checksums."""
    from ..models.fetch import fetch_hub
    from ..models.library import as_json as facts, describe

    with progress_bar() as progress:
        fetched = fetch_hub(name, progress)
    entry = describe(name, fetched.path)
    head = _head_of(entry)
    if as_json:
        print_json(facts(entry, head) | {"files_checked": fetched.checked, "files": fetched.files})
        return
    checked = f"{fetched.checked} of {fetched.files} files have the hub's checksums"
    note(f"{name}: {entry.about}; {megabytes(entry.bytes)} in {fetched.path}; {checked}.")
    if entry.kind == "head":
        note(f"Use it with --drafter head --set head={name}; `outrider doctor --head {name}` tells what it brings.")
    elif head is not None:
        own = "Its own layer for further tokens (mtp) drafts" if head == "mtp" else f"The head {head} belongs to it"
        note(f"{own}, and `auto` uses it.")


def models(as_json: Json = False) -> None:
    """List the models and heads on this machine, their sizes, and which head belongs to which model."""
    from ..models.library import as_json as facts, entries

    found = [(entry, _head_of(entry)) for entry in entries()]
    if as_json:
        print_json({"models": [facts(entry, head) for entry, head in found]})
        return
    if not found:
        note("There are no models here yet; `outrider demo` downloads the default one, `outrider fetch NAME` others.")
        return
    table = Table()
    for column in ("name", "size", "what it is", "head"):
        table.add_column(column, justify="right" if column == "size" else "left", overflow="fold")
    for entry, head in found:
        cells = (entry.name, megabytes(entry.bytes), entry.about, "" if head is None else Path(head).name)
        table.add_row(*cells, style="red" * (entry.kind == "unreadable"))
    Console().print(table)


def _head_of(entry: Entry) -> str | None:
    """The folder of the trained head that belongs to a model, or mtp: the model's own layer; None if there is none."""
    if entry.checkpoint is None:
        return None
    from ..export.plan import head_folder
    from ..models.mtp import stored_mtp

    folder, own = head_folder(entry.checkpoint), stored_mtp(entry.checkpoint.weights, entry.checkpoint.config)
    return str(folder) if folder is not None else "mtp" if own is not None else None
