"""CUDA C++ of `backends.cuda.kernels` on a CPU, for tests: every thread of a GPU's program is a thread
(`instructions.h`). Slow, and exact about who reads what when.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

COMPILER = shutil.which("g++") or ""
HERE, KERNELS = Path(__file__).parent, Path(__file__).parents[2] / "src/outrider/backends/cuda/kernels"
ENTRY = """
extern "C" void run(int x, int y, int z, int threads, int group, void** arguments) {
  run_grid(NAME, Index{x, y, z}, threads, group, arguments);
}
"""


def available() -> bool:
    """Whether there is a compiler that knows barriers and half floats."""
    probe = "#include <barrier>\n_Float16 half; int main() {}"
    command = [COMPILER, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    return bool(COMPILER) and subprocess.run(command, input=probe, text=True, capture_output=True).returncode == 0


@dataclass(frozen=True)
class Kernel:
    """As `nvrtc.Kernel`. group: threads that share a named barrier."""

    library: ctypes.CDLL
    group: int

    def __call__(
        self, grid: tuple[int, int, int], threads: int, arguments: list[Tensor | int | float], early: bool = False
    ) -> None:
        values = [_value(each) for each in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.library.run(*grid, threads, self.group, places)


def _value(argument: Tensor | int | float) -> ctypes._SimpleCData[int] | ctypes.c_void_p | ctypes.c_float:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)


def kernel(folder: Path, file: str, name: str, options: tuple[str, ...], group: int = 32) -> Kernel:
    """The kernel of a source, compiled with these options into the folder."""
    source = "\n".join(
        [(HERE / "instructions.h").read_text(), (KERNELS / file).read_text(), f"#define NAME {name}", ENTRY]
    )
    key = hashlib.sha256("\0".join([source, *options]).encode()).hexdigest()[:16]
    library, text = folder / f"{key}.so", folder / f"{key}.cpp"
    if not library.exists():
        text.write_text(source)
        command = [COMPILER, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-ffp-contract=off"]
        subprocess.run([*command, *options, "-o", str(library), str(text)], check=True)
    return Kernel(ctypes.CDLL(str(library)), group)
