"""The folder that goes elsewhere: target and drafter in the engine's formats, a command line, and what it all is.

    OUT/README.md  what this is, in words       OUT/target/   the target, where the engine cannot read the original
    OUT/export.json  the same for programs      OUT/drafter/  the drafter, where it has weights
    OUT/serve.sh  the command line

Promise: everything in OUT refers to OUT by relative paths (serve.sh changes into it), so the folder can be moved.
`export.json` is written last: a folder that has one is complete.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, OutriderError
from ..models.checkpoint import Checkpoint
from ..models.weights import kept_layers, write_folder
from . import gguf as gguf_out
from .engines import Places, Told, engine
from .heads import write_for_sglang, write_for_vllm
from .plan import Handover

VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Say = Callable[[str, float], None]


@dataclass(frozen=True)
class Order:
    """What to write, and where."""

    engine: str
    out: Path
    dtype: str = "bfloat16"
    name: str | None = None  # what requests call the model
    copy_target: bool = False  # write the target even where the engine could read the original
    force: bool = False


def export(checkpoint: Checkpoint, given: Handover, order: Order, say: Say = lambda what, done: None) -> dict[str, Any]:
    """Write it all; returns what `export.json` says."""
    tell = engine(order.engine)
    if order.dtype not in DTYPES:
        raise ConfigError(f"There is no dtype '{order.dtype}' to export in; choose one of: {', '.join(DTYPES)}.")
    _make_room(order)
    say("the target", 0.1)
    target = _target(checkpoint, order)
    say("the drafter", 0.6)
    drafter = _drafter(checkpoint, given, order)
    places = Places(target, drafter, order.name or checkpoint.name, dtype=order.dtype)
    told = tell(given, places)
    facts = _facts(checkpoint, given, order, told, places)
    say("the command line", 0.95)
    _write_words(order.out, facts, told)
    say("done", 1.0)
    return facts


def _make_room(order: Order) -> None:
    out = order.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not order.force:
        raise OutriderError(f"{out} is not empty; give another folder with --out, or --force to write into it.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "export.json").unlink(missing_ok=True)
    except OSError as error:
        raise OutriderError(f"{out} cannot be written: {error}.") from error


# ------------------------------------------------------------ weights


def _target(checkpoint: Checkpoint, order: Order) -> Path:
    """Where the engine finds the target: the original where it can read it, a written one where not."""
    is_folder = checkpoint.path.is_dir() and not any(checkpoint.path.glob("*.gguf"))
    if order.engine == "llamacpp":
        if is_folder:
            raise ConfigError(
                f"llama.cpp reads GGUF files and {checkpoint.path} is a Hugging Face folder: give the target's GGUF "
                "file with --target, or convert it with llama.cpp's convert_hf_to_gguf.py."
            )
        return _copy(checkpoint.path, order.out / "target.gguf", order.out) if order.copy_target else checkpoint.path
    if is_folder and not order.copy_target:
        return checkpoint.path.resolve()
    write_folder(order.out / "target", checkpoint.config, checkpoint.weights, checkpoint.tokenizer, DTYPES[order.dtype])
    return Path("target")


def _copy(source: Path, to: Path, out: Path) -> Path:
    shutil.copyfile(source, to)
    return to.relative_to(out)


def _drafter(checkpoint: Checkpoint, given: Handover, order: Order) -> Path | None:
    to = order.out / "drafter"
    if given.kind == "head" and given.folder is not None:
        (write_for_sglang if order.engine == "sglang" else write_for_vllm)(given.folder, to, "target")
        return Path("drafter")
    if given.kind == "layerskip":
        return _kept(checkpoint, given, order, to)
    if given.kind == "model" and given.folder is not None:
        return _model(checkpoint, given.folder, order, to)
    return None


def _kept(checkpoint: Checkpoint, given: Handover, order: Order, to: Path) -> Path:
    """A layer-skip set as a smaller model of the layers that run."""
    skip = (given.options.get("skip_attention", ()), given.options.get("skip_mlp", ()))
    if order.engine == "llamacpp":
        gguf_out.write_kept(checkpoint.path, to.with_suffix(".gguf"), *skip)
        return Path("drafter.gguf")
    config, weights = kept_layers(checkpoint.config, checkpoint.weights, *skip)
    write_folder(to, config, weights, checkpoint.tokenizer, DTYPES[order.dtype])
    return Path("drafter")


def _model(checkpoint: Checkpoint, folder: Path, order: Order, to: Path) -> Path:
    """A draft model as it is: a copy, so that the folder is whole; for llama.cpp, as GGUF."""
    from ..models.checkpoint import open_checkpoint

    small = open_checkpoint(folder)
    if small.config.vocab_size != checkpoint.config.vocab_size:
        raise ConfigError(
            f"The draft model {folder} has {small.config.vocab_size} tokens and the target "
            f"{checkpoint.config.vocab_size}: engines want one vocabulary; make a model of the target's own with "
            "`outrider train --kind model`."
        )
    if order.engine == "llamacpp":
        gguf_out.write_model(small, checkpoint.path, to.with_suffix(".gguf"))
        return Path("drafter.gguf")
    write_folder(to, small.config, small.weights, small.tokenizer, DTYPES[order.dtype])
    return Path("drafter")


# ------------------------------------------------------------ words


def _facts(checkpoint: Checkpoint, given: Handover, order: Order, told: Told, places: Places) -> dict[str, Any]:
    return {
        "outrider_export": VERSION,
        "engine": order.engine,
        "model": checkpoint.name,
        "served_model_name": places.name,
        "target": str(places.target),
        "drafter": {"kind": given.kind, "path": None if places.drafter is None else str(places.drafter)},
        "k": given.k,
        "k_from": given.why_k,
        "k_by_batch_size": [list(each) for each in given.table],
        "options": given.options,
        "speculative_config": told.configuration,
        "command": told.words,
        "files": sorted(told.files),
        "notes": told.notes,
    }


def _write_words(out: Path, facts: dict[str, Any], told: Told) -> None:
    for name, content in told.files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    script = out / "serve.sh"
    line = shlex.join(told.words)
    script.write_text(
        f'#!/bin/sh\n# Paths are relative to this folder.\ncd "$(dirname "$0")" || exit 1\nexec {line} "$@"\n'
    )
    script.chmod(0o755)
    (out / "README.md").write_text(_readme(facts, line), encoding="utf-8")
    (out / "export.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


_KINDS = {
    "head": "a trained EAGLE-3 head",
    "model": "a draft model",
    "layerskip": "a smaller model of the target's own layers, those that a layer-skip set keeps",
    "ngram": "n-grams of the text itself, without weights",
    "suffix": "what followed before, without weights",
    "off": "nobody: plain decoding",
}


def _readme(facts: dict[str, Any], line: str) -> str:
    """Plain words: what is here, how to start it, and what to know."""
    table = ""
    if facts["k_by_batch_size"]:
        rows = "".join(f"| {low} to {high} | {k} |\n" for low, high, k in facts["k_by_batch_size"])
        table = f"\n| sequences in the batch | drafted tokens |\n|---|---|\n{rows}"
    notes = "".join(f"- {note}\n" for note in facts["notes"])
    return (
        f"# {facts['model']} with speculation, for {facts['engine']}\n\n"
        f"Written by `outrider export --to {facts['engine']}`. Who drafts: {_KINDS[facts['drafter']['kind']]}. "
        f"Drafted tokens per step: {facts['k']} ({facts['k_from']}).\n{table}\n"
        f"Start it in this folder (or run `./serve.sh`, which takes more options behind it):\n\n```sh\n{line}\n```\n\n"
        f"{notes}- The engine's own rules decide what is accepted; `outrider verify --server URL --plain-server URL` "
        "compares its text with and without speculation.\n"
    )
