"""The exported folder: target and drafter in the engine's formats, a command line, and a description.

    OUT/README.md    what this is                 OUT/target/   the target, where the engine cannot read the original
    OUT/export.json  the same for programs        OUT/drafter/  the drafter, where it has weights
    OUT/serve.sh     the command line

Everything in OUT refers to OUT by relative paths (serve.sh changes into it), so the folder can be moved. `export.json`
is written last: a folder that has one is complete.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, OutriderError
from ..models.checkpoint import Checkpoint, open_checkpoint
from ..models.config import to_hf
from ..models.paths import write_json
from ..models.speculators import (
    CARD,
    CONFIG,
    FIRST,
    SPECULATORS_FIRST,
    WEIGHTS,
    HeadConfig,
    decoded,
    read_head,
    read_json,
    target_ids,
)
from ..models.weights import kept_layers, save_tensors, write_folder
from . import gguf
from .engines import ENGINES, EngineCommand, ExportPaths
from .plan import ExportPlan

VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Json = dict[str, Any]
Progress = Callable[[str, float], None]  # text, share done


@dataclass(frozen=True)
class ExportOptions:
    engine: str
    out: Path
    dtype: str = "bfloat16"
    name: str | None = None  # under which the model is served
    copy_target: bool = False  # write the target even where the engine could read the original
    force: bool = False


def export(
    checkpoint: Checkpoint, plan: ExportPlan, options: ExportOptions, progress: Progress = lambda text, done: None
) -> Json:
    """Write the folder; returns the content of `export.json`."""
    if options.engine not in ENGINES:
        raise ConfigError(f"There is no engine '{options.engine}' to export to; choose one of: {', '.join(ENGINES)}.")
    if options.dtype not in DTYPES:
        raise ConfigError(f"There is no dtype '{options.dtype}' to export in; choose one of: {', '.join(DTYPES)}.")
    _make_folder(options)
    progress("the target", 0.1)
    target = _write_target(checkpoint, options)
    progress("the drafter", 0.6)
    drafter = _write_drafter(checkpoint, plan, options)
    paths = ExportPaths(target, drafter, options.name or checkpoint.name, dtype=options.dtype)
    command = ENGINES[options.engine](plan, paths)
    facts = _facts(checkpoint, plan, options, command, paths)
    progress("the command line", 0.95)
    _write_description(options.out, facts, command)
    progress("done", 1.0)
    return facts


def _make_folder(options: ExportOptions) -> None:
    out = options.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not options.force:
        raise OutriderError(f"{out} is not empty; give another folder with --out, or --force to write into it.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "export.json").unlink(missing_ok=True)
    except OSError as error:
        raise OutriderError(f"{out} cannot be written: {error}.") from error


def _write_target(checkpoint: Checkpoint, options: ExportOptions) -> Path:
    """The target's path for the engine: the original where it can be read, else a copy in the engine's format."""
    is_folder = checkpoint.path.is_dir() and not any(checkpoint.path.glob("*.gguf"))
    if options.engine == "llamacpp":
        if is_folder:
            raise ConfigError(
                f"llama.cpp reads GGUF files and {checkpoint.path} is a Hugging Face folder: give the target's GGUF "
                "file with --model, or convert it with llama.cpp's convert_hf_to_gguf.py."
            )
        if not options.copy_target:
            return checkpoint.path
        shutil.copyfile(checkpoint.path, options.out / "target.gguf")
        return Path("target.gguf")
    if is_folder and not options.copy_target:
        return checkpoint.path.resolve()
    to, dtype = options.out / "target", DTYPES[options.dtype]
    write_folder(to, checkpoint.config, checkpoint.weights, checkpoint.tokenizer, dtype)
    return Path("target")


def _write_drafter(checkpoint: Checkpoint, plan: ExportPlan, options: ExportOptions) -> Path | None:
    """The drafter's path within the folder; None where it has no weights."""
    to, as_gguf = options.out / "drafter", options.engine == "llamacpp"
    if plan.kind == "head" and plan.folder is not None:
        _write_head(plan.folder, to, options.engine, checkpoint)
        return Path("drafter")
    if plan.kind == "layerskip":
        sets = (plan.options.get("skip_attention", ()), plan.options.get("skip_mlp", ()))
        if as_gguf:
            gguf.write_kept(checkpoint.path, to.with_suffix(".gguf"), *sets)
        else:
            config, weights = kept_layers(checkpoint.config, checkpoint.weights, *sets)
            write_folder(to, config, weights, checkpoint.tokenizer, DTYPES[options.dtype])
    elif plan.kind == "model" and plan.folder is not None:
        small = _open_draft_model(plan.folder, checkpoint)
        if as_gguf:
            gguf.write_model(small, checkpoint.path, to.with_suffix(".gguf"))
        else:
            write_folder(to, small.config, small.weights, small.tokenizer, DTYPES[options.dtype])
    else:
        return None
    return Path("drafter.gguf" if as_gguf else "drafter")


def _open_draft_model(folder: Path, target: Checkpoint) -> Checkpoint:
    small = open_checkpoint(folder)
    if small.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"The draft model {folder} has {small.config.vocab_size} tokens and the target {target.config.vocab_size}: "
            "engines need one vocabulary; make a model from the target with `outrider train --kind model`."
        )
    return small


def _write_head(folder: Path, to: Path, engine: str, target: Checkpoint) -> None:
    """A head in the speculators format, or for SGLang in EAGLE's flat one. A folder with a configuration is complete.

    vLLM reads what `outrider train` writes as it is. The package `speculators` expects the first layer as `layers.0`,
    which vLLM reads too. `vllm serve DRAFTER` starts the verifier that the configuration names. Output rows that the
    head shares with the target are written out.
    """
    config, stored = read_head(folder)
    tensors = decoded(stored)
    if not config.own_output:
        name = "embed_tokens.weight" if target.config.tied else "lm_head.weight"
        rows = target.weights.get(name, torch.bfloat16)[target_ids(tensors["d2t"])]  # [D, H]
        tensors["lm_head.weight"] = rows.contiguous()
    if engine == "sglang":
        data = _sglang_config(config, folder)
    else:
        data = read_json(folder)
        data["speculators_config"]["verifier"]["name_or_path"] = "target"
        data["outrider"].pop("own_output", None)
        for name in [name for name in tensors if name.startswith(FIRST)]:
            tensors[SPECULATORS_FIRST + name.removeprefix(FIRST)] = tensors.pop(name)
    to.mkdir(parents=True, exist_ok=True)
    save_tensors(to / WEIGHTS, tensors)
    if (folder / CARD).is_file():
        shutil.copyfile(folder / CARD, to / CARD)
    write_json(to / CONFIG, data)


def _sglang_config(config: HeadConfig, folder: Path) -> Json:
    """SGLang counts tapped layers by their outputs, the speculators format by their inputs."""
    if len(config.taps) != 3:
        raise ConfigError(f"SGLang reads three layers of a target, and the head {folder} reads {len(config.taps)}.")
    data = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"} | to_hf(config)
    data |= {"draft_vocab_size": config.draft_vocab_size, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    taps = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(config.taps)}
    return data | {"eagle_config": taps}


def _facts(
    checkpoint: Checkpoint, plan: ExportPlan, options: ExportOptions, command: EngineCommand, paths: ExportPaths
) -> Json:
    return {
        "outrider_export": VERSION,
        "engine": options.engine,
        "model": checkpoint.name,
        "served_model_name": paths.name,
        "target": str(paths.target),
        "drafter": {"kind": plan.kind, "path": None if paths.drafter is None else str(paths.drafter)},
        "k": plan.k,
        "k_from": plan.k_reason,
        "k_by_batch_size": [list(batch_range) for batch_range in plan.k_by_batch],
        "options": plan.options,
        "speculative_config": command.speculative_config,
        "command": command.command,
        "files": sorted(command.files),
        "notes": command.notes,
    }


def _write_description(out: Path, facts: Json, command: EngineCommand) -> None:
    for name, content in command.files.items():
        write_json(out / name, content)
    line = shlex.join(command.command)
    script = out / "serve.sh"
    script.write_text(
        f'#!/bin/sh\n# Paths are relative to this folder.\ncd "$(dirname "$0")" || exit 1\nexec {line} "$@"\n'
    )
    script.chmod(0o755)
    (out / "README.md").write_text(_readme(facts, line), encoding="utf-8")
    write_json(out / "export.json", facts)


_KINDS = {
    "head": "a trained EAGLE-3 head",
    "model": "a draft model",
    "layerskip": "a smaller model of the target's own layers, those that a layer-skip set keeps",
    "ngram": "n-grams of the text itself, without weights",
    "suffix": "suffix matches in earlier text, without weights",
    "off": "none, plain decoding",
}


def _readme(facts: Json, line: str) -> str:
    table = ""
    if facts["k_by_batch_size"]:
        rows = "".join(f"| {low} to {high} | {k} |\n" for low, high, k in facts["k_by_batch_size"])
        table = f"\n| sequences in the batch | drafted tokens |\n|---|---|\n{rows}"
    notes = "".join(f"- {note}\n" for note in facts["notes"])
    return (
        f"# {facts['model']} with speculation, for {facts['engine']}\n\n"
        f"Written by `outrider export --to {facts['engine']}`. Drafter: {_KINDS[facts['drafter']['kind']]}. "
        f"Drafted tokens per step: {facts['k']} ({facts['k_from']}).\n{table}\n"
        f"Start it in this folder, or run `./serve.sh`, which passes further options on:\n\n```sh\n{line}\n```\n\n"
        f"{notes}- The engine's own rules decide what is accepted; `outrider verify --server URL --plain-server URL` "
        "compares its text with and without speculation.\n"
    )
