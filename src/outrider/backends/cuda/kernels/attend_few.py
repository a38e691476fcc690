"""Attention of a few rows in CUDA C++ (`attend_few.cu`): the bits of `attention`'s own kernel, and fewer waits.

`attention` uses it where it has given those bits on this device for heads of this shape. It knows rows and planes, not
layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import nvrtc
from .launching import launch_options
from .matmul import processors

THREADS = 512  # of a program, which has a processor for itself
DIMS = (64, 128)  # of a head
QUERIES = 16  # of a program: rows times the heads that share a key head


@dataclass
class Use:
    """Whether these kernels are used; a benchmark changes it."""

    on: bool = True


USE = Use()


@dataclass(frozen=True)
class Heads:
    """The shape of a layer's attention."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def spans(self) -> int:
        """Spans of keys that a program has at a time: as many as have a register for every number."""
        return 16 // (self.dim // 16)

    def options(self, tiles: int) -> tuple[str, ...]:
        values = {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "DIM": self.dim, "PACKED": tiles}
        return tuple(f"-D{name}={value}" for name, value in values.items())


def suits(q: Tensor, shape: Heads, blocks: Any) -> bool:
    """Whether these rows can be computed here: they are few, causal, and in bfloat16."""
    shaped = shape.dim in DIMS and shape.heads // shape.kv_heads <= QUERIES and q.dtype == torch.bfloat16
    if not (USE.on and shaped and q.is_cuda) or blocks.lengths is not None or blocks.prompts:
        return False
    programs = blocks.info.shape[0] * shape.kv_heads  # of blocks that may be padding
    return programs <= 2 * processors(q.device) and nvrtc.available(q.device)


@cache
def source() -> str:
    return nvrtc.source(Path(__file__).with_suffix(".cu"))


def compiled(shape: Heads, tiles: int, device: torch.device) -> nvrtc.Kernel:
    return nvrtc.kernel(source(), "attend", shape.options(tiles), device)


def splits(shape: Heads, blocks: Any, device: torch.device) -> int:
    """Programs that may share a context: as many as have a processor."""
    programs: int = blocks.info.shape[0] * shape.kv_heads
    groups: int = -(-blocks.scratch.spans // shape.spans)
    return max(1, min(groups, processors(device) // programs))


def attend(
    q: Tensor, k_plane: Tensor, v_plane: Tensor, blocks: Any, scale: float, window: int, out: Tensor, tiles: int,
    programs: int,
) -> None:  # fmt: skip
    """As `attention.attend` into `out`. scale: of scores to the base 2. tiles: of packed rows; 0: they are not packed.
    programs: that may share a context (`splits`)."""
    rows, shape, scratch = q.shape[0], Heads(q.shape[1], k_plane.shape[1], q.shape[2]), blocks.scratch
    compiled(shape, tiles, q.device)(
        (blocks.info.shape[0], shape.kv_heads, programs), THREADS,
        [q, k_plane, v_plane, out, blocks.table, blocks.info, blocks.tail, scratch.sums, scratch.stats,
         scratch.finished, float(scale), blocks.table.shape[1], blocks.tail.shape[1], scratch.spans, scratch.rows,
         window, rows],
        early="launch_pdl" in launch_options("attend", rows),
    )  # fmt: skip
