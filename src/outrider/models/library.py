"""What is on this machine: downloaded models, models and heads in the hub's cache, and what each of them is.

Promise: listing opens headers and configurations only, downloads nothing, and a folder that cannot be read is listed
with the reason. It knows files; it does not know drafters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OutriderError
from .checkpoint import DEFAULT, Checkpoint, open_checkpoint
from .fetch import SMOLLM2
from .foreign import ForeignWeights
from .gguf_file import GGUF
from .gguf_head import gguf_alone, is_gguf_head
from .mtp import stored_mtp
from .paths import cache_folder
from .published import is_head
from .speculators import CONFIG, read_json

MODEL, HEAD, UNREADABLE = "model", "head", "unreadable"


@dataclass(frozen=True)
class Entry:
    """A model or a head on disk."""

    name: str  # what --model or head= takes
    path: Path
    bytes: int
    kind: str  # model, head or unreadable
    about: str  # what it is, or why it cannot be read
    checkpoint: Checkpoint | None = None  # of a model


def entries() -> list[Entry]:
    """Everything that can be found, models first."""
    found = [describe(name, path) for name, path in _places()]
    return sorted(found, key=lambda entry: ((MODEL, HEAD, UNREADABLE).index(entry.kind), entry.name.lower()))


def describe(name: str, path: Path) -> Entry:
    """What a file or folder is."""
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    try:
        if path.is_dir() and (path / CONFIG).is_file() and is_head(path):
            return Entry(name, path, size, HEAD, _about_head(path))
        if is_gguf_head(file := gguf_alone(path)):
            return Entry(name, file, size, HEAD, f"{GGUF(file).metadata['general.architecture']} head in a GGUF file")
        checkpoint = open_checkpoint(path)
    except OutriderError as error:
        return Entry(name, path, size, UNREADABLE, str(error))
    return Entry(name, path, size, MODEL, about_model(checkpoint), checkpoint)


def about_model(checkpoint: Checkpoint) -> str:
    c = checkpoint.config
    runs = "through transformers" if isinstance(checkpoint.weights, ForeignWeights) else "built-in"
    own = "" if stored_mtp(checkpoint.weights, c) is None else ", with a layer for further tokens (MTP)"
    return f"{c.architecture}, {c.layers} layers of {c.hidden_size}, context {c.context_length:,}, {runs}{own}"


def _about_head(folder: Path) -> str:
    data = read_json(folder)
    own: Any = data.get("outrider") or {}
    speculators = data.get("speculators_config") or {}
    verifier = (speculators.get("verifier") or {}).get("name_or_path") or data.get("base_model_name_or_path")
    kind = own.get("kind") or data.get("speculators_model_type") or "published"
    return f"{kind} head" + (f" for {verifier}" if verifier else "")


def _places() -> Iterator[tuple[str, Path]]:
    for path in sorted((cache_folder() / "models").glob("*.gguf")):
        yield DEFAULT if path.name == Path(SMOLLM2.member).name else str(path), path
    for path in sorted((cache_folder() / "heads").glob(f"*/{CONFIG}")):
        yield str(path.parent), path.parent
    yield from _hub_snapshots()


def _hub_snapshots() -> Iterator[tuple[str, Path]]:
    """The newest snapshot of each repository with a configuration or a GGUF file in huggingface_hub's cache."""
    try:
        import huggingface_hub as hub
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return
    if not Path(HF_HUB_CACHE).is_dir():
        return
    for repo in sorted(hub.scan_cache_dir().repos, key=lambda repo: repo.repo_id.lower()):
        revisions = sorted(repo.revisions, key=lambda revision: revision.last_modified, reverse=True)
        if repo.repo_type == "model" and revisions:
            folder = Path(revisions[0].snapshot_path)
            if (folder / CONFIG).is_file() or next(folder.glob("*.gguf"), None):
                yield repo.repo_id, folder


def as_json(entry: Entry, head: str | None) -> dict[str, Any]:
    """An entry for programs; head: the folder of the head that belongs to a model, or mtp."""
    facts = {"name": entry.name, "path": str(entry.path), "bytes": entry.bytes, "kind": entry.kind}
    return facts | {"about": entry.about, "head": head}
