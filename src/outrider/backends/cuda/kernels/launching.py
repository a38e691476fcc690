"""Programmatic dependent launch: a kernel starts while the one before it is still running.

The rule of all kernels that are launched so: before `begin` a kernel reads only what was complete two kernels earlier
(weights, tables, what describes the rows; what is not constant past the first-level cache, which may be older) and
writes nothing; `begin` waits until everything before is complete, and
only then lets the next kernel start. So at most two kernels run at a time, in their order, and a kernel that is
launched without this is an ordinary one. It changes no bits. In triton's interpreter it does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

EMULATED = bool(triton.knobs.runtime.interpret)


EARLY = frozenset({"rotated", "attend", "added", "activated"})  # kernels that start so


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


def launch_options(kernel: str) -> dict[str, Any]:
    """Constant and option of a kernel that calls `begin`."""
    early = kernel in LAUNCH.early and not EMULATED
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}
