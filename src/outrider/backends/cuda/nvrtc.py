"""CUDA C++ compiled at run time by NVRTC, which comes with torch: no compiler has to be installed.

Promise: `kernel` is compiled once for a card, its options and its source, and kept on disk. It launches on torch's
current stream, so that graphs record it. It does not know what a kernel computes.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import ModelError
from ...models.paths import cache_folder
from . import compiling

log = logging.getLogger("outrider.cuda")
_ORDINARY_SHARED, _MAX_DYNAMIC_SHARED = 48 * 1024, 8  # bytes that need no permission; the attribute that gives it
_EARLY = 6  # the launch attribute: programmatic stream serialization


class Kernel:
    """One compiled function."""

    def __init__(self, function: ctypes.c_void_p, shared: int) -> None:
        self.function, self.shared = function, shared

    def __call__(
        self, grid: tuple[int, int, int], threads: int, arguments: list[Tensor | int | float], early: bool = False
    ) -> None:
        """Tensors are given by their address, numbers as 32 bits. early: it may start before the kernel before
        it has ended, and waits for that itself."""
        if compiling.rehearses():
            return
        values = [_value(each) for each in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attribute = _Attribute(_EARLY, value=(ctypes.c_int * 16)(1))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        config = _Launch(*grid, threads, 1, 1, self.shared, stream, ctypes.pointer(attribute), int(early))
        _require(_driver().cuLaunchKernelEx(ctypes.byref(config), self.function, places, None))


def _value(argument: Tensor | int | float) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@cache
def available(device: torch.device) -> bool:
    """Whether kernels can be compiled for this card; if not, the log says why, once."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        _compiler()
        _driver()
    except OSError as error:
        log.warning("CUDA kernels are not compiled, triton's are used: NVRTC was not found (%s)", error)
        return False
    return True


def source(path: Path) -> str:
    """A kernel's source, after the instructions that it uses."""
    instructions = Path(__file__).parent / "kernels" / "instructions.cu"
    return instructions.read_text(encoding="utf-8") + path.read_text(encoding="utf-8")


def architecture(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def kernel(source: str, name: str, options: tuple[str, ...], device: torch.device, shared: int = 0) -> Kernel:
    """options: such as -DNAME=VALUE; shared: bytes of shared memory beyond what the source declares.

    In a rehearsal its code is compiled beside others', and the kernel cannot be launched.
    """
    given = (source, options, architecture(device))
    if compiling.ahead(given, partial(cubin, *given)):
        return Kernel(ctypes.c_void_p(), shared)
    return _loaded(source, name, options, device, shared)


@cache
def _loaded(source: str, name: str, options: tuple[str, ...], device: torch.device, shared: int) -> Kernel:
    code = cubin(source, options, architecture(device))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # the context is there
        _require(_driver().cuModuleLoadData(ctypes.byref(module), code))
        _require(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        if shared > _ORDINARY_SHARED:
            _require(_driver().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared))
    return Kernel(function, shared)


def cubin(source: str, options: tuple[str, ...], architecture: str) -> bytes:
    """Compiled code, from the cache if it is there."""
    every = (f"--gpu-architecture={architecture}", *options)
    key = hashlib.sha256("\0".join([source, *every, str(torch.version.cuda)]).encode()).hexdigest()[:24]
    path = cache_folder() / "kernels" / f"{key}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = _compile(source, every)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)  # other processes see all of it or nothing
    except OSError as error:
        log.warning("a compiled kernel is not kept: %s", error)
    return code


def _compile(source: str, options: tuple[str, ...]) -> bytes:
    lib, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = lib.nvrtcCompileProgram(program, len(options), given)
        lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetProgramLog(program, text)
        if failed:
            message = text.value.decode(errors="replace").strip()
            raise ModelError(f"NVRTC could not compile a kernel ({' '.join(options)}): {message[:400]}")
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _compiler() -> Any:
    """NVRTC of torch's own CUDA version."""
    major = str(torch.version.cuda).split(".")[0]
    name = f"libnvrtc.so.{major}"
    folders = [Path(place) / "nvidia" for place in sys.path if place]
    found = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob(f"*/lib/{name}"))]
    for path in [*found, name]:
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:
            last = error
    raise last


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _require(result: int) -> None:
    if result:
        name = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(name))
        raise ModelError(f"A CUDA kernel could not be started: {(name.value or b'unknown error').decode()}.")
