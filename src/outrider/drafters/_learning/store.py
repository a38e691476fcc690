"""Learnt weights as a folder: `learnt.safetensors`, `learnt.json` and, beside a head, `phrases.safetensors`.

Promise: `load` returns weights that fit the drafter, or raises; a folder is written whole or not at all. It contains
weights, counts and hashes of short contexts with the token after each, never text or states of requests
(docs/learning.md).
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
from ...models.paths import cache_folder, write_json
from .adapter import Output, Weights

FORMAT = 1
WEIGHTS, FACTS, PHRASES = "learnt.safetensors", "learnt.json", "phrases.safetensors"
_SIMILAR = 0.98  # cosine of two samples of the same table in different dtypes, at least


def kept_folder(model: str, options: dict[str, Any]) -> Path:
    """Where a model's learnt weights are kept between runs; one folder for each head and draft vocabulary."""
    head, vocabulary = options.get("head"), options.get("draft_vocab")
    parts = [model, *([Path(str(head)).resolve().name] if head else []), *([str(vocabulary)] if vocabulary else [])]
    return cache_folder() / "learnt" / re.sub(r"[^\w.-]+", "_", "-".join(parts)).strip("._")


def identity(frozen: Output) -> dict[str, Any]:
    """Identifies a drafter: a hash of its vocabulary and shapes, and a sample of its table, which dtypes round."""
    facts, ids, sample = frozen.identity()
    return {
        "words": hashlib.sha256(repr(facts).encode() + ids.cpu().to(torch.int32).numpy().tobytes()).hexdigest()[:24],
        "sample": [round(float(value), 4) for value in sample.float().cpu().flatten()],
    }


def same(identity: dict[str, Any], other: Any) -> bool:
    """Whether two identities mean the same drafter, whatever its dtype."""
    if not isinstance(other, dict) or identity["words"] != other.get("words"):
        return False
    a, b = torch.tensor(identity["sample"]), torch.tensor(other.get("sample", []))
    return a.shape == b.shape and float(torch.cosine_similarity(a, b, dim=0)) > _SIMILAR


def save(folder: Path | str, weights: Weights, facts: dict[str, Any], phrases: Weights | None = None) -> None:
    """Write a folder, or replace one written before; phrases keep their dtypes."""
    folder = Path(folder)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        save_file({name: w.detach().float().cpu().contiguous() for name, w in weights.items()}, unfinished / WEIGHTS)
        if phrases:
            save_file({name: w.contiguous() for name, w in phrases.items()}, unfinished / PHRASES)
        write_json(unfinished / FACTS, {"outrider_learnt": FORMAT} | facts)
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
    except FileNotFoundError as error:
        raise OutriderError(f"{folder} holds no learnt weights: `--learn` or `--learn-to` writes them.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise OutriderError(f"{Path(folder) / FACTS} cannot be read: {error}.") from error
    except ValueError as error:
        raise OutriderError(f"{Path(folder) / FACTS} is damaged: it is not JSON ({error}).") from error
    if not isinstance(facts, dict) or facts.get("outrider_learnt") != FORMAT:
        raise OutriderError(f"{folder} was written by another version of Outrider; learn again, or use that version.")
    return facts


def load(folder: Path | str, frozen: Output, initial: Weights) -> Weights:
    """The weights in a folder, with the shapes, dtypes and devices of the initial ones."""
    return load_kinds(folder, frozen, initial).get("", initial)


def save_kinds(
    folder: Path | str, weights: dict[str, Weights], facts: dict[str, Any], phrases: dict[str, Weights] | None = None
) -> None:
    """`save` the weights, and phrases, of several kinds of text; those of no kind have plain names."""
    save(folder, _named(weights), facts | {"kinds": sorted(weights)}, _named(phrases or {}))


def _named(kinds: dict[str, Weights]) -> Weights:
    return {f"{kind}/{name}" if kind else name: w for kind, each in kinds.items() for name, w in each.items()}


def _by_kind(named: Weights) -> dict[str, Weights]:
    kinds: dict[str, Weights] = {}
    for name, weight in named.items():
        kind, _, short = name.rpartition("/")
        kinds.setdefault(kind, {})[short] = weight
    return kinds


def forget_kind(folder: Path | str, kind: str) -> None:
    """Write a folder again without the weights of one kind of text."""
    facts = facts_of(folder)
    kinds: list[str] = facts.get("kinds", [])
    if kind not in kinds:
        known = ", ".join(filter(None, kinds)) or "none"
        raise OutriderError(f"Nothing has been learnt of the kind '{kind}'; kinds with weights of their own: {known}.")
    kept = {each: weights for each, weights in _by_kind(_read(folder)).items() if each != kind}
    phrases = {each: tensors for each, tensors in load_phrases(folder).items() if each != kind}
    facts.get("learning", {}).get("kinds", {}).pop(kind, None)
    save_kinds(folder, kept, facts, phrases)


def load_kinds(folder: Path | str, frozen: Output, initial: Weights) -> dict[str, Weights]:
    """The weights in a folder by kind of text ("" is no kind), each as `load` returns them; no kind is there always."""
    facts = facts_of(folder)
    if not same(identity(frozen), facts.get("identity")):
        raise ModelError(
            f"The weights in {folder} belong to another drafter or target ({facts.get('model', 'unknown')}). Omit "
            f"--learn-from to start anew, or give the same model, head and draft_vocab as before."
        )
    kinds = _by_kind(_read(folder))
    shapes = {n: w.shape for n, w in initial.items()}
    if any({n: w.shape for n, w in each.items()} != shapes for each in kinds.values()):
        raise ModelError(f"The weights in {folder} have other shapes than this drafter's. Learn again.")
    if not all(bool(w.isfinite().all()) for each in kinds.values() for w in each.values()):
        raise ModelError(f"The weights in {folder} are not all finite. Learn again.")
    loaded = {kind: {n: each[n].to(w.device, w.dtype) for n, w in initial.items()} for kind, each in kinds.items()}
    return {"": initial} | loaded


def load_phrases(folder: Path | str) -> dict[str, Weights]:
    """The phrases in a folder by kind of text, as `save_kinds` wrote them; none where there is no such file."""
    return _by_kind(_read(folder, PHRASES)) if (Path(folder) / PHRASES).exists() else {}


def _read(folder: Path | str, file: str = WEIGHTS) -> Weights:
    try:
        return load_file(Path(folder) / file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"The weights in {folder} cannot be read: {error}. Learn again.") from error


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
    own = {WEIGHTS, FACTS, PHRASES}
    if folder.exists() and (not folder.is_dir() or {each.name for each in folder.iterdir()} - own):
        raise OutriderError(f"{folder} holds other files than learnt weights; give a new or an empty folder.")
