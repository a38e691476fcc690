"""The cache folder, for files that can be made again, and how files are written. It knows no file's content."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """$OUTRIDER_HOME, else the platform's cache folder. It need not exist yet."""
    if home := os.environ.get("OUTRIDER_HOME"):
        return Path(home).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        folder = Path(local) if local else Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        folder = Path.home() / "Library" / "Caches"
    else:
        shared = os.environ.get("XDG_CACHE_HOME")
        folder = Path(shared) if shared else Path.home() / ".cache"
    return folder / "outrider"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_atomically(path: Path, text: str) -> None:
    """Write under another name, then rename: readers see the whole file or the one before it."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def write_quietly(path: Path, text: str) -> None:
    """Write a file atomically, creating its folder; do nothing if it cannot be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
