"""The target's output as a table: rows of words and the norm before them, whatever form its weights have.

It knows how models keep their last product; it does not know what the rows are wanted for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .linear import summed

_BASIS = 256  # unit vectors of one product


def output_rows(target: Any, ids: Tensor) -> Tensor:
    """The output's rows of these words [D, H], as floats on the target's device. ids [D]"""
    if target.config.tied:
        return embedding_of(target)[ids.to(embedding_of(target).device)]
    if hasattr(target, "head"):
        return product_rows(target.head, target.config.hidden_size, target.compute, target.device, ids)
    from .cpu import quantise as quant
    from .cpu.int8 import _Product

    return product_rows(
        _Product.of(quant.product(target.tensors, "head", target.config)),
        target.config.hidden_size, torch.float32, target.device, ids,
    )  # fmt: skip


def product_rows(product: Any, hidden: int, dtype: torch.dtype, device: torch.device, ids: Tensor | None) -> Tensor:
    """A product's weight, or these of its rows [D, H], from what it does to unit vectors: it may be packed."""
    columns = []
    for start in range(0, hidden, _BASIS):
        unit = torch.eye(hidden, dtype=dtype, device=device)[start : start + _BASIS]  # [n, H]
        found = summed(product(unit))  # [n, V]
        columns.append(found if ids is None else found[:, ids.to(device)])
    return torch.cat(columns).T.contiguous()


def output_norm(target: Any) -> Tensor:
    """The gain of the last norm [H]."""
    found: Tensor = target.norm if hasattr(target, "norm") else target.tensors["norm"]
    return found


def embedding_of(target: Any) -> Tensor:
    """The target's own [V, H], which no drafter brings along."""
    embedding = getattr(target, "embedding", None)
    found: Tensor = target.tensors["embedding"] if embedding is None else embedding
    return found
