"""The cache folder, for files that can be made again. It knows folders, not what is in them."""

from __future__ import annotations

import os
import sys
from pathlib import Path


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


def write_quietly(path: Path, text: str) -> None:
    """Write a file atomically, creating its folder; do nothing if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError:
        pass
