"""Folders, and modules in memory, that transformers runs for us: what they are, and why it is so.

Promise: whatever transformers cannot do with a folder is one sentence. transformers is imported here and in the other
`hf` files only, when there is something for it to do.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, ModelError
from ...models.checkpoint import Checkpoint
from ...models.config import FAMILIES, ModelConfig, Unknown, from_hf
from .model import HFModel
from .tokenizer import adapt, folder_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_sequence_length", "max_seq_len")
_SOME_LENGTH = 2048  # of a model that counts no positions


@dataclass(frozen=True)
class Foreign:
    """In the place of weights: what transformers needs to load them, or the module that has them already."""

    folder: Path
    why: str
    module: Any = None

    def load(self, config: ModelConfig, dtype: str, device: torch.device) -> HFModel:
        module = self.module if self.module is not None else self._read(dtype, device)
        model: Any = HFModel(module, config, self.why, _starts(module))
        model.identity = lambda: identity(module)
        loaded: HFModel = model
        return loaded

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        raise ModelError(f"{self.why} What needs its weights one by one, training above all, cannot be done with it.")

    def has(self, name: str) -> bool:
        return False

    def _read(self, dtype: str, device: torch.device) -> Any:
        import transformers

        if dtype not in ("auto", *_DTYPES):
            raise ConfigError(f"{self.why} It has no form for {dtype} here; choose dtype float32 or bfloat16.")
        # On a CPU float32, which is an exact form of every file.
        local = {"local_files_only": True, "trust_remote_code": False}
        wanted = _DTYPES.get(dtype) or ("auto" if device.type == "cuda" else torch.float32)
        config = transformers.AutoConfig.from_pretrained(self.folder, **local)
        kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
        bars: Any = transformers.utils.logging
        shown = bars.is_progress_bar_enabled()
        try:
            if not sys.stderr.isatty():
                bars.disable_progress_bar()
            module: Any = kind.from_pretrained(self.folder, dtype=wanted, **local)
        except Exception as error:  # anything may be wrong with somebody's folder
            raise ModelError(f"transformers cannot load {self.folder}: {_first_line(error)}.") from error
        finally:
            if shown:
                bars.enable_progress_bar()
        return module.to(device)


def open_foreign(folder: Path, refusal: str) -> Checkpoint:
    """A folder whose architecture the built-in decoder does not know."""
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            f"{refusal} transformers may know it: pip install 'outrider[hf]', and it is used for such models."
        ) from error
    try:
        settings = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        sizes = shape(settings)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{refusal} Neither can transformers make sense of it: {_first_line(error)}.") from error
    tokenizer = folder_tokenizer(folder)
    why = f"transformers runs {folder.resolve().name}: the built-in decoder does not know '{settings.model_type}'."
    ends = sizes.eos_ids | frozenset(i for i in tokenizer.eos_ids if i < sizes.vocab_size)
    tokenizer.eos_ids = ends
    return Checkpoint(folder.resolve().name, folder, replace(sizes, eos_ids=ends), Foreign(folder, why), tokenizer)


def in_memory(module: Any, tokenizer: Any, backend: str = "auto") -> tuple[Checkpoint, str]:
    """A module that somebody has loaded, as a checkpoint, and a sentence about its weights.

    The built-in decoder packs weights for this machine, so it takes a copy of them; transformers shares them.
    """
    if backend not in ("auto", "outrider", "transformers"):
        raise ConfigError(f"There is no backend '{backend}'. Choose one of: auto, outrider, transformers.")
    ours = adapt(tokenizer)
    name = Path(str(getattr(module, "name_or_path", "") or type(module).__name__)).name
    why = f"transformers runs {name}, as was asked."
    if backend != "transformers":
        try:
            config = _with_ends(from_hf(module.config.to_dict()), module, ours)
            size = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20
            said = f"The built-in decoder runs {name} with packed weights of its own, a copy of {size:.0f} MB."
            return Checkpoint(name, Path(), config, Named(module), ours), said
        except Unknown as refusal:
            if backend == "outrider":
                raise
            kind = getattr(module.config, "model_type", "")
            why = f"transformers runs {name}: the built-in decoder does not know '{kind}'."
            why = why if kind not in FAMILIES else f"transformers runs {name}. {refusal}"
    config = _with_ends(shape(module.config), module, ours)
    return Checkpoint(name, Path(), config, Foreign(Path(), why, module), ours), f"{why} Its weights are shared."


class Named:
    """A module's weights under the names that the built-in decoder uses."""

    def __init__(self, module: Any) -> None:
        self.tensors: dict[str, Tensor] = module.state_dict()

    def has(self, name: str) -> bool:
        return self._full(name) in self.tensors

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.tensors[self._full(name)].detach().to("cpu", dtype)

    def _full(self, name: str) -> str:
        return name if name.startswith("lm_head") else f"model.{name}"


def shape(settings: Any) -> ModelConfig:
    """As much of a transformers configuration as everybody may ask for; the rest is transformers' own business."""
    text = settings.get_text_config(decoder=True)
    # From the whole configuration: in the decoder's part of it these names may have fallen back to their defaults.
    layers = getattr(settings, "decoder_layers", None) or getattr(settings, "num_decoder_layers", None)
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    hidden = int(text.hidden_size)
    length = next((int(n) for name in _LENGTHS if (n := getattr(text, name, None))), _SOME_LENGTH)
    return ModelConfig(
        architecture=str(settings.model_type),
        vocab_size=int(text.vocab_size),
        hidden_size=hidden,
        layers=int(layers or text.num_hidden_layers),
        heads=heads,
        kv_heads=heads,
        head_dim=max(hidden // heads // 2 * 2, 2),
        intermediate_size=int(getattr(text, "intermediate_size", None) or 4 * hidden),
        norm_eps=1e-6,
        rope_theta=1e4,
        context_length=length,
        tied=False,
        eos_ids=_ids(getattr(text, "eos_token_id", None)) | _ids(getattr(settings, "eos_token_id", None)),
        bos_id=next(iter(_ids(getattr(text, "bos_token_id", None))), None),
    )


def identity(module: Any) -> str:
    """16 hex digits of a model that transformers runs: its configuration and a few of its weights."""
    digest = hashlib.sha256(module.config.to_json_string(use_diff=False).encode())
    for name, weight in sorted(module.named_parameters())[::8]:
        few = weight.detach().flatten()[:16].to("cpu", torch.float32)
        digest.update(name.encode() + few.numpy().tobytes())
    return digest.hexdigest()[:16]


def _with_ends(config: ModelConfig, module: Any, tokenizer: Any) -> ModelConfig:
    """What ends a text may be said in three places."""
    settings = getattr(module, "generation_config", None)
    ends = config.eos_ids | tokenizer.eos_ids | _ids(getattr(settings, "eos_token_id", None))
    tokenizer.eos_ids = frozenset(i for i in ends if i < config.vocab_size)
    return replace(config, eos_ids=tokenizer.eos_ids)


def _starts(module: Any) -> tuple[int, ...]:
    """What a decoder's text begins with, where there is an encoder."""
    if not module.config.is_encoder_decoder:
        return ()
    places = (getattr(module, "generation_config", None), module.config)
    start = _named(places, ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    if start is None:
        raise ModelError(
            "The model does not say what its answers begin with: set decoder_start_token_id in its config."
        )
    forced = _named(places, ("forced_bos_token_id",))
    return (start,) if forced is None else (start, forced)


def _named(places: Iterable[Any], names: Iterable[str]) -> int | None:
    found = (getattr(place, name, None) for name in names for place in places)
    return next((value for value in found if isinstance(value, int)), None)


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list | tuple) else [value]
    return frozenset(v for v in values if isinstance(v, int) and v >= 0)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
