"""The weights of a loaded model: how many bytes they take, and its embedding, last norm and output rows as tensors.

It reads float, packed and int8 models alike; it does not know what the rows are used for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .linear import linear, summed

_EVERY, _COMPARED = 61, 8  # rows and columns by which matrices are compared
_BASIS = 256  # unit vectors of one product


def weight_bytes(model: Any, excluding: Any = None) -> int:
    """Bytes of all tensors in `model` (any object of ours) that are not in `excluding`."""
    seen: set[int] = set()
    _unseen_bytes(excluding, seen)
    return _unseen_bytes(model, seen)


def pass_bytes(model: Any) -> int:
    """Bytes of weights that a pass over one row reads: all but rope's tables, embeddings that are only looked up, and
    what reads a source.

    Of a mixture of experts it reads fewer.
    """
    tables = [getattr(model, name, None) for name in ("ropes", "cos", "sin")]
    named = getattr(model, "tensors", {})
    looked_up = {name: tensor for name, tensor in named.items() if name.split(".")[0] in ("embedding", "words")}
    embedding = vars(model).get("embedding")
    if embedding is not None and getattr(getattr(model, "head", None), "weight", None) is not embedding:
        looked_up["embedding"] = embedding
    # Views of one storage: their own bytes are subtracted.
    spared: int = sum(t.numel() * t.element_size() for t in looked_up.values())
    reader = getattr(model, "reader", None)
    once = [] if reader is None else [reader.network, *(layer.cross.kv for layer in reader.layers)]
    return weight_bytes(model, [tables, once]) - spared


def _unseen_bytes(value: Any, seen: set[int]) -> int:
    if isinstance(value, Tensor):  # views share a storage, which counts once; packed weights have none
        strided = value.layout is torch.strided
        key = value.untyped_storage().data_ptr() if strided else id(value)
        size = value.untyped_storage().nbytes() if strided else value.numel() * value.element_size()
        new = key not in seen
        seen.add(key)
        return size if new else 0
    if isinstance(value, torch.nn.Module):
        parts: list[Any] = [*value.parameters(), *value.buffers()]
    elif isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif type(value).__module__.startswith("outrider.") and hasattr(value, "__dict__"):
        parts = list(vars(value).values())
    else:
        return 0
    if id(value) in seen:
        return 0
    seen.add(id(value))
    return sum(_unseen_bytes(part, seen) for part in parts)


def output_rows(target: Any, ids: Tensor) -> Tensor:
    """Rows of the output matrix for the ids [D]: floats [D, H] on the target's device."""
    read = row_reader(target)
    if read is not None:
        return read(ids)
    return product_rows(target.head, target.config.hidden_size, target.compute, target.device, ids)


def row_reader(target: Any) -> Callable[[Tensor], Tensor] | None:
    """`output_rows` of this target, where a row can be read without reading all; None: its weights are packed."""
    from .cpu import quantise as quant
    from .cpu.blocks import BlockTransformer

    if isinstance(target, BlockTransformer):
        return target.output_rows
    if target.config.tied:
        return lambda ids: embedding_of(target)[ids.to(embedding_of(target).device)]
    if hasattr(target, "module"):  # transformers runs it
        table: Tensor = target.module.get_output_embeddings().weight.detach()  # [V, H]
        return lambda ids: table[ids.to(table.device)].to(target.device)
    if not hasattr(target, "head"):
        return lambda ids: quant.product(target.tensors, "head", target.config).rows(ids)
    weight, scale = target.head.weight, getattr(target.head, "scale", None)
    if weight.layout is not torch.strided or weight.shape != (target.config.vocab_size, target.config.hidden_size):
        return None
    if scale is None:
        return lambda ids: weight[ids.to(weight.device)]
    return lambda ids: weight[ids.to(weight.device)] * scale[ids.to(weight.device), None]


def product_rows(product: Any, hidden: int, dtype: torch.dtype, device: torch.device, ids: Tensor | None) -> Tensor:
    """A product's weight, or its rows for the ids [D, H], from its results for unit vectors: it may be packed."""
    columns = []
    for start in range(0, hidden, _BASIS):
        unit = torch.eye(hidden, dtype=dtype, device=device)[start : start + _BASIS]  # [n, H]
        result = summed(product(unit))  # [n, V]
        columns.append(result if ids is None else result[:, ids.to(device)])
    return torch.cat(columns).T.contiguous()


def output_product(target: Any, dtype: torch.dtype) -> Any:
    """The output product [V, H] for inputs of this dtype: the target's own where that fits, else a copy."""
    from .cpu import quantise as quant
    from .cpu.blocks import BlockTransformer
    from .cpu.int8 import Int8Linear

    every = torch.arange(target.config.vocab_size)
    if dtype is not target.compute or isinstance(target, BlockTransformer):
        rows = output_rows(target, every)
        return Int8Linear.of(rows) if dtype is torch.int8 else linear(rows.to(dtype))
    if dtype is torch.int8:
        return Int8Linear(quant.product(target.tensors, "head", target.config), len(every))
    return target.head if hasattr(target, "head") else linear(output_rows(target, every).to(dtype))


def is_output_matrix(matrix: Any, target: Any) -> bool:
    """Whether a matrix [V, H] is the target's output matrix, by some of its rows or columns."""
    from .cpu.blocks import BlockTransformer

    read = None if isinstance(target, BlockTransformer) else row_reader(target)
    if not isinstance(matrix, Tensor) or (read is None and not hasattr(target, "head")):
        return False
    if read is not None:
        return _has_rows(matrix, read)
    unit = torch.eye(target.config.hidden_size, dtype=target.compute, device=target.device)[:_COMPARED]  # [n, H]
    columns = summed(target.head(unit)).cpu()  # [n, V]: the weight may be packed
    return torch.equal(matrix[:, :_COMPARED].T.to(columns.dtype), columns)


def is_embedding(matrix: Any, target: Any) -> bool:
    """Whether a matrix [V, H] is the target's embedding, by some of its rows."""
    return isinstance(matrix, Tensor) and _has_rows(matrix, lambda ids: embedding_of(target)[ids.to(target.device)])


def _has_rows(matrix: Tensor, read: Callable[[Tensor], Tensor]) -> bool:
    some = torch.arange(0, matrix.shape[0], _EVERY)
    theirs = read(some).cpu()
    return theirs.shape[1] == matrix.shape[1] and torch.equal(matrix[some].to(theirs.dtype), theirs)


def output_norm(target: Any) -> Tensor:
    """The weight of the last norm [H]."""
    norm: Tensor | None = getattr(target, "norm", None)
    norm = getattr(target, "tensors", {}).get("norm") if norm is None else norm
    if norm is None:
        raise ConfigError(
            "This drafter needs the norm before the target's output: a model with norms after its blocks has none, and "
            "where transformers runs it, it is unknown. Choose another drafter."
        )
    return norm


def embedding_of(target: Any) -> Tensor:
    """The target's embedding [V, H]."""
    embedding: Tensor | None = getattr(target, "embedding", None)
    return target.tensors["embedding"] if embedding is None else embedding
