"""Programmatic dependent launch: a kernel starts while the one before it is still running.

The rule of all kernels that are launched so: before `begin` a kernel reads only what was complete two kernels earlier
(weights, tables, what describes the rows; what is not constant past the first-level cache, which may be older) and
writes nothing; `begin` waits until everything before is complete, and only then lets the next kernel start. So at most
two kernels run at a time, in their order. Whether a kernel starts early is an option of its launch; without it the wait
takes no time. It changes no bits. In triton's interpreter it does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

EMULATED = bool(triton.knobs.runtime.interpret)


# The kernels that can start so. "product" is one that follows a small kernel: after another product its programs would
# gather on the processors that are free first.
EARLY = frozenset({"rotated", "attend", "added", "activated", "norm", "rope", "product"})
EARLY_ROWS = 64  # of a pass; with more rows kernels are long, and what starts early is in their way


@dataclass
class Launch:
    """How kernels are launched; a benchmark changes it."""

    early: frozenset[str] = EARLY


LAUNCH = Launch()


@triton.jit
def begin(PDL: tl.constexpr):
    """Everything before this kernel is complete; the next one may start."""
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()


@cache
def can_start_early() -> bool:
    """Whether this device has programmatic dependent launch."""
    return not EMULATED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def launch_options(kernel: str, rows: int = 1) -> dict[str, Any]:
    """Constant and option of a kernel that calls `begin`, in a pass of so many rows."""
    can = can_start_early()
    early = can and kernel in LAUNCH.early and rows <= EARLY_ROWS
    return {"PDL": can, **({"launch_pdl": True} if early else {})}
