"""A model written as a folder in Hugging Face layout, whole or without some of its blocks.

Promise: `open_checkpoint`, transformers and every engine that reads such folders find the same function there: a GGUF
file's weights dequantised, its tokenizer and chat template beside them. A model of the kept layers computes what the
whole one computes when the other blocks do not run. This file knows names, shapes and files; it computes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ModelError
from .config import ModelConfig, to_hf
from .rope import RopeScaling
from .weights import Weights, expected

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

SHARD_BYTES = 4 << 30
_ATTENTION_OUT, _MLP_OUT = "self_attn.o_proj", "mlp.down_proj"


class Source(Protocol):
    """Tensors by name."""

    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def has(self, name: str) -> bool: ...


# ------------------------------------------------------------ the configuration


def hf_config(c: ModelConfig) -> dict[str, Any]:
    """What `models.config.from_hf` reads back as the same configuration."""
    names = {"smollm3": "SmolLM3", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "llama": "Llama"}
    found: dict[str, Any] = {
        "architectures": [f"{names[c.architecture]}ForCausalLM"],
        "model_type": c.architecture,
        "tie_word_embeddings": c.tied,
        "attention_bias": c.o_bias,
        "bos_token_id": c.bos_id,
        "eos_token_id": sorted(c.eos_ids),
    } | to_hf(c)
    if c.rotary_dim != c.head_dim:
        found["partial_rotary_factor"] = c.rotary_dim / c.head_dim
    if c.no_rope_layers:
        found["no_rope_layers"] = [int(i not in c.no_rope_layers) for i in range(c.layers)]
    if c.window_layers:
        kinds = ["sliding_attention" if i in c.window_layers else "full_attention" for i in range(c.layers)]
        found |= {"sliding_window": c.sliding_window, "use_sliding_window": True, "layer_types": kinds}
    if c.rope_scaling is not None:
        found["rope_scaling"] = _scaling(c.rope_scaling)
    return found


def _scaling(s: RopeScaling) -> dict[str, Any]:
    if s.kind == "factors":
        raise ModelError(
            "The target's rope is stretched by a table that only GGUF files have, so no Hugging Face folder can be "
            "made from it; give the target in Hugging Face layout, or train --kind eagle3."
        )
    common = {"rope_type": s.kind, "factor": s.factor}
    if s.kind == "linear":
        return common
    common |= {"original_max_position_embeddings": s.original_context}
    if s.kind == "llama3":
        return common | {"low_freq_factor": s.low_freq_factor, "high_freq_factor": s.high_freq_factor}
    own = {"beta_fast": s.beta_fast, "beta_slow": s.beta_slow, "truncate": s.truncate}
    return common | own | {"attention_factor": s.attention_factor}


def cut_config(config: ModelConfig, chosen: list[int]) -> ModelConfig:
    """The configuration of these layers alone."""
    places = list(enumerate(chosen))
    windows = frozenset(new for new, old in places if old in config.window_layers)
    return replace(
        config,
        layers=len(chosen),
        no_rope_layers=frozenset(new for new, old in places if old in config.no_rope_layers),
        window_layers=windows,
        sliding_window=config.sliding_window if windows else 0,
    )


# ------------------------------------------------------------ a part of a model


class Kept:
    """The weights of some layers under a smaller model's names; a block that is left out alone writes zeros.

    A layer adds the outputs of its attention and of its MLP to the stream, and each ends in one product: with that
    product's weights at zero, and its bias, the block adds nothing, which is what leaving it out means.
    """

    def __init__(
        self, source: Source, layers: list[int], no_attention: Iterable[int] = (), no_mlp: Iterable[int] = ()
    ) -> None:
        self.source, self.layers = source, layers
        self._silent = {_ATTENTION_OUT: frozenset(no_attention), _MLP_OUT: frozenset(no_mlp)}

    def origin(self, name: str) -> str:
        """What a tensor of the small model is called in the whole one."""
        if not name.startswith("layers."):
            return name
        _, layer, rest = name.split(".", 2)
        return f"layers.{self.layers[int(layer)]}.{rest}"

    def silent(self, name: str) -> bool:
        """Whether a tensor is all zeros because its block does not run."""
        if not name.startswith("layers."):
            return False
        _, layer, rest = name.split(".", 2)
        return self.layers[int(layer)] in self._silent.get(rest.rpartition(".")[0], ())

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        found = self.source.get(self.origin(name), dtype).clone()  # never the target's own memory
        return torch.zeros_like(found) if self.silent(name) else found

    def has(self, name: str) -> bool:
        return self.source.has(self.origin(name))


def kept_layers(
    config: ModelConfig, source: Source, skip_attention: Iterable[int], skip_mlp: Iterable[int]
) -> tuple[ModelConfig, Kept]:
    """The model that is left when these blocks do not run; a layer without any block is not in it."""
    attention, mlp = frozenset(skip_attention), frozenset(skip_mlp)
    for number in attention | mlp:
        if not 0 <= number < config.layers:
            raise ModelError(f"Layer {number} cannot be skipped: the target's layers are 0 to {config.layers - 1}.")
    layers = [i for i in range(config.layers) if i not in attention & mlp]
    if not layers:
        raise ModelError("A model without any layer cannot be written; skip fewer of them.")
    return cut_config(config, layers), Kept(source, layers, attention, mlp)


# ------------------------------------------------------------ the folder


def write_folder(
    folder: Path,
    config: ModelConfig,
    source: Source | Weights,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    card: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Weights, tokenizer, then the configuration: a folder that has one is complete."""
    settings = hf_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}  # refused before hours of copying
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, config, source, dtype, shard_bytes)
    tokenizer.save(folder)
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")
    generation = {"bos_token_id": config.bos_id, "eos_token_id": sorted(config.eos_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: Path, config: ModelConfig, source: Source, dtype: torch.dtype, most: int) -> None:
    """One file, or several and an index: never more than one of them in memory."""
    shards = _shards(config, dtype.itemsize, most)
    where: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {_outer(name): source.get(name, dtype).cpu().contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors writes for the owner alone, and folders like these are passed on
        where |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(config: ModelConfig, item: int, most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, shape in expected(config).items():
        size = item * torch.Size(shape).numel()
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _outer(name: str) -> str:
    """The name that a tensor has in a file."""
    return name if name.startswith("lm_head") else f"model.{name}"
