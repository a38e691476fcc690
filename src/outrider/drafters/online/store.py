"""What was learnt, as a folder: `learnt.safetensors` and `learnt.json`.

Promise: what `load` returns fits the drafter that asked, or is refused in a sentence; a folder is written whole or not
at all. It holds weights and counts, never text, tokens or states of requests (docs/learning.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ...errors import ModelError, OutriderError
from ...models.paths import cache_folder
from .adapter import Frozen, Weights

FORMAT = 1
WEIGHTS, FACTS = "learnt.safetensors", "learnt.json"
_SAMPLE = 16  # rows and columns of the table that tell it from others
_ALIKE = 0.98


def kept_folder(model: str, options: dict[str, Any]) -> Path:
    """Where what a model's drafter has learnt is kept between runs; each head and draft vocabulary has its own."""
    head, vocabulary = options.get("head"), options.get("draft_vocab")
    words = [model, *([Path(str(head)).resolve().name] if head else []), *([str(vocabulary)] if vocabulary else [])]
    return cache_folder() / "learnt" / re.sub(r"[^\w.-]+", "_", "-".join(words)).strip("._")


def identity(frozen: Frozen) -> dict[str, Any]:
    """Whose weights these are: the words, and a few numbers of the table, which other dtypes round differently."""
    words = frozen.ids.cpu().to(torch.int32).numpy().tobytes()
    facts = (tuple(frozen.table.shape), frozen.place.shape[0], frozen.embedding is None)
    sample = frozen.table[:: max(1, frozen.table.shape[0] // _SAMPLE), :_SAMPLE].float().cpu().flatten()
    return {
        "words": hashlib.sha256(repr(facts).encode() + words).hexdigest()[:24],
        "sample": [round(float(value), 4) for value in sample],
    }


def same(ours: dict[str, Any], theirs: Any) -> bool:
    """Whether two identities mean the same drafter, however its numbers were rounded."""
    if not isinstance(theirs, dict) or ours["words"] != theirs.get("words"):
        return False
    a, b = torch.tensor(ours["sample"]), torch.tensor(theirs.get("sample", []))
    return a.shape == b.shape and float(torch.cosine_similarity(a, b, dim=0)) > _ALIKE


def save(folder: Path | str, weights: Weights, facts: dict[str, Any]) -> None:
    """Write a folder, or replace one that was written before."""
    folder = Path(folder)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        save_file({name: w.detach().float().cpu().contiguous() for name, w in weights.items()}, unfinished / WEIGHTS)
        text = json.dumps({"outrider_learnt": FORMAT} | facts, indent=2) + "\n"
        (unfinished / FACTS).write_text(text, encoding="utf-8")
        _insist_on_ours(folder)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.replace(folder)
    except OSError as error:
        raise OutriderError(f"What was learnt cannot be written to {folder}: {error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def facts_of(folder: Path | str) -> dict[str, Any]:
    """What a folder says of itself."""
    try:
        facts = json.loads((Path(folder) / FACTS).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"{folder} holds nothing that was learnt: {error}. `--learn-to` writes it.") from error
    except ValueError as error:
        raise OutriderError(f"{Path(folder) / FACTS} is damaged: it is not JSON ({error}).") from error
    if not isinstance(facts, dict) or facts.get("outrider_learnt") != FORMAT:
        raise OutriderError(f"{folder} was written by another Outrider; learn again, or use that one.")
    return facts


def load(folder: Path | str, frozen: Frozen, fresh: Weights) -> Weights:
    """The weights in a folder, for a drafter whose fresh weights look like this."""
    facts = facts_of(folder)
    if not same(identity(frozen), facts.get("identity")):
        raise ModelError(
            f"What {folder} has learnt belongs to another drafter or target ({facts.get('model', 'unknown')}). Leave "
            f"--learn-from out to start afresh, or give the same model, head and draft_vocab as then."
        )
    try:
        read = load_file(Path(folder) / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The weights in {folder} cannot be read: {error}. Learn again.") from error
    if {n: w.shape for n, w in read.items()} != {n: w.shape for n, w in fresh.items()}:
        raise ModelError(f"The weights in {folder} have other shapes than this drafter's. Learn again.")
    if not all(bool(w.isfinite().all()) for w in read.values()):
        raise ModelError(f"The weights in {folder} are not all numbers. Learn again.")
    return {name: read[name].to(w.device, w.dtype) for name, w in fresh.items()}


def copy(source: Path | str, folder: Path | str) -> None:
    """The same folder elsewhere."""
    facts_of(source)
    _insist_on_ours(Path(folder))
    try:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
    except OSError as error:
        raise OutriderError(f"What was learnt cannot be copied to {folder}: {error}.") from error


def _insist_on_ours(folder: Path) -> None:
    """Never replace a folder that somebody else has filled."""
    if folder.exists() and (not folder.is_dir() or {each.name for each in folder.iterdir()} - {WEIGHTS, FACTS}):
        raise OutriderError(f"{folder} holds other things than what was learnt; give a new or an empty folder.")
