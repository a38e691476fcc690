"""`outrider drafter list | show | save | forget`: what drafters learnt while serving; `encode`: fewer bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from ..models.paths import cache_folder
from .common import model_name, note, print_json
from .options import Device, Json, Model


def drafter_list(as_json: Json = False) -> None:
    """Print for which models weights are kept, and which kinds of text have some of their own."""
    from ..drafters._learning import store

    kept = [(path.parent, store.facts_of(path.parent)) for path in sorted((cache_folder() / "learnt").glob("*/*.json"))]
    rows = [
        {"model": facts.get("model", "unknown"), "kinds": [kind for kind in facts.get("kinds", []) if kind]}
        | {"updates": facts.get("learning", {}).get("updates", 0), "folder": str(folder)}
        for folder, facts in kept
    ]
    if as_json:
        print_json({"learnt": rows})
        return
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(row["model"], f"{row['updates']} updates", ", ".join(row["kinds"]), row["folder"])
    Console().print(table)
    if not rows:
        note("Nothing is kept: `outrider generate --learn` lets a drafter learn.")


def drafter_show(
    folder: Annotated[Path | None, Argument(help="A folder that --learn-to wrote. Default: the one kept.")] = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Print what a drafter learnt from how much text, and whether its acceptance has dropped since."""
    from ..drafters import _drift as drift
    from ..drafters._learning import store

    path = folder or store.kept_folder(model_name(model), {})
    if folder is None and not (path / store.FACTS).exists():
        note("Nothing has been learnt for this model yet: `outrider generate --learn` lets a drafter learn.")
        return
    facts = store.facts_of(path)
    name = facts.get("model", "")
    monitor = drift.Monitor(name) if name else drift.Monitor()
    if as_json:
        print_json(facts | {"folder": str(path), "drift": monitor.as_json()})
        return
    console = Console()
    learning: dict[str, Any] = facts.get("learning", {})
    table = Table.grid(padding=(0, 2))
    table.add_row("folder", str(path))
    table.add_row("model", str(facts.get("model", "unknown")))
    table.add_row("drafter", f"{learning.get('drafter', '?')}, {learning.get('vocabulary', '?')} tokens in vocabulary")
    table.add_row("learnt from", f"{learning.get('records', 0)} verified tokens, {learning.get('updates', 0)} updates")
    table.add_row("recent acceptance", f"{learning.get('accepted', 0.0):.0%}")
    if "phrases" in learning:
        used = f"{learning['phrases_accepted']} of {learning['phrases_proposed']} proposed tokens accepted"
        table.add_row("phrases", f"{learning['phrases']} contexts, {used}")
    for kind, own in learning.get("kinds", {}).items():
        facts_of_kind = [f"{own['records']} tokens", f"{own['adopted']} weights adopted"]
        facts_of_kind += [f"{own['phrases']} contexts"] if "phrases" in own else []
        table.add_row(f"kind {kind or '(none named)'}", ", ".join(facts_of_kind))
    console.print(table)
    for sentence in monitor.sentences():
        console.print(f"[yellow]{sentence}[/yellow]")


def drafter_encode(
    folder: Annotated[Path, Argument(help="The folder of a trained head or early exit.")],
    out: Annotated[Path, Option(help="The folder to write.")],
    store: Annotated[str, Option(help="Write weights in q8_0, q4_1, q4_0 or q4_k; or bfloat16, float32.")] = "q4_0",
    answers: Annotated[
        Path | None, Option(help="Its training's answers. Default: FOLDER/training/answers.jsonl.")
    ] = None,
    model: Model = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write a trained head in fewer bits, and its acceptance before and after on the card."""
    from ..train.encoding import EncodingOptions, encode_folder

    file = answers or folder / "training" / "answers.jsonl"
    facts = encode_folder(EncodingOptions(folder, out, store, file, model, device or "auto"))
    if as_json:
        print_json(facts)
        return
    before, after = (facts[when]["all"]["tau"] for when in ("before", "after"))
    note(f"Written to {out}: {facts['bytes'] / 1e6:.1f} MB; τ {before:.3f} before, {after:.3f} in {store}.")


def drafter_save(folder: Annotated[Path, Argument(help="The folder to write.")], model: Model = None) -> None:
    """Copy the kept weights of a model's drafter to a folder, for --learn-from here or on another machine."""
    from ..drafters._learning import store

    store.copy(store.kept_folder(model_name(model), {}), folder)
    note(f"Saved to {folder}; `outrider generate --learn-from {folder} …` uses it.")


def drafter_forget(
    model: Model = None,
    kind: Annotated[str | None, Option(help="Delete only what was learnt of this kind of text.")] = None,
    everything: Annotated[bool, Option("--all", help="Delete all weights and records of acceptance.")] = False,
) -> None:
    """Delete the kept weights of a model's drafter."""
    from ..drafters._learning import store

    kept = store.kept_folder(model_name(model), {})
    folders = [cache_folder() / "learnt", cache_folder() / "drift"] if everything else [kept]
    found = [folder for folder in folders if folder.exists()]
    if found and kind is not None and not everything:
        store.forget_kind(kept, kind)
    else:
        for folder in found:
            shutil.rmtree(folder)
    note("Deleted." if found else "There was nothing to delete.")
