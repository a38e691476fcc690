"""Facts about this machine that users must never have to know.

Some virtual machines advertise AMX and fault on it (SIGILL): oneDNN would then take the whole program down in the first
bfloat16 or int8 product. `prepare()` tries one in a child process, once per machine, and caps oneDNN if the child dies.
It must run before the first product of this process.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from ..errors import ConfigError
from ..models.paths import cache_folder, write_quietly

_CAP = "AVX512_CORE_BF16"
_PROBE = """
import torch
x, w = torch.randn(16, 64), torch.randn(64, 64)
packed = torch.ops.mkldnn._reorder_linear_weight(w.bfloat16(), None)
torch.ops.mkldnn._linear_pointwise(x.bfloat16(), packed, None, "none", [], "")
torch.matmul(x.bfloat16(), w.bfloat16())
"""


def prepare() -> None:
    """Make bfloat16 and int8 products safe in this process. Cheap after the first time on a machine."""
    if "ONEDNN_MAX_CPU_ISA" in os.environ or "amx_tile" not in cpu_flags():
        return
    if not _amx_works():
        os.environ["ONEDNN_MAX_CPU_ISA"] = _CAP


def choose_device(wish: str) -> torch.device:
    """The device that is meant: `auto` is a GPU that our kernels can run on, or else the CPU."""
    if wish == "auto":
        return torch.device("cpu" if why_no_gpu() else "cuda:0")
    try:
        device = torch.device(wish)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"There is no device '{wish}'; choose auto, cpu, cuda, or cuda:1 and so on.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"Outrider does not run on '{device.type}' devices; choose auto, cpu or cuda.")
    if device.type == "cpu":
        return torch.device("cpu")
    number, count = device.index or 0, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and number >= count:
        raise ConfigError(f"There is no device '{wish}': this machine has {count} GPU(s), from cuda:0.")
    if reason := why_no_gpu(number):
        raise ConfigError(f"The device '{wish}' cannot be used: {reason}. Leave --device out, or choose cpu.")
    return torch.device("cuda", number)


def device_name(device: torch.device) -> str:
    """What it is called: a processor's or a GPU's name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def why_no_gpu(number: int = 0) -> str:
    """Why this GPU (by its number) cannot be used; empty when it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU (is this a CPU build of torch, or is the driver missing?)"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler (gcc or clang) for the little code that starts its kernels"
    if torch.cuda.get_device_capability(number) < (8, 0):
        name = torch.cuda.get_device_name(number)
        return f"{name} is older than what our kernels need (bfloat16 matrix units, since 2020)"
    return ""


def cpu_flags() -> frozenset[str]:
    """What the processor says it can do (Linux on x86; empty elsewhere)."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def fingerprint() -> str:
    """Short name for this machine and this torch: what was measured here holds only here."""
    facts = (cpu_name(), sorted(cpu_flags()), os.cpu_count(), torch.__version__, platform.platform())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _amx_works() -> bool:
    note = cache_folder() / "probes" / f"amx-{fingerprint()}.json"
    try:
        return bool(json.loads(note.read_text())["works"])
    except (OSError, ValueError, KeyError, TypeError):
        works = _child_survives()
    write_quietly(note, json.dumps({"works": works}))
    return works


def _child_survives() -> bool:
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0
