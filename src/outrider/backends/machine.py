"""Facts about this machine and settings of this process: CPU features, devices, the garbage collector.

With AMX a row of oneDNN's bfloat16 products depends on how many rows share the call, and some virtual machines
advertise AMX and fault on it (SIGILL). `prepare()` keeps oneDNN to AVX-512 on such processors; it must run before the
first product of this process. For programs that promise no exact rows (vLLM), `prepare_faulty()` does so only where AMX
faults: it tries a product in a child process, once per machine.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    """Make bfloat16 products safe, and their rows exact, in this process. What the user has set stays."""
    if "amx_tile" in cpu_flags():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _CAP)


def prepare_faulty() -> None:
    """Make bfloat16 and int8 products safe in this process. Cheap after the first time on a machine."""
    if "ONEDNN_MAX_CPU_ISA" not in os.environ and "amx_tile" in cpu_flags() and not _amx_works():
        os.environ["ONEDNN_MAX_CPU_ISA"] = _CAP


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pauses Python's garbage collector, in all threads."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def return_free_memory() -> None:
    """Return the heap's free pages to the system, where the allocator can (glibc): loading leaves many."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def usable_cores() -> int:
    """Cores this process may run on, which in a container may be fewer than the machine has."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def is_overloaded() -> bool:
    """Whether the load exceeds the number of cores, so that other programs distort timings."""
    load = load_average()
    return load is not None and load > (os.cpu_count() or 1) + 0.5


def load_average() -> float | None:
    """The load average of the last minute; None where the system has none."""
    if sys.platform != "win32":
        with suppress(OSError):
            return os.getloadavg()[0]
    return None


def thread_settings(device: torch.device) -> Callable[[], None]:
    """A function that gives another thread this thread's settings: OpenMP's thread count and CUDA's device."""
    threads = torch.get_num_threads()

    def apply() -> None:
        torch.set_num_threads(threads)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    return apply


def choose_device(name: str) -> torch.device:
    """The device of this name; `auto` is a GPU that our kernels can run on, or else the CPU."""
    if name == "auto":
        return torch.device("cpu" if why_no_gpu() else "cuda:0")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"There is no device '{name}'; choose auto, cpu, cuda, or cuda:1 and so on.") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"Outrider does not run on '{device.type}' devices; choose auto, cpu or cuda.")
    if device.type == "cpu":
        return torch.device("cpu")
    index, count = device.index or 0, torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count and index >= count:
        raise ConfigError(f"There is no device '{name}': this machine has {count} GPU(s), from cuda:0.")
    if reason := why_no_gpu(index):
        raise ConfigError(f"The device '{name}' cannot be used: {reason}. Leave --device out, or choose cpu.")
    return torch.device("cuda", index)


KV_SHARE = 0.6  # of a GPU's free memory: drafters and recorded passes need some too


def free_memory(device: torch.device) -> int:
    """Bytes that this process can still allocate on a GPU."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def kv_room(device: torch.device) -> int:
    """Bytes of a GPU's memory for the target's K and V, once its weights are there."""
    return int(KV_SHARE * free_memory(device))


@contextmanager
def memory_sentence(what: str) -> Iterator[None]:
    """Turns running out of GPU memory into a ConfigError. what: its subject, such as "The weights"."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{what} do not fit into the GPU's memory; lower max_length, cache_tokens or max_batch, choose a smaller "
            "--dtype, or free memory on the GPU."
        ) from error


def device_name(device: torch.device) -> str:
    """The product name of a processor or a GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def why_no_gpu(index: int = 0) -> str:
    """The reason why this GPU cannot be used; empty when it can."""
    if not torch.cuda.is_available():
        return "torch sees no GPU (is this a CPU build of torch, or is the driver missing?)"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler (gcc or clang) for the code that starts its kernels"
    if torch.cuda.get_device_capability(index) < (8, 0):
        name = torch.cuda.get_device_name(index)
        return f"{name} is older than what our kernels need (bfloat16 matrix units, since 2020)"
    return ""


def cpu_flags() -> frozenset[str]:
    """The processor's feature flags (Linux on x86; empty elsewhere)."""
    return frozenset(_cpuinfo("flags").split())


def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32: four times, with AVX-512."""
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16"})


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(field: str) -> str:
    """The first value of a field in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def fingerprint() -> str:
    """A short hash of this machine and this torch: measurements are valid for one fingerprint."""
    facts = (cpu_name(), sorted(cpu_flags()), os.cpu_count(), torch.__version__, platform.platform())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _amx_works() -> bool:
    file = cache_folder() / "probes" / f"amx-{fingerprint()}.json"
    try:
        return bool(json.loads(file.read_text())["works"])
    except (OSError, ValueError, KeyError, TypeError):
        works = _child_survives()
    write_quietly(file, json.dumps({"works": works}))
    return works


def _child_survives() -> bool:
    try:
        child = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return False
    return child.returncode == 0
