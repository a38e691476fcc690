"""A checkpoint's own layer that predicts further tokens (multi-token prediction, MTP), beside the layers of the target.

It reads the state after the target's last norm and the embedding of the token that followed, each after a norm of its
own; a product joins both, one more block of the target follows, and a last norm. Embedding and output matrix are the
target's. Promise: `find_mtp` reads names only; `MtpLayer.problem` names a missing or misshapen tensor, and
`check` raises that sentence. It knows names and shapes of DeepSeek-V3's, GLM-4.5's and MiMo's files, not what a block
computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ModelError
from .config import ModelConfig
from .weights import FamilyWeights, LayerSubset, Weights, adapted, cut_config, expected


@dataclass(frozen=True)
class Layout:
    """How a publisher names what is around the block, which has the names of a layer behind the target's last one."""

    format: str  # for people
    at: str  # what all names begin with; {} is the number of the target's layers
    parts: tuple[str, str, str, str]  # the norms of the embedding and of the state, the product, the last norm
    state_first: bool  # in what the product reads


_LAYOUTS = (
    Layout("DeepSeek's and GLM's layout", "layers.{}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), False),
    Layout(
        "MiMo's layout", "mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), True,
    ),
)  # fmt: skip


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
class MtpLayer:
    """The first such layer of a checkpoint; published checkpoints have one."""

    layout: Layout
    config: ModelConfig  # of a model with this block only
    block: Any  # the block's weights, as those of layer 0
    _named: Any  # the same under the numbers of the whole model
    _stored: Any  # every tensor as the file names it
    _layers: int  # of the target

    def own(self, part: int, dtype: torch.dtype) -> Tensor:
        """What is around the block, by its place in `Layout.parts`: norms [H], the product [H, 2 H]."""
        tensor: Tensor = self._stored.get(self._name(part), dtype)
        return tensor

    def _name(self, part: int) -> str:
        return f"{self.layout.at.format(self._layers)}{self.layout.parts[part]}.weight"

    def check(self) -> None:
        """Raise for a missing tensor or one of another shape."""
        if problem := self.problem():
            raise ModelError(problem)

    def problem(self) -> str:
        """Why it cannot be used, in a sentence; empty: it can."""
        h, deep = self.config.hidden_size, f"layers.{self._layers}."
        around = {self._name(i): (h, 2 * h) if i == 2 else (h,) for i in range(4)}
        block = {deep + n.removeprefix("layers.0."): s for n, s in expected(self.config).items() if "layers.0." in n}
        for source, shapes in ((self._stored, around), (self._named, block)):
            for name, shape in shapes.items():
                has = source.shape(name) if source.has(name) else None
                if has != shape:
                    what = "is missing" if has is None else f"has the shape {list(has)} instead of {list(shape)}"
                    return (
                        f"The checkpoint's layer for further tokens (MTP) cannot be used: its tensor '{name}' {what}; "
                        "download the model again, or choose another drafter."
                    )
        return ""


def find_mtp(weights: Any, config: ModelConfig) -> MtpLayer | None:
    """The layer in a checkpoint's weights; None: it has none."""
    stored = weights.source if isinstance(weights, FamilyWeights) else weights
    if not hasattr(stored, "names") or config.encoder is not None:
        return None
    names, deep = stored.names(), f"layers.{config.layers}."
    for layout in _LAYOUTS:
        at = layout.at.format(config.layers)
        if f"{at}{layout.parts[2]}.weight" not in names:
            continue
        deeper = replace(config, layers=config.layers + 1)
        source = stored if at == deep else _AsLayer(stored, at, deep)
        named = adapted(source, deeper, in_gguf=getattr(weights, "in_gguf", False))
        alone = [config.layers]
        return MtpLayer(layout, cut_config(deeper, alone), LayerSubset(named, alone), named, stored, config.layers)
    return None
