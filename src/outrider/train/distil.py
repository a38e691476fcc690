"""A standalone small model: a few layers of the target, taught to say what the whole of it says.

Promise: what is written is a folder in Hugging Face layout with the target's own tokenizer, which every engine can use
as a plain draft model. It knows layers and files; steps are the loop's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backends.transformer import WeightSource
from ..errors import ModelError
from ..models.config import ModelConfig
from ..models.weights import LayerSubset, cut_config, write_folder
from .batches import Batch
from .features import TargetNet
from .objectives import Student, diagonal, spread
from .teacher import Teacher, divergence, listen, repeat

if TYPE_CHECKING:
    from ..models.tokenizer import Tokenizer


class Distilled(Student):
    """A small model under the target's eye. Its logits at p+1 speak about t_{p+2}, as a head's row p does."""

    net: TargetNet

    def __init__(self, net: TargetNet, target: TargetNet, k: int, soft: bool = True) -> None:
        self.net, self.target, self.k, self.soft = net, target, k, soft

    def importance(self, position: int) -> float:
        return 1.0

    def losses(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        with torch.no_grad():
            teacher = self._teacher(batch)
        found = divergence(teacher, self._logits(self.net, batch))
        return [(found, torch.ones_like(found))]

    def _teacher(self, batch: Batch) -> Teacher:
        return listen(self._logits(self.target, batch)) if self.soft else repeat(_said(batch))

    @torch.no_grad()
    def hits(self, batch: Batch) -> Tensor:
        right = spread(self._logits(self.net, batch).argmax(-1) == _said(batch), batch)
        return diagonal([right] * self.k, batch)

    def _logits(self, net: TargetNet, batch: Batch) -> Tensor:
        """[M, V]"""
        return net.logits(net(batch.tokens)[1][:, 1:].flatten(0, 1)[batch.rows])


def _said(batch: Batch) -> Tensor:
    """[M] t_{p+2}"""
    return batch.tokens[:, 1:].roll(-1, 1).flatten()[batch.rows]


def cut_from(
    config: ModelConfig, weights: WeightSource, layers: int, train_embedding: bool, device: torch.device | str
) -> TargetNet:
    """`layers` of the target's layers, evenly chosen, first and last among them; float32, to be trained.

    The embedding, and a head of its own, stay as they are unless `train_embedding`: they are most of a small model.
    """
    if not 1 <= layers <= config.layers:
        raise ModelError(f"--layers is {layers}, but the target has {config.layers}.")
    chosen = chosen_layers(config.layers, layers)
    small = cut_config(config, chosen)
    net = TargetNet.load(small, LayerSubset(weights, chosen), torch.float32, device).requires_grad_(True)
    net.embed_tokens.requires_grad_(train_embedding)
    if net.lm_head is not None:
        net.lm_head.requires_grad_(train_embedding)
    return net


def chosen_layers(whole: int, layers: int) -> list[int]:
    """The last one alone, or evenly from the first to the last."""
    return [round(i * (whole - 1) / (layers - 1)) for i in range(layers)] if layers > 1 else [whole - 1]


# ---------------------------------------------------------------- the folder


def write_model(folder: Path, net: TargetNet, tokenizer: Tokenizer, card: str, dtype: torch.dtype) -> None:
    """As every engine reads it."""
    write_folder(folder, net.config, _Trained(net.state_dict()), tokenizer, dtype, card)


class _Trained:
    """A network's tensors by name."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def get(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.tensors[name].detach().to("cpu", dtype)

    def has(self, name: str) -> bool:
        return name in self.tensors
