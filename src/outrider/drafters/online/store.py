"""Learnt weights as a folder: `learnt.safetensors` and `learnt.json`.

Promise: `load` returns weights that fit the drafter, or raises; a folder is written whole or not at all. It contains
weights and counts, never text, tokens or states of requests (docs/learning.md).
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
from .adapter import FrozenOutput, Weights

FORMAT = 1
WEIGHTS, FACTS = "learnt.safetensors", "learnt.json"
_SAMPLE = 16  # rows and columns of the table that identify it
_SIMILAR = 0.98  # cosine of two samples of the same table in different dtypes, at least


def kept_folder(model: str, options: dict[str, Any]) -> Path:
    """Where a model's learnt weights are kept between runs; one folder for each head and draft vocabulary."""
    head, vocabulary = options.get("head"), options.get("draft_vocab")
    parts = [model, *([Path(str(head)).resolve().name] if head else []), *([str(vocabulary)] if vocabulary else [])]
    return cache_folder() / "learnt" / re.sub(r"[^\w.-]+", "_", "-".join(parts)).strip("._")


def identity(frozen: FrozenOutput) -> dict[str, Any]:
    """Identifies a drafter: a hash of its vocabulary and shapes, and a sample of its table, which dtypes round."""
    ids = frozen.ids.cpu().to(torch.int32).numpy().tobytes()
    facts = (tuple(frozen.table.shape), frozen.draft_ids.shape[0], frozen.embedding is None)
    sample = frozen.table[:: max(1, frozen.table.shape[0] // _SAMPLE), :_SAMPLE].float().cpu().flatten()
    return {
        "words": hashlib.sha256(repr(facts).encode() + ids).hexdigest()[:24],
        "sample": [round(float(value), 4) for value in sample],
    }


def same(identity: dict[str, Any], other: Any) -> bool:
    """Whether two identities mean the same drafter, whatever its dtype."""
    if not isinstance(other, dict) or identity["words"] != other.get("words"):
        return False
    a, b = torch.tensor(identity["sample"]), torch.tensor(other.get("sample", []))
    return a.shape == b.shape and float(torch.cosine_similarity(a, b, dim=0)) > _SIMILAR


def save(folder: Path | str, weights: Weights, facts: dict[str, Any]) -> None:
    """Write a folder, or replace one written before."""
    folder = Path(folder)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        save_file({name: w.detach().float().cpu().contiguous() for name, w in weights.items()}, unfinished / WEIGHTS)
        text = json.dumps({"outrider_learnt": FORMAT} | facts, indent=2) + "\n"
        (unfinished / FACTS).write_text(text, encoding="utf-8")
        _check_replaceable(folder)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.replace(folder)
    except OSError as error:
        raise OutriderError(f"The learnt weights cannot be written to {folder}: {error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def facts_of(folder: Path | str) -> dict[str, Any]:
    """The contents of a folder's `learnt.json`."""
    try:
        facts = json.loads((Path(folder) / FACTS).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"{folder} holds no learnt weights: {error}. `--learn-to` writes them.") from error
    except ValueError as error:
        raise OutriderError(f"{Path(folder) / FACTS} is damaged: it is not JSON ({error}).") from error
    if not isinstance(facts, dict) or facts.get("outrider_learnt") != FORMAT:
        raise OutriderError(f"{folder} was written by another version of Outrider; learn again, or use that version.")
    return facts


def load(folder: Path | str, frozen: FrozenOutput, initial: Weights) -> Weights:
    """The weights in a folder, with the shapes, dtypes and devices of the initial ones."""
    facts = facts_of(folder)
    if not same(identity(frozen), facts.get("identity")):
        raise ModelError(
            f"The weights in {folder} belong to another drafter or target ({facts.get('model', 'unknown')}). Omit "
            f"--learn-from to start anew, or give the same model, head and draft_vocab as before."
        )
    try:
        read = load_file(Path(folder) / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The weights in {folder} cannot be read: {error}. Learn again.") from error
    if {n: w.shape for n, w in read.items()} != {n: w.shape for n, w in initial.items()}:
        raise ModelError(f"The weights in {folder} have other shapes than this drafter's. Learn again.")
    if not all(bool(w.isfinite().all()) for w in read.values()):
        raise ModelError(f"The weights in {folder} are not all finite. Learn again.")
    return {name: read[name].to(w.device, w.dtype) for name, w in initial.items()}


def copy(source: Path | str, folder: Path | str) -> None:
    """Copy a folder of learnt weights."""
    facts_of(source)
    _check_replaceable(Path(folder))
    try:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
    except OSError as error:
        raise OutriderError(f"The learnt weights cannot be copied to {folder}: {error}.") from error


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace a folder with other files."""
    if folder.exists() and (not folder.is_dir() or {each.name for each in folder.iterdir()} - {WEIGHTS, FACTS}):
        raise OutriderError(f"{folder} holds other files than learnt weights; give a new or an empty folder.")
