"""Write a model as a folder in Hugging Face layout, whole or without some of its blocks.

Promise: `open_checkpoint`, transformers and other engines read the same function from the folder: a GGUF file's weights
dequantised, with its tokenizer and chat template. A model of the remaining layers computes what the whole model
computes when the skipped blocks do not run. It knows names, shapes and files; it computes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ModelError
from .config import ModelConfig, hf_config
from .weights import expected, stored_name

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

SHARD_BYTES = 4 << 30
_ATTENTION_OUT, _MLP_OUT = "self_attn.o_proj", "mlp.down_proj"


class Source(Protocol):
    """Tensors by name."""

    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def has(self, name: str) -> bool: ...


def cut_config(config: ModelConfig, chosen: list[int]) -> ModelConfig:
    """The configuration of a model that has only these layers."""
    pairs = list(enumerate(chosen))
    windows = frozenset(new for new, old in pairs if old in config.window_layers)
    return replace(
        config,
        layers=len(chosen),
        no_rope_layers=frozenset(new for new, old in pairs if old in config.no_rope_layers),
        window_layers=windows,
        sliding_window=config.sliding_window if windows else 0,
    )


class LayerSubset:
    """The weights of some layers under a smaller model's names; a skipped block of a remaining layer becomes zeros.

    A layer adds the outputs of its attention and of its MLP to the residual stream, and each ends in one product. With
    that product's weight and bias at zero, the block adds nothing, as if it were skipped.
    """

    def __init__(
        self, source: Source, layers: list[int], no_attention: Iterable[int] = (), no_mlp: Iterable[int] = ()
    ) -> None:
        self.source, self.layers = source, layers
        self._zeroed = {_ATTENTION_OUT: frozenset(no_attention), _MLP_OUT: frozenset(no_mlp)}

    def origin(self, name: str) -> str:
        """The name in the whole model of a tensor of the smaller one."""
        if not name.startswith("layers."):
            return name
        _, layer, rest = name.split(".", 2)
        return f"layers.{self.layers[int(layer)]}.{rest}"

    def zeroed(self, name: str) -> bool:
        """Whether a tensor is all zeros because its block is skipped."""
        if not name.startswith("layers."):
            return False
        _, layer, rest = name.split(".", 2)
        return self.layers[int(layer)] in self._zeroed.get(rest.rpartition(".")[0], ())

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self.source.get(self.origin(name), dtype).clone()  # never the target's own memory
        return torch.zeros_like(tensor) if self.zeroed(name) else tensor

    def has(self, name: str) -> bool:
        return self.source.has(self.origin(name))


def kept_layers(
    config: ModelConfig, source: Source, skip_attention: Iterable[int], skip_mlp: Iterable[int]
) -> tuple[ModelConfig, LayerSubset]:
    """The model without these blocks; a layer that loses both blocks is dropped."""
    attention, mlp = frozenset(skip_attention), frozenset(skip_mlp)
    for number in attention | mlp:
        if not 0 <= number < config.layers:
            raise ModelError(f"Layer {number} cannot be skipped: the target's layers are 0 to {config.layers - 1}.")
    layers = [i for i in range(config.layers) if i not in attention & mlp]
    if not layers:
        raise ModelError("A model without any layer cannot be written; skip fewer of them.")
    return cut_config(config, layers), LayerSubset(source, layers, attention, mlp)


def write_folder(
    folder: Path,
    config: ModelConfig,
    source: Source,
    tokenizer: Tokenizer,
    dtype: torch.dtype,
    card: str = "",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights and tokenizer, then config.json: a folder that has one is complete."""
    settings = hf_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}  # raises before the long copy
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, config, source, dtype, shard_bytes)
    tokenizer.save(folder)
    if card:
        (folder / "README.md").write_text(card, encoding="utf-8")
    generation = {"bos_token_id": config.bos_id, "eos_token_id": sorted(config.eos_ids)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _write_weights(folder: Path, config: ModelConfig, source: Source, dtype: torch.dtype, most: int) -> None:
    """Write one file, or several and an index; at most one of them is in memory."""
    shards = _shards(config, dtype.itemsize, most)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {stored_name(name): source.get(name, dtype).cpu().contiguous() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors makes files readable by their owner only
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(config: ModelConfig, item_bytes: int, most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in expected(config).items():
        tensor_bytes = item_bytes * torch.Size(shape).numel()
        if shards[-1] and size + tensor_bytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor_bytes
    return shards
