"""Where something was measured: machine, versions, threads. A number without this is only an anecdote.

It reports facts; what they mean for speed is `doctor`'s business.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from .machine import cpu_flags, cpu_name, fingerprint
from .models.ops import backend

_PACKAGES = ("outrider", "torch", "numpy", "tokenizers", "safetensors", "gguf")


def environment() -> dict[str, Any]:
    """Everything that a speed depends on, as far as this process can see."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "load": load(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in _PACKAGES},
        "kernels": backend(),
        "amx": "amx_tile" in cpu_flags(),
        "isa_cap": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "omp": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "KMP_", "GOMP_"))},
        "machine": fingerprint(),
    }


def usable_cores() -> int:
    """Cores this process may run on, which in a container may be fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def load() -> float | None:
    """Processes that wanted a core in the last minute, ours included; None where nobody counts them."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
