"""How many bytes of memory a model's weights take, without those that another one has in memory already.

It counts tensors, wherever in our objects they lie; it does not know what they are for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def weigh(thing: Any, beside: Any = None) -> int:
    """Bytes of all tensors in `thing` that are not in `beside`."""
    seen: set[int] = set()
    _walk(beside, seen)
    return _walk(thing, seen)


def _walk(thing: Any, seen: set[int]) -> int:
    if isinstance(thing, Tensor):
        name = _name(thing)
        fresh = name not in seen
        seen.add(name)
        return thing.numel() * thing.element_size() if fresh else 0
    if isinstance(thing, torch.nn.Module):
        parts: list[Any] = [*thing.parameters(), *thing.buffers()]
    elif isinstance(thing, dict):
        parts = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    elif type(thing).__module__.startswith("outrider.") and hasattr(thing, "__dict__"):
        parts = list(vars(thing).values())
    else:
        return 0
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    return sum(_walk(part, seen) for part in parts)


def _name(tensor: Tensor) -> int:
    """Where its numbers lie. Packed weights do not say; they are never viewed twice either."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
