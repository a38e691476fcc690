"""From a model's name to its configuration, weights and tokenizer.

Promise: what `open_checkpoint` returns is complete and fits together; whatever is missing or wrong is one sentence,
before a single weight is computed with. This file knows where models lie; it does not know how they run.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ModelError
from . import config as configs
from .config import ModelConfig
from .fetch import default_model, hub_model
from .gguf_file import GGUF, GGUFWeights
from .tokenizer import Tokenizer, read_json
from .weights import Safetensors, Weights, check, find_safetensors

DEFAULT = "smollm2"
_HUB_NAME = re.compile(r"[\w][\w.-]*/[\w][\w.-]*(@[\w./-]+)?")
_CHOICES = f"'{DEFAULT}' (the default), a folder in Hugging Face layout, a .gguf file, or a hub name like owner/name"


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded."""

    name: str
    path: Path
    config: ModelConfig
    weights: Any  # `Weights`, or what stands in their place where transformers runs the model
    tokenizer: Any  # `Tokenizer`, or one like it


def open_checkpoint(model: str | Path | Checkpoint | None = None) -> Checkpoint:
    """Find a model and open it; the weights are read later, one tensor at a time. An open one is returned as it is."""
    if isinstance(model, Checkpoint):
        return model
    if model is None or str(model).lower() == DEFAULT:
        return _open_gguf(default_model())
    path = Path(model).expanduser()
    if path.exists():
        return _open_path(path)
    if _looks_like_path(str(model)):
        raise ModelError(f"There is no file or folder {model}; give {_CHOICES}.")
    if _HUB_NAME.fullmatch(str(model)):
        return replace(_open_path(hub_model(str(model))), name=str(model))
    raise ModelError(f"There is no model '{model}'; give {_CHOICES}.")


def _looks_like_path(name: str) -> bool:
    by_form = name.startswith((".", "~", os.sep)) or Path(name).is_absolute() or "\\" in name
    return by_form or name.partition("@")[0].count("/") > 1 or name.lower().endswith((".gguf", ".safetensors"))


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path)
    if path.suffix.lower() == ".safetensors":
        raise ModelError(f"{path} is only the weights of a model; give the folder that holds its config.json too.")
    raise ModelError(f"{path} is not a model that can be read; give {_CHOICES}.")


def _open_folder(folder: Path) -> Checkpoint:
    ggufs = sorted(folder.glob("*.gguf"))
    has_config = (folder / "config.json").is_file()
    if ggufs and not (has_config and next(folder.glob("*.safetensors"), None)):
        return _open_gguf(_only(ggufs, folder))
    if not has_config:
        raise ModelError(_no_config(folder))
    try:
        config = configs.from_hf(read_json(folder / "config.json"), read_json(folder / "generation_config.json"))
    except configs.Unknown as refusal:
        from ..backends.transformers.load import open_foreign

        return open_foreign(folder, str(refusal))
    weights = Safetensors(find_safetensors(folder))
    return _fit(folder.resolve().name, folder, config, weights, Tokenizer.from_folder(folder))


def _only(ggufs: list[Path], folder: Path) -> Path:
    if len(ggufs) > 1:
        names = ", ".join(path.name for path in ggufs[:5])
        raise ModelError(f"{folder} has several GGUF files ({names}); give the path of one of them.")
    return ggufs[0]


def _no_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return f"{folder} holds an adapter, not a whole model; merge it into its base model and save that."
    return f"{folder} has no config.json, so it is not a model in Hugging Face layout; give {_CHOICES}."


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUF(path)
    try:
        config = configs.from_gguf(file)
        tokenizer = Tokenizer.from_gguf(file)
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # a value of another type than its key says
        raise ModelError(f"{path} is damaged ({error}); delete it and download it again.") from error
    return _fit(path.stem, path, config, GGUFWeights(file, config), tokenizer)


def _fit(name: str, path: Path, config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> Checkpoint:
    """The parts were read from different files: see that they belong to one model, and share what only one knows."""
    check(weights, config, path)
    if tokenizer.base_size > config.vocab_size:
        raise ModelError(
            f"The tokenizer of {path} has {tokenizer.base_size} tokens, but the model knows {config.vocab_size}; "
            "the files belong to different models, download them again."
        )
    ends = frozenset(i for i in config.eos_ids | tokenizer.eos_ids if i < config.vocab_size)
    tokenizer.eos_ids = ends
    bos = config.bos_id if tokenizer.bos_id is None else tokenizer.bos_id
    return Checkpoint(name, path, replace(config, eos_ids=ends, bos_id=bos), weights, tokenizer)
