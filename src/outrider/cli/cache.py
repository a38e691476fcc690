"""`outrider cache list | clear`: what Outrider keeps on disk. All but what was learnt or trained can be made again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from typer import Argument

from ..errors import ConfigError
from ..models.paths import cache_folder
from .common import note, print_json
from .options import Json

CONTENTS = {
    "models": "downloaded models", "int8": "weights in eight bits",
    "blocks": "GGUF files in the order of the kernels", "native": "kernels compiled for this processor",
    "profiles": "measured times of passes", "drift": "records of acceptance", "learnt": "what drafters have learnt",
    "pages": "pages of `outrider explain`", "skips": "sets of layers to skip", "vllm": "files for vLLM",
    "heads": "trained heads", "readings": "how published heads are read",
}  # fmt: skip


def cache_list(as_json: Json = False) -> None:
    """Show what is kept, where, and how large it is."""
    sizes = {folder.name: _size(folder) for folder in _folders()}
    if as_json:
        print_json({"folder": str(cache_folder()), "bytes": sizes})
        return
    note(f"{cache_folder()} (set OUTRIDER_HOME to keep it elsewhere)")
    table = Table()
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("what it is")
    for name, size in sizes.items():
        table.add_row(name, megabytes(size), CONTENTS.get(name, ""))
    table.add_row("all", megabytes(sum(sizes.values())), "", style="bold")
    Console().print(table)


def cache_clear(
    parts: Annotated[list[str] | None, Argument(help="The parts to delete. Default: all but learnt, heads.")] = None,
) -> None:
    """Delete what is kept. It is downloaded, compiled, quantised and measured again when it is needed."""
    folders = {folder.name: folder for folder in _folders()}
    for name in parts or ():
        if name not in folders:
            raise ConfigError(f"There is no part '{name}' in the cache. Choose one of: {', '.join(folders) or 'none'}.")
    chosen = parts or [name for name in folders if name not in ("learnt", "heads")]
    freed = sum(_size(folders[name]) for name in chosen)
    for name in chosen:
        shutil.rmtree(folders[name])
    note(f"Deleted {megabytes(freed)}: {', '.join(chosen)}." if chosen else "There was nothing to delete.")


def _folders() -> list[Path]:
    root = cache_folder()
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def _size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
