"""Quantised models on disk: made once, read in a moment ever after.

The promise: what `quantised` returns is complete and belongs to the very files and settings that its name was made of;
a damaged or unfinished file is made again, and two processes may ask at once. It knows tensors by name; it does not
know what they mean.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...models.config import ModelConfig
from ...models.paths import cache_folder
from .quantise import DEFAULT, Settings, Tensors

FORMAT = 1  # of the file and of what is in it; a change makes old ones be built again
_HUGE = 1 << 21  # bytes of a huge page


def identity(path: Path, config: ModelConfig, settings: Settings = DEFAULT) -> str:
    """Changes when the model's files do (their names, sizes and times), or anything else that decides the bytes."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((FORMAT, facts, _plain(config), settings)).encode()).hexdigest()[:24]


def _plain(config: ModelConfig) -> list[tuple[str, object]]:
    """The configuration in an order that does not change from process to process."""
    values = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in vars(config).items()}
    return sorted(values.items())


def quantised(name: str, build: Callable[[], Tensors], folder: Path | None = None) -> Tensors:
    """The tensors kept under this name; built and kept first if they are not there, or not whole."""
    folder = folder or cache_folder() / "int8"
    path = folder / f"{name}.safetensors"
    with suppress(OSError, SafetensorError, ValueError, KeyError):
        return _read(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return in_one_place(build())  # nowhere to keep them
    with _one_at_a_time(path.with_suffix(".lock")):
        with suppress(OSError, SafetensorError, ValueError, KeyError):
            return _read(path)  # another process was faster
        tensors = build()
        with suppress(OSError, SafetensorError):  # a full disk costs the next start, not this one
            _write(path, tensors)
    return in_one_place(tensors)


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    with suppress(NotImplementedError, OSError):  # a file system without locks: then both build
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _read(path: Path) -> Tensors:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        said = json.loads((file.metadata() or {})["sums"])
        tensors = in_one_place({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    if {name: _sum(tensor) for name, tensor in tensors.items()} != said:
        raise ValueError(f"{path} is damaged")
    return tensors


def _write(path: Path, tensors: Tensors) -> None:
    handle, name = tempfile.mkstemp(suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        sums = json.dumps({name: _sum(tensor) for name, tensor in tensors.items()})
        save_file(tensors, name, metadata={"sums": sums})
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def _sum(tensor: Tensor) -> int:
    """A check sum as fast as memory: of the tensor as 64-bit numbers, modulo 2^64."""
    flat = tensor.reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    tail = int(flat[whole:].sum())
    return int(flat[:whole].view(torch.int64).sum()) + tail


def in_one_place(tensors: Tensors) -> Tensors:
    """Copies that lie one after the other, each on a cache line, in huge pages where the system gives them."""
    sizes = [-(-t.numel() * t.element_size() // 64) * 64 for t in tensors.values()]
    arena = _arena(sum(sizes))
    copies, at = {}, 0
    for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
        view = arena[at : at + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        copies[name] = view.copy_(tensor)
        at += size
    return copies


def _arena(size: int) -> Tensor:
    """[size] bytes that begin on a huge page; private, because shared memory is given small ones."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size + 64, dtype=torch.uint8)[:size]
    memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    start = -flat.data_ptr() % _HUGE
    return flat[start : start + size]
