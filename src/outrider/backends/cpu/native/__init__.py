"""Builds and loads kernels.c with the user's C compiler, once per machine; without one, a library from the wheel.

Promise: the library that `load` returns has passed a self-check in a child process (an unsupported instruction kills
the child, not the caller), and is the very file that passed. If anything goes wrong, the caller gets a reason instead
of a library, never an exception. Several processes may build at once; an interrupted build leaves nothing trusted.
It knows compilers, files and ctypes; it does not know tensors. The child runs this file as a script, so its head
imports only the standard library.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.[ch]")))  # kernels.c includes the others
# No -ffast-math, no implicit fusing: the source decides where each rounding happens, and all tiles must agree.
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno")
# OpenMP only where torch's own runtime (libgomp.so.1) is shared: two runtimes in one process compete for the cores.
# Elsewhere a pass starts threads of its own (native/team.h); single operations then run in one.
THREADS: tuple[str, ...] = ("-fopenmp",) if sys.platform == "linux" else ("-DOWN_THREADS",)
# gcc for Windows aligns no vectors on the stack, so no instruction may need it; its library need not be installed.
WINDOWS = ("-Wa,-muse-unaligned-vector-move", "-static-libgcc")
THREADS += WINDOWS if sys.platform == "win32" else ()
TUNED = ("-march=native",)
# By machine, the worst first: for the libraries of a wheel, and what OUTRIDER_NATIVE forces (0: no native kernels).
INSTRUCTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "plain": ("-march=x86-64",), "avx2": ("-march=x86-64-v3",), "avx-vnni": ("-march=x86-64-v3", "-mavxvnni"),
        "avx512": ("-march=x86-64-v4", "-mavx512vnni"),
    },
    "aarch64": {
        "plain": ("-march=armv8-a",), "neon": ("-march=armv8.2-a+dotprod",),
        "i8mm": ("-march=armv8.2-a+dotprod+i8mm",),
    },
}  # fmt: skip
_V3 = ("avx2", "fma", "bmi1", "bmi2", "f16c", "movbe")
# What a processor must have for a wheel's library, as Linux names it: its check does not meet every instruction in it.
FEATURES = {
    "avx2": _V3, "avx-vnni": (*_V3, "avx_vnni"), "neon": ("asimddp",), "i8mm": ("asimddp", "i8mm"),
    "avx512": (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512_vnni"),
}  # fmt: skip
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
PREBUILT = Path(__file__).parent / "prebuilt"  # in a wheel (`hatch_build.py`): MACHINE-INSTRUCTIONS.so
SECONDS_TO_BUILD, SECONDS_TO_CHECK = 120, 60
announce: Callable[[str], AbstractContextManager[object]] = nullcontext  # around a build; whoever loads may set it

# Each function takes one struct: P an address, q an int64, d a double. One packed argument is several times cheaper
# than twenty that ctypes converts one by one.
STRUCTS = {"add_norm": "5P2qd3q", "gate_mul": "2P6q", "rope_store": "9P5qd2q", "attend": "11P7q2d3q"}
STRUCTS |= {"int8_pass": "19P8qP", "top": "4P3q", "choose": "4P3q", "product": "4P5q"}
STRUCTS |= {"chain": STRUCTS["int8_pass"] + "9P3qd"}
COLUMNS = 16  # outputs of a block of float weights, as in product.h
# The structs that a pass reads: addresses and sizes in the order of int8.h's Linear and pass.h's Layer and Model.
LINEAR = "5P3qP"
LAYER = "4P" + 4 * LINEAR + "2q"
MODEL = "5P" + LINEAR + "8qd3Pq" + LINEAR + "q2P2qP"
BART_LAYER = "4P" + 2 * LINEAR
BART = "4Pdq"
SOURCE_TABLE = "2Pq"
NO_LINEAR = (0,) * 9


class Kernels:
    """The library's functions: `kernels.attend(...)` takes the fields of its struct, in order."""

    def __init__(self, path: Path, threaded: bool) -> None:
        library = ctypes.CDLL(str(path))
        library.outrider_isa.restype = ctypes.c_char_p
        self.isa: str = library.outrider_isa().decode()
        library.outrider_dot_isa.restype = ctypes.c_char_p
        self.dot_isa: str = library.outrider_dot_isa().decode()
        self.threaded = threaded
        (
            self.add_norm, self.gate_mul, self.rope_store, self.attend, self.int8_pass, self.top, self.choose,
            self.product, self.chain,
        ) = (_kernel(library, name) for name in STRUCTS)  # fmt: skip


def _kernel(library: ctypes.CDLL, name: str) -> Callable[..., None]:
    function, pack = library[f"outrider_{name}"], struct.Struct(STRUCTS[name]).pack
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int

    def call(*fields: float) -> None:
        failed = function(pack(*fields))
        if failed == 2:
            raise IndexError("a token, a position, a slot or a wanted row is out of range")
        if failed:
            raise MemoryError(f"no memory for the scratch space of {name}")

    return call


@dataclass(frozen=True)
class Native:
    """The kernels, or the reason why there are none."""

    kernels: Kernels | None
    reason: str = ""


class _Unusable(Exception):
    """Why a library cannot be used; caught in `load`."""


@cache
def version() -> str:
    """A short hash of the kernels' sources: what was measured with other kernels no longer holds."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:8]


def load(folder: Path | None = None) -> Native:
    """The checked library from `folder`, built into it if it is not there."""
    try:
        if os.environ.get("OUTRIDER_NATIVE") == "0":
            raise _Unusable("disabled by OUTRIDER_NATIVE=0")
        import torch  # noqa: F401  (first: the library must use its OpenMP runtime)

        from ....models.paths import cache_folder

        return _load(folder or cache_folder() / "native")
    except Exception as problem:  # torch operations are used instead
        return Native(None, " ".join(str(problem).split()) or type(problem).__name__)


def _load(folder: Path) -> Native:
    """Built here for this processor, or by whoever made the wheel; the first that can be used."""
    forced, known = os.environ.get("OUTRIDER_NATIVE", ""), INSTRUCTIONS.get(MACHINE, {})
    if forced and forced not in known:
        raise _Unusable(f"OUTRIDER_NATIVE is {forced}; choose one of: {', '.join(['0', *known])}")
    folder.mkdir(parents=True, exist_ok=True)
    reasons = []
    for find in (*_compiled(folder, known.get(forced)), *_prebuilt(folder, [forced] if forced else list(known)[::-1])):
        try:
            return Native(_opened(*find()))
        except (_Unusable, OSError, subprocess.SubprocessError) as problem:
            reasons.append(str(problem))
    raise _Unusable(reasons[0])


Find: TypeAlias = "Callable[[], tuple[Path, bool]]"  # a checked library, and whether it has threads


def _compiled(folder: Path, forced: tuple[str, ...] | None) -> Iterator[Find]:
    """Libraries to compile, the best first."""
    best = TUNED if forced is None else forced
    for extra in dict.fromkeys([(*best, *THREADS), *([THREADS] if forced is None else []), best, forced or ()]):
        yield partial(_built, folder, extra)


def _prebuilt(folder: Path, names: list[str]) -> Iterator[Find]:
    """The wheel's libraries for this processor, those with threads first. Their checks are stored in `folder`."""
    features = set(_cpu().split())
    usable = [name for name in names if features.issuperset(FEATURES.get(name, ()))]
    for threaded in (True, False):
        for path in [PREBUILT / _prebuilt_name(MACHINE, name, threaded) for name in usable]:
            if path.is_file():
                yield partial(_checked, path, folder, threaded)


def _prebuilt_name(machine: str, name: str, threaded: bool) -> str:
    return f"{machine}-{name}{'' if threaded else '-one-thread'}.so"


def _checked(path: Path, folder: Path, threaded: bool) -> tuple[Path, bool]:
    """A library of the wheel that has passed the check on this processor."""
    key = hashlib.sha256((_digest(path) + _cpu()).encode()).hexdigest()[:16]
    report = folder / f"prebuilt-{key}.checked"
    if _result(path, report) is None:
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            checked = Path(temporary, "checked")
            checked.write_text(f"{_digest(path)} {_check_in_child(path)}")
            os.replace(checked, report)
    if (result := _result(path, report)) != "ok":
        raise _Unusable(f"the wheel's {path.name} failed its check: {result}")
    return path, threaded


def prebuild(folder: Path, machine: str, compiler: list[str]) -> tuple[list[Path], list[str]]:
    """Compile the libraries of a wheel for one kind of machine; returns those, and why others could not be compiled.

    One is without threads, for systems where the others would load a second OpenMP runtime, or find none.
    """
    source, names = str(Path(__file__).with_name("kernels.c")), list(INSTRUCTIONS[machine])

    def build(name: str, threaded: bool) -> Path | str:
        path = folder / _prebuilt_name(machine, name, threaded)
        flags = (*FLAGS, *INSTRUCTIONS[machine][name], *(("-fopenmp",) if threaded else ()))
        done = _run([*compiler, *flags, source, "-o", str(path), "-lm"], SECONDS_TO_BUILD)
        return f"{path.name}: {done.stderr.strip()[:300] or done.returncode}" if done.returncode else path

    alone = names[1] if len(names) > 1 else names[0]  # the one that most processors have
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(build, [*names, alone], [True] * len(names) + [False]))
    return [path for path in done if isinstance(path, Path)], [problem for problem in done if isinstance(problem, str)]


def _opened(path: Path, threaded: bool) -> Kernels:
    before = _openmp_runtimes()
    kernels = Kernels(path, threaded)
    if before and _openmp_runtimes() - before:
        raise _Unusable("it would load a second OpenMP runtime beside torch's")
    return kernels


def _openmp_runtimes() -> set[str]:
    try:
        mapped = Path("/proc/self/maps").read_text().split()
    except OSError:
        return set()
    return {path for path in mapped if re.search(r"/lib[gi]?omp[^/]*$", path)}


def _compiler() -> list[str]:
    """The command of the user's compiler."""
    if command := os.environ.get("CC"):
        return shlex.split(command)
    if path := shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"):
        return [path]
    raise _Unusable("no C compiler (set CC, or install gcc or clang)")


def _run(command: list[str], seconds: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False)


def _cpu() -> str:
    """The CPU's model and features, which -march=native depends on: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    keys = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(keys)})) + platform.machine()


def _built(folder: Path, extra: tuple[str, ...]) -> tuple[Path, bool]:
    """A library built with these flags that has passed the check; built unless it is there already."""
    compiler, flags = _compiler(), (*FLAGS, *extra)
    version = _run([*compiler, "--version"], SECONDS_TO_CHECK)
    if version.returncode:
        raise _Unusable(f"{' '.join(compiler)} does not run: {version.stderr.strip()[:200] or version.returncode}")
    texts = [source.read_text() for source in (*SOURCES, Path(__file__))]  # this file has the structs and the check
    key = "\0".join([*texts, *compiler, *flags, version.stdout, _cpu()])
    path = folder / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    report = path.with_suffix(".checked")  # the SHA-256 of the checked file, then "ok" or what went wrong
    if _result(path, report) is None:
        _build(path, report, compiler, flags)
    result = _result(path, report)
    if result != "ok":
        raise _Unusable(f"the built library failed its check: {result}")
    return path, set(THREADS) <= set(extra)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _result(path: Path, report: Path) -> str | None:
    """The result of this very file's check; None if it was never checked or has changed since."""
    try:
        digest, _, result = report.read_text().partition(" ")
        return result if digest == _digest(path) else None
    except (OSError, UnicodeDecodeError):
        return None


def _build(path: Path, report: Path, compiler: list[str], flags: tuple[str, ...]) -> None:
    """Build and check in a temporary folder, then move the library and its report into place, in this order."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library, checked = Path(folder, "kernels.so"), Path(folder, "checked")
        source = str(Path(__file__).with_name("kernels.c"))
        with announce("Compiling kernels for this processor"):
            done = _run([*compiler, *flags, source, "-o", str(library), "-lm"], SECONDS_TO_BUILD)
        if done.returncode:
            raise _Unusable(f"{' '.join(compiler)} failed: {done.stderr.strip()[:300] or done.returncode}")
        checked.write_text(f"{_digest(library)} {_check_in_child(library)}")
        os.replace(library, path)
        os.replace(checked, report)


# ------------------------------------------------------------ checking


def _check_in_child(path: Path) -> str:
    """ "ok", or what went wrong. In a child, because an unsupported instruction kills its process."""
    runtimes = sorted(_openmp_runtimes())  # torch brings one; the system need not have any
    done = _run([sys.executable, "-E", "-S", __file__, str(path), *runtimes], SECONDS_TO_CHECK)
    if -done.returncode in (signal.SIGINT, signal.SIGTERM, 9):  # proves nothing: check again next time
        raise _Unusable(f"its check was interrupted by signal {-done.returncode}")
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    return "ok" if done.returncode == 0 else done.stderr.strip()[-200:] or f"exit status {done.returncode}"


def check(path: str) -> None:
    """Compare every function with plain Python on a few numbers; raises AssertionError."""
    kernels = Kernels(Path(path), threaded=False)
    for d in (8, 64):  # less than a vector; several vectors
        _check_rows(kernels, d)
        _check_attend(kernels, d)
        _check_int8(kernels, d)
        _check_choose(kernels, d)
        _check_product(kernels, d)
        _check_chain(kernels, d)
    _check_blocks(kernels)


Floats: TypeAlias = "ctypes.Array[ctypes.c_float]"
_address = ctypes.addressof


def _floats(values: Iterable[float]) -> Floats:
    values = list(values)
    return (ctypes.c_float * len(values))(*values)


def _int64s(values: Iterable[int]) -> ctypes.Array[ctypes.c_int64]:
    values = list(values)
    return (ctypes.c_int64 * len(values))(*values)


def _check_rows(kernels: Kernels, d: int) -> None:
    gate, up = (_floats(math.sin(1 + i + j) for i in range(d)) for j in (0, d))
    both, ones, out = _floats([*gate, *up]), _floats([1.0] * d), _floats([0.0] * d)
    kernels.gate_mul(_address(both), _address(out), 1, d, 0, 0, 1, 2)
    _compare("gate_mul", out, [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)])
    total = [g + u for g, u in zip(gate, up, strict=True)]
    rms = math.sqrt(sum(x * x for x in total) / d)
    kernels.add_norm(_address(gate), _address(up), _address(ones), 0, _address(out), 1, d, 0.0, 0, 0, 2)
    _compare("add_norm", out, [x / rms for x in total])
    mean = sum(total) / d
    deviation = math.sqrt(sum((x - mean) ** 2 for x in total) / d)
    kernels.add_norm(_address(gate), 0, _address(ones), _address(ones), _address(out), 1, d, 0.0, 0, 0, 2)
    _compare("layer norm", out, [(x - mean) / deviation + 1 for x in total])
    kernels.gate_mul(_address(up), _address(out), 1, d, 0, 4, 0, 2)
    _compare("gelu", out, [u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in up])


def _check_attend(kernels: Kernels, d: int) -> None:
    """Three new rows after 40 older ones: rope (a quarter turn: x1, x2 -> -x2, x1), then attention."""
    old, new, half = 40, 3, d // 2
    end = old + new
    k, v = (_floats(math.cos(0.3 * i + j) for i in range(end * d)) for j in (0, 1))
    rows = [[math.sin(0.7 * i + t) for i in range(3 * d)] for t in range(new)]  # q, k, v of one head
    qkv, q, out = _floats(x for row in rows for x in row), _floats([0.0] * new * d), _floats([0.0] * new * d)
    cos, sin, slots = _floats([0.0] * new * half), _floats([1.0] * new * half), _int64s(range(old, end))
    inputs = [_address(x) for x in (qkv, cos, sin, q, k, v, slots)]
    kernels.rope_store(*inputs, 0, 0, new, 1, 1, d, half, 0.0, 0, 2)
    _compare("rope_store", q, [x for row in rows for x in [-y for y in row[half:d]] + row[:half]])
    table, lines, context = (ctypes.c_int32 * end)(*range(end)), _int64s([0] * new), _int64s(range(old + 1, end + 1))
    inputs = [_address(x) for x in (q, k, v, table, lines, context)]
    kernels.attend(*inputs, 0, 0, 0, 0, _address(out), end, 0, new, 1, 1, d, 0, d**-0.5, 0.0, 0, 0, 2)
    for t in range(new):
        _compare("attend", out[t * d : (t + 1) * d], _attention(q[t * d : (t + 1) * d], k, v, old + 1 + t))
    bias, shift = _floats(math.sin(i) for i in range(end)), _int64s(range(old, end))
    kernels.attend(
        *inputs, 0, 0, _address(bias), _address(shift), _address(out), end, 0, new, 1, 1, d, 0, d**-0.5, 0.0, end, 0, 2
    )
    last = out[(new - 1) * d : new * d]
    _compare("biased attend", last, _attention(q[(new - 1) * d : new * d], k, v, end, bias[::-1]))


def _check_choose(kernels: Kernels, d: int) -> None:
    """With equal logits the noise alone decides; greedy rows keep their place."""
    rows, temperatures = _floats([0.0] * (2 * d)), (ctypes.c_double * 2)(0.8, 0.0)
    keys, place = _int64s([7, 7]), _int64s([0, 0])
    bits = []
    for token in range(d):
        z = (token * 0x9E3779B97F4A7C15 + 7) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        bits.append((z ^ (z >> 31)) >> 32)
    addresses = [_address(each) for each in (rows, keys, temperatures, place)]
    kernels.choose(*addresses, 2, d, 2)
    _compare("choose", place, [float(bits.index(max(bits))), 0.0])


def _check_product(kernels: Kernels, d: int) -> None:
    """Seven rows, 20 outputs of two blocks."""
    rows, outputs = 7, 20
    x = _floats(math.sin(i) for i in range(rows * d))
    weights = [[math.cos(n + 3 * i) if n < outputs else 0.0 for i in range(d)] for n in range(2 * COLUMNS)]
    packed = _floats(weights[b + n][i] for b in (0, COLUMNS) for i in range(d) for n in range(COLUMNS))
    bias, out = _floats(range(outputs)), _floats([0.0] * rows * outputs)
    kernels.product(*(_address(each) for each in (x, packed, bias, out)), rows, outputs, d, 0, 2)
    for t in range(rows):
        wanted = [n + sum(x[t * d + i] * weights[n][i] for i in range(d)) for n in range(outputs)]
        _compare("product", out[t * outputs : (t + 1) * outputs], wanted)


def _check_int8(kernels: Kernels, d: int) -> None:
    """Rows of integers through quantisation and the head, which must be exact."""
    outputs = 40
    x = [1.0 if i % 2 else -1.0 for i in range(d)]  # its norm is itself
    weights = [[(7 * n + 3 * i) % 255 - 127 for i in range(d)] for n in range(outputs)]
    weights += [[0] * d] * (64 - outputs)
    packed = [
        weights[b * 32 + n][4 * s + i] + 128 for b in (0, 1) for s in range(d // 4) for n in range(32) for i in range(4)
    ]
    weight, scale = (ctypes.c_uint8 * len(packed))(*packed), _floats([0.5] * 64)
    out = _head_of(kernels, (_address(weight), 0, _address(scale), 0, 0, outputs, d, 0, 0), x)
    expected = [0.5 * sum(w * v for w, v in zip(line, x, strict=True)) for line in weights[:outputs]]
    _compare("int8_pass", out, [sign * y for sign in SIGNS for y in expected])


def _check_chain(kernels: Kernels, d: int) -> None:
    """A model without layers continues from what it was given: the same token again and again."""
    outputs, length, best = 32, 4, 5
    x = [1.0 if i % 2 else -1.0 for i in range(d)]
    rows = [[0] * d if n != best else [int(v) for v in x] for n in range(outputs)]
    packed = [rows[n][4 * s + i] + 128 for s in range(d // 4) for n in range(outputs) for i in range(4)]
    weight, scale, ones = (ctypes.c_uint8 * len(packed))(*packed), _floats([1 / d] * outputs), _floats([1.0] * d)
    head = (_address(weight), 0, _address(scale), 0, 0, outputs, d, 0, 0)
    sizes = (d, 1, 1, d, 0, d, outputs, length, 0.0, 0, 0, 0, outputs)
    fields = (0, _address(ones), 0, 0, 0, *head, *sizes, *NO_LINEAR, 0, 0, 0, 0, 0, 0)
    model, stream = ctypes.create_string_buffer(struct.pack(MODEL, *fields)), _floats(x)
    zero, one, budget, ids = _int64s([0]), _int64s([1]), _int64s([length]), _int64s(range(10, 10 + outputs))
    table, slots, lengths = (ctypes.c_int32 * 1)(0), (ctypes.c_int32 * length)(), _int64s([0])
    tokens, survival = _int64s([0] * 2 * length), (ctypes.c_double * (2 * length))()
    floors = (ctypes.c_double * length)()
    inputs = [_address(each) for each in (zero, zero, zero, zero, one, zero, table)]
    groups = (budget, slots, ids, floors), (tokens, survival, lengths)
    given, made = ([_address(each) for each in group] for group in groups)
    kernels.chain(
        _address(model), *inputs, 0, _address(stream), 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 2, 0,
        *given, 0, 0, *made, 0, length, 0, 1.0,
    )  # fmt: skip
    share = math.e / (math.e + outputs - 1)
    likely = [share**i for i in range(length + 1)]
    claims = likely[1:] + [before * (1 - share) / (outputs - 1) for before in likely[:length]]
    expected = [10.0 + best] * length + [10.0] * length + claims + [float(length)]
    _compare("chain", [*tokens, *survival, *lengths], expected)


def _check_blocks(kernels: Kernels) -> None:
    """The same with GGUF's blocks, of 32 and of 256 inputs: one piece, and two side by side (native/blocks.h)."""
    inputs, step = 256, 2.0**-10
    x = [1.0 if i % 3 else -1.0 for i in range(inputs)]
    nibbles = [[(3 * n + 5 * i + i // 32) % 16 for i in range(inputs)] for n in range(16)]

    def lines(start: int, stop: int) -> bytes:
        return bytes(
            row[i + k] | row[i + 4 + k] << 4 for i in range(start, stop, 8) for row in nibbles for k in range(4)
        )

    steps, zero_point = struct.pack("<16e", *[step] * 16), 8
    scales, least = bytes(j + 1 for j in range(8) for _ in range(16)), 2
    q4_0 = [steps + lines(i, i + 32) for i in range(0, inputs, 32)]
    q4_k = [steps + steps + scales + bytes([least] * 128) + lines(0, inputs)]
    for bits, units in ((0, q4_0), (3, q4_k)):
        scale, offset = ([i // 32 + 1 for i in range(inputs)], least) if bits else ([1] * inputs, zero_point)
        expected = [step * sum((s * q - offset) * v for s, q, v in zip(scale, row, x, strict=True)) for row in nibbles]
        for pieces in (1, 2):
            data, unit = b"".join(unit * pieces for unit in units), len(units[0])
            held = ctypes.create_string_buffer(data, len(data))
            table = _int64s([n for i in range(pieces) for n in (_address(held) + i * unit, bits, pieces * unit)])
            out = _head_of(kernels, (0, 0, 0, 0, 0, 16 * pieces, inputs, 0, _address(table)), x)
            _compare("blocks", out, [sign * y for sign in SIGNS for y in expected * pieces])


SIGNS = (1, -1, 1)  # of a check's rows: some instructions are met by pairs of rows only, and one is odd


def _head_of(kernels: Kernels, head: tuple[int, ...], x: list[float]) -> Floats:
    """The output products of x, -x and x, whose norms are themselves, by a model without layers."""
    outputs, d, eps, rows = head[5], head[6], 0.0, len(SIGNS)
    ones = _floats([1.0] * d)
    sizes = (d, 1, 1, d, 0, d, outputs, 1, eps, 0, 0, 0, 1)
    fields = (0, _address(ones), 0, 0, 0, *head, *sizes, *NO_LINEAR, 0, 0, 0, 0, 0, 0)
    model = ctypes.create_string_buffer(struct.pack(MODEL, *fields))
    stream, out = _floats(sign * value for sign in SIGNS for value in x), _floats([0.0] * rows * outputs)
    zeros, lengths, want = _int64s([0] * rows), _int64s([1] * rows), _int64s(range(rows))
    table = (ctypes.c_int32 * 1)(0)
    inputs = [_address(zeros)] * 4 + [_address(each) for each in (lengths, want, table)]
    highest, leaders = _floats([0.0] * rows), _int64s([0] * rows)
    kernels.int8_pass(
        _address(model), *inputs, 0, _address(stream), 0, 0, 0, _address(out), _address(highest), _address(leaders),
        0, 0, 0, 1, 0, 1, rows, rows, 0, 0, 2, 0,
    )  # fmt: skip
    tops = [out[t * outputs : (t + 1) * outputs] for t in range(rows)]
    _compare("int8_pass", [*highest, *leaders], [*map(max, tops), *(top.index(max(top)) for top in tops)])
    return out


def _attention(q: list[float], k: Floats, v: Floats, keys: int, bias: Sequence[float] = ()) -> list[float]:
    d = len(q)
    scores = [sum(x * y for x, y in zip(q, k[j * d : (j + 1) * d], strict=True)) / math.sqrt(d) for j in range(keys)]
    scores = [score + more for score, more in zip(scores, bias or [0.0] * keys, strict=True)]
    weights = [math.exp(score) for score in scores]
    return [sum(w * v[j * d + c] for j, w in enumerate(weights)) / sum(weights) for c in range(d)]


def _compare(name: str, actual: Iterable[float], expected: list[float]) -> None:
    worst = max(abs(a - b) for a, b in zip(actual, expected, strict=True))
    assert worst < 1e-5, f"{name} is off by {worst:g}"


if __name__ == "__main__":
    for runtime in sys.argv[2:]:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    check(sys.argv[1])
