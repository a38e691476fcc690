"""Weights by name, one tensor at a time, from safetensors files.

Promise: a `Weights` gives a tensor under its Hugging Face name without the leading `model.`, whatever file it comes
from; files are memory-mapped, and no pickle is ever opened. `check` raises a ModelError for what does not fit the
configuration. It knows names and shapes; it does not know what a layer computes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelError
from .config import ModelConfig

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Weights(ABC):
    """A lazy mapping from names such as `layers.3.mlp.gate_proj.weight` to tensors."""

    @abstractmethod
    def names(self) -> frozenset[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def get(self, name: str, dtype: torch.dtype) -> Tensor: ...

    def has(self, name: str) -> bool:
        return name in self.names()


def stored_name(name: str) -> str:
    """The name of a tensor in a Hugging Face file."""
    return name if name.startswith("lm_head") else f"model.{name}"


def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this shape has, with its shape."""
    shapes = {"embed_tokens.weight": (config.vocab_size, config.hidden_size), "norm.weight": (config.hidden_size,)}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for i in range(config.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer(config).items()}
    return shapes


def _layer(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    rows = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{n}.weight": (r, c.hidden_size) for n, r in rows.items()}
    shapes |= {f"self_attn.{n}.bias": (r,) for n, r in rows.items() if c.qkv_bias}
    shapes["self_attn.o_proj.weight"] = (c.hidden_size, q)
    if c.o_bias:
        shapes["self_attn.o_proj.bias"] = (c.hidden_size,)
    if c.qk_norm:
        shapes |= {f"self_attn.{n}.weight": (c.head_dim,) for n in ("q_norm", "k_norm")}
    shapes |= {f"{n}.weight": (c.hidden_size,) for n in ("input_layernorm", "post_attention_layernorm")}
    shapes |= {f"mlp.{n}.weight": (c.intermediate_size, c.hidden_size) for n in ("gate_proj", "up_proj")}
    shapes["mlp.down_proj.weight"] = (c.hidden_size, c.intermediate_size)
    return shapes


def check(weights: Weights, config: ModelConfig, path: Path) -> None:
    """Raise a ModelError for a missing tensor or one of another shape."""
    shapes = expected(config)
    missing = sorted(shapes.keys() - weights.names())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{path} has no tensor '{missing[0]}'{more}, which its configuration asks for; download the model again."
        )
    for name, shape in shapes.items():
        if weights.shape(name) != shape:
            raise ModelError(
                f"In {path} the tensor '{name}' has the shape {list(weights.shape(name))} where the configuration "
                f"asks for {list(shape)}; the files belong to different models, download them again."
            )


class Safetensors(Weights):
    """One or many safetensors files, memory-mapped as long as this object lives."""

    def __init__(self, files: list[Path]) -> None:
        self._entries: dict[str, tuple[Any, str]] = {}  # name -> (open file, the name in that file)
        for path in files:
            handle = _open(path)
            self._entries |= {name.removeprefix("model."): (handle, name) for name in handle.keys()}  # noqa: SIM118

    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def has(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        handle, stored = self._entries[name]
        return tuple(handle.get_slice(stored).get_shape())

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        handle, stored = self._entries[name]
        tensor: Tensor = handle.get_tensor(stored)
        return tensor.to(dtype)


def _open(path: Path) -> Any:
    """safetensors checks the header and that the file is exactly as long as the header says."""
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; download the model again.") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{path} is incomplete or damaged and cannot be read ({error}); delete it and download it again."
        ) from error


def find_safetensors(folder: Path) -> list[Path]:
    """The files of a folder in Hugging Face layout: by its index, or the single file, or all there are."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return _indexed(index)
    if single.is_file():
        return [single]
    # Some folders also hold Mistral's own format, with other names for the same tensors.
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter")))
    if files:
        return files
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise ModelError(
            f"{folder} has weights only as pickle files (.bin or .pt), which can run code and are never loaded; "
            "convert them to safetensors, for example with transformers' save_pretrained."
        )
    raise ModelError(f"{folder} has no .safetensors file; download the model's weights into it.")


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} cannot be read ({error}); delete it and download it again.") from error
    for name in names:
        if Path(name).name != name:  # no path out of the folder
            raise ModelError(f"{index} names '{name}', which is not a file of its own folder; download it again.")
    return [index.parent / name for name in names]
