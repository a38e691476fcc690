"""From a model's name, path or transformers module to its configuration, weights and tokenizer.

Promise: what `open_checkpoint` returns is complete and fits together; whatever is missing or wrong is a ModelError,
before any weight is used. It knows where models are; it does not know how they run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import MISREAD, ConfigError, ModelError
from .config import FAMILIES, QUANTISED, ModelConfig, UnsupportedModel, token_ids
from .encoder_decoder import ENCODER_DECODERS, folder_tensors, model_config, named_weights
from .fetch import HUB_NAME, default_model, hub_model
from .foreign import ForeignWeights, SourceTokenizer, adapt_tokenizer, foreign_config, open_foreign, open_tokenizer
from .gguf_file import GGUF, GGUFWeights, gguf_config, t5_in_hf_words
from .marian import open_marian
from .pieces import gguf_pieces
from .published import is_head
from .quantised import QuantisedWeights
from .tokenizer import Tokenizer, read_json
from .weights import InMemory, Weights, adapted, check

DEFAULT = "smollm2"
_CHOICES = f"'{DEFAULT}' (the default), a folder in Hugging Face layout, a .gguf file, or a hub name like owner/name"


@dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded."""

    name: str
    path: Path
    config: ModelConfig
    weights: Any  # `Weights`, or `ForeignWeights` if transformers runs the model
    tokenizer: Any  # `Tokenizer`, or a `SlowTokenizer`, which has the same interface


def open_checkpoint(model: str | Path | Checkpoint | None = None) -> Checkpoint:
    """Find and open a model; its weights are read later, one tensor at a time. A `Checkpoint` is returned unchanged."""
    if isinstance(model, Checkpoint):
        return model
    if model is None or str(model).lower() == DEFAULT:
        return _open_gguf(default_model())
    path = Path(model).expanduser()
    if path.exists():
        return _open_path(path)
    if _looks_like_path(str(model)):
        raise ModelError(f"There is no file or folder {model}; give {_CHOICES}.")
    if HUB_NAME.fullmatch(str(model)):
        return replace(_open_path(_hub_folder(str(model))), name=str(model))
    raise ModelError(f"There is no model '{model}'; give {_CHOICES}.")


def _hub_folder(name: str) -> Path:
    """With pickled weights only where they can be read: many encoder–decoders are published with no others."""
    folder = hub_model(name)
    pickled = read_json(folder / "config.json").get("model_type") in ENCODER_DECODERS
    return hub_model(name, pickles=True) if pickled and not next(folder.glob("*.safetensors"), None) else folder


def _looks_like_path(name: str) -> bool:
    explicit = name.startswith((".", "~", os.sep)) or Path(name).is_absolute() or "\\" in name
    return explicit or name.partition("@")[0].count("/") > 1 or name.lower().endswith((".gguf", ".safetensors"))


def _open_path(path: Path) -> Checkpoint:
    try:
        return _open_model(path)
    except ModelError as error:
        if is_head(path):
            hint = f"use it beside its target, with --drafter head --set head={path}"
            raise ModelError(f"{path} is a trained head, not a whole model: {hint}.") from error
        raise


def _open_model(path: Path) -> Checkpoint:
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
        if len(ggufs) > 1:
            names = ", ".join(path.name for path in ggufs[:5])
            raise ModelError(f"{folder} has several GGUF files ({names}); give the path of one of them.")
        return _open_gguf(ggufs[0])
    if (folder / "adapter_config.json").is_file() and not has_config:
        raise ModelError(f"{folder} holds an adapter, not a whole model; merge it into its base model and save that.")
    if not has_config:
        raise ModelError(f"{folder} has no config.json, so it is not in Hugging Face layout; give {_CHOICES}.")
    data = read_json(folder / "config.json")
    try:
        config = model_config(data, read_json(folder / "generation_config.json"))
    except UnsupportedModel as refusal:
        return Checkpoint(folder.resolve().name, folder, *open_foreign(folder, str(refusal)))
    stored, settings = folder_tensors(folder, config), data.get("quantization_config") or {}
    if settings.get("quant_method") in QUANTISED:
        stored = QuantisedWeights(stored, settings, folder)
    weights = named_weights(stored, config)
    tokenizer = Tokenizer.from_folder(folder) if config.encoder is None else _source_tokenizer(folder)
    return _checked(folder.resolve().name, folder, config, weights, tokenizer)


def _source_tokenizer(folder: Path) -> Any:
    """Of an encoder–decoder: Marian's from its own files, transformers', or, without transformers, tokenizer.json."""
    if tokenizer := open_marian(folder):
        return tokenizer
    try:
        return open_tokenizer(folder)
    except ImportError:
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json, and transformers, which may read its tokenizer, is not installed: "
                "pip install -e '.[hf]' in a clone."
            ) from None
        return SourceTokenizer.from_folder(folder)


def _open_gguf(path: Path) -> Checkpoint:
    file = GGUF(path)
    t5 = file.metadata.get("general.architecture") == "t5"
    try:
        config = model_config(t5_in_hf_words(file)) if t5 else gguf_config(file)
        tokenizer = gguf_pieces(file.metadata) if t5 else Tokenizer.from_gguf(file)
    except MISREAD as error:
        raise ModelError(f"{path} is damaged ({error}); delete it and download it again.") from error
    file.forget_vocabulary()
    weights = GGUFWeights(file, config)
    named = weights if config.encoder is not None else adapted(weights, config, in_gguf=True)
    return _checked(path.stem, path, config, named, tokenizer)


def _checked(name: str, path: Path, config: ModelConfig, weights: Weights, tokenizer: Tokenizer) -> Checkpoint:
    """Check that parts from different files belong to one model; join what they say about BOS and end tokens."""
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


def in_memory(module: Any, tokenizer: Any, backend: str = "auto") -> tuple[Checkpoint, str]:
    """A loaded transformers module as a checkpoint, and a sentence on how its weights are used.

    The built-in decoder packs weights for this machine, so it copies them; transformers shares them.
    """
    if backend not in ("auto", "outrider", "transformers"):
        raise ConfigError(f"There is no backend '{backend}'. Choose one of: auto, outrider, transformers.")
    tokenizer = adapt_tokenizer(tokenizer)
    name = Path(str(getattr(module, "name_or_path", "") or type(module).__name__)).name
    reason = f"transformers runs {name}, as requested."
    if backend != "transformers":
        try:
            given, settings = module.config.to_dict(), getattr(module, "generation_config", None)
            if given.get("quantization_config"):
                raise UnsupportedModel("Its weights are quantised in memory, by transformers' own classes.")
            read = model_config(given, settings.to_dict() if settings is not None else None)
            config = _with_eos_ids(read, module, tokenizer)
            size = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20
            use = f"The built-in decoder runs {name} with packed weights of its own, a copy of {size:.0f} MB."
            weights = named_weights(InMemory(module.state_dict()), config)
            return Checkpoint(name, Path(), config, weights, tokenizer), use
        except UnsupportedModel as refusal:
            if backend == "outrider":
                raise
            kind = getattr(module.config, "model_type", "")
            unknown = f"transformers runs {name}: the built-in decoder does not know '{kind}'."
            reason = f"transformers runs {name}. {refusal}" if kind in (*FAMILIES, *ENCODER_DECODERS) else unknown
    config = _with_eos_ids(foreign_config(module.config), module, tokenizer)
    shared = ForeignWeights(Path(), reason, module)
    return Checkpoint(name, Path(), config, shared, tokenizer), f"{reason} Its weights are shared."


def _with_eos_ids(config: ModelConfig, module: Any, tokenizer: Any) -> ModelConfig:
    """Join the end tokens of configuration, generation settings and tokenizer, for configuration and tokenizer."""
    settings = getattr(module, "generation_config", None)
    ends = config.eos_ids | tokenizer.eos_ids | token_ids(getattr(settings, "eos_token_id", None))
    tokenizer.eos_ids = frozenset(i for i in ends if i < config.vocab_size)
    return replace(config, eos_ids=tokenizer.eos_ids)
