"""The machine, versions and threads that a measurement depends on.

It reports facts; `doctor` says what they mean for speed.
"""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..backends.machine import (
    choose_device,
    cpu_flags,
    cpu_name,
    device_name,
    fingerprint,
    load_average,
    usable_cores,
    why_no_gpu,
)
from ..backends.ops import backend

_PACKAGES = ("outrider", "torch", "triton", "numpy", "tokenizers", "safetensors", "gguf")
_DRIVER = Path("/proc/driver/nvidia/version")  # Linux


def environment() -> dict[str, Any]:
    """Everything that a speed depends on, as far as this process can see."""
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "load": None if (load := load_average()) is None else round(load, 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in _PACKAGES},
        "kernels": backend(),
        "amx": "amx_tile" in cpu_flags(),
        "isa_cap": os.environ.get("ONEDNN_MAX_CPU_ISA"),
        "omp": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "KMP_", "GOMP_"))},
        "machine": fingerprint(),
        "gpus": gpus(),
        "driver": driver(),
        "cuda": torch.version.cuda,
        "auto_device": str(choose_device("auto")),
        "no_gpu": why_no_gpu(),
    }


def gpus() -> list[dict[str, Any]]:
    """The GPUs that torch sees, in its order: name, memory in GB, compute capability."""
    found = []
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        memory = round(torch.cuda.get_device_properties(i).total_memory / 1e9, 1)
        capability = ".".join(map(str, torch.cuda.get_device_capability(i)))
        name = device_name(torch.device("cuda", i))
        found.append({"name": name, "memory_gb": memory, "capability": capability})
    return found


def driver() -> str | None:
    """The version of the loaded NVIDIA driver, whether or not torch can use it."""
    try:
        text = _DRIVER.read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d[\d.]+)", text)
    return match[1] if match else None


def installed(name: str) -> str | None:
    """The version of a package, None where it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
