"""A checkpoint's own layer that predicts further tokens (multi-token prediction, MTP), beside the layers of the target.

It reads the state after the target's last norm and the embedding of the token that followed, each after a norm of its
own; a product joins both, one more block of the target follows, and a last norm. Embedding and output matrix are the
target's. Promise: `stored_mtp` and `find_mtp` read names only; `MtpLayer.problem` names a missing or misshapen tensor,
and `check` raises that sentence. It knows names and shapes of DeepSeek-V3's, GLM-4.5's, MiMo's and Qwen3-Next's files
and of speculators', not what a block computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from .config import ModelConfig
from .foreign import ForeignWeights
from .weights import FamilyWeights, LayerSubset, Safetensors, Weights, adapted, cut_config, expected, find_safetensors

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """How a publisher names what is around the block, which has the names of a layer behind the target's last one."""

    format: str  # for people
    at: str  # what all names begin with; {} is the number of the target's layers
    parts: tuple[str, str, str, str]  # the norms of the embedding and of the state, the product, the last norm
    state_first: bool  # in what the product reads
    each: str  # what the names of every such layer begin with; {} is the number of that layer
    block: str = ""  # what the block's names begin with after `at`
    gain: float = 0.0  # what norms add to their weights


_DEEPSEEK = Layout(
    "DeepSeek's and GLM's layout", "layers.{}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), False,
    "layers.{}.",
)  # fmt: skip
_QWEN = Layout(
    "Qwen3-Next's layout", "mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), False,
    "mtp.layers.{}.", block="layers.0.", gain=1.0,
)  # fmt: skip
_LAYOUTS = (
    _DEEPSEEK,
    Layout(
        "MiMo's layout", "mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), True, "mtp_layers.{}.",
    ),
)  # fmt: skip
SPECULATORS = Layout(  # Qwen3-Next's, trained further, in a folder of its own
    "the speculators format", "mtp_layers.0.",
    ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), False, "mtp_layers.{}.", gain=1.0,
)  # fmt: skip
FOREIGN = {"deepseek_v3": _DEEPSEEK, "qwen3_next": _QWEN}  # of families that transformers runs


class _AsLayer(Weights):
    """Tensors under a prefix as those of one more layer."""

    def __init__(self, source: Any, prefix: str, layer: str) -> None:
        moved = {name: layer + name.removeprefix(prefix) for name in source.names() if name.startswith(prefix)}
        self.source, self._stored = source, {new: old for old, new in moved.items()}

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.source.shape(self._stored[name])
        return shape

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor: Tensor = self.source.get(self._stored[name], dtype)
        return tensor


@dataclass(frozen=True)
class StoredMtp:
    """The first such layer of a checkpoint, as its files have it; published checkpoints have one."""

    layout: Layout
    tensors: Any  # every tensor as the file names it
    layers: int  # of the target

    def name(self, part: int) -> str:
        """Of what is around the block, by its place in `Layout.parts`."""
        return f"{self.at}{self.layout.parts[part]}.weight"

    @property
    def at(self) -> str:
        return self.layout.at.format(self.layers)

    def count(self) -> int:
        """Such layers in the files."""
        names, first = self.tensors.names(), self.layers if "{}" in self.layout.at else 0
        starts = (self.layout.each.format(first + i) for i in count())
        return next(i for i, start in enumerate(starts) if not any(name.startswith(start) for name in names))


@dataclass(frozen=True)
class MtpLayer(ABC):
    """Such a layer beside a target that runs."""

    stored: StoredMtp
    config: ModelConfig  # of a model with this block only

    @property
    def layout(self) -> Layout:
        return self.stored.layout

    def own(self, part: int, dtype: torch.dtype) -> Tensor:
        """What is around the block, by its place in `Layout.parts`: gains of norms [H], the product [H, 2 H]."""
        tensor: Tensor = self.stored.tensors.get(self.stored.name(part), dtype)
        return tensor if part == 2 else tensor + self.layout.gain

    @abstractmethod
    def block_shapes(self) -> tuple[Any, Shapes]:
        """The block's tensors, and the shapes that they must have."""

    def check(self) -> None:
        """Raise for a missing tensor or one of another shape."""
        if problem := self.problem():
            raise ModelError(problem)

    def problem(self) -> str:
        """Why it cannot be used, in a sentence; empty: it can."""
        return (wrong := self.wrong()) and (
            f"The checkpoint's layer for further tokens (MTP) cannot be used: {wrong}; download the model again, or "
            "choose another drafter."
        )

    def wrong(self) -> str:
        """The first tensor that is missing or has another shape; empty: all fit."""
        h = self.config.hidden_size
        around = {self.stored.name(i): (h, 2 * h) if i == 2 else (h,) for i in range(4)}
        for source, shapes in ((self.stored.tensors, around), self.block_shapes()):
            for name, shape in shapes.items():
                has = tuple(source.shape(name)) if source.has(name) else None
                if has != shape:
                    what = "is missing" if has is None else f"has the shape {list(has)} instead of {list(shape)}"
                    return f"its tensor '{name}' {what}"
        return ""


@dataclass(frozen=True)
class BuiltInMtpLayer(MtpLayer):
    """Its block is one of the built-in decoder's."""

    block: Any  # the block's weights, as those of layer 0
    _named: Any  # the same under the numbers of the whole model

    def block_shapes(self) -> tuple[Any, Shapes]:
        deep = f"layers.{self.stored.layers}."
        needed = {deep + n.removeprefix("layers.0."): s for n, s in expected(self.config).items() if "layers.0." in n}
        return self._named, needed


def stored_mtp(weights: Any, config: ModelConfig) -> StoredMtp | None:
    """The layer in a checkpoint's weights, whoever runs the target; None: it has none whose layout is known."""
    if isinstance(weights, ForeignWeights):
        layouts: tuple[Layout, ...] = (FOREIGN[config.architecture],) if config.architecture in FOREIGN else ()
        stored: Any = _folder_tensors(weights) if layouts else None
    else:
        layouts, stored = _LAYOUTS, weights.source if isinstance(weights, FamilyWeights) else weights
    if not hasattr(stored, "names") or config.encoder is not None:
        return None
    found = (StoredMtp(layout, stored, config.layers) for layout in layouts)
    if isinstance(weights, ForeignWeights):  # there any part of it is enough, so that a missing one can be named
        return next((layer for layer in found if layer.count()), None)
    return next((layer for layer in found if layer.name(2) in stored.names()), None)


def _folder_tensors(weights: ForeignWeights) -> Safetensors | None:
    """The tensors of a folder that transformers loads; None: they are pickled, or only in memory."""
    if weights.module is not None:
        return None
    try:
        return Safetensors(find_safetensors(weights.folder))
    except ModelError:
        return None


def find_mtp(weights: Any, config: ModelConfig) -> BuiltInMtpLayer | None:
    """The layer of a checkpoint that the built-in decoder runs; None: it has none."""
    layer = stored_mtp(weights, config)
    if layer is None or isinstance(weights, ForeignWeights):
        return None
    deep, deeper = f"layers.{config.layers}.", replace(config, layers=config.layers + 1)
    source = layer.tensors if layer.at == deep else _AsLayer(layer.tensors, layer.at, deep)
    named = adapted(source, deeper, in_gguf=getattr(weights, "in_gguf", False))
    alone = [config.layers]
    return BuiltInMtpLayer(layer, cut_config(deeper, alone), LayerSubset(named, alone), named)
