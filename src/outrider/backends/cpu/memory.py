"""Memory for weights that native kernels read from end to end: aligned, in huge pages where the system has them."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_HUGE_PAGE = 1 << 21  # bytes
_SMALL = 1 << 20  # bytes that are not worth a huge page


def arena(size: int) -> Tensor:
    """[size] bytes that start on a huge page. Private memory: shared memory gets small pages."""
    if size < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
        flat = torch.empty(size + 64, dtype=torch.uint8)
        start = -flat.data_ptr() % 64
        return flat[start : start + size]
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    start = -flat.data_ptr() % _HUGE_PAGE
    return flat[start : start + size]
