"""Compiles the CPU's kernels into a wheel, one library for each level of x86-64, for machines without a C compiler.

Where that is not possible (another system, no compiler) the wheel is pure Python, and kernels are compiled on the
machine that runs them, or torch's operations are used. `CC` names the compiler. An editable install compiles nothing.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "outrider/backends/cpu/native"


class PrebuiltKernels(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"
    _folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compiler = shlex.split(os.environ.get("CC", "")) or [found for found in [shutil.which("cc")] if found]
        x86 = sys.platform == "linux" and platform.machine() == "x86_64"
        if version == "editable" or not x86 or not compiler:
            return
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-kernels-"))
        libraries = self._compile(compiler, self._folder)
        if libraries:
            build_data["force_include"] |= {str(path): f"{NATIVE}/prebuilt/{path.name}" for path in libraries}
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"  # they do not depend on Python's version

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder)

    def _compile(self, compiler: list[str], folder: Path) -> list[Path]:
        """The libraries that this compiler can make. Flags are the package's own; torch is not needed for that."""
        source = Path(self.root, "src", NATIVE)
        native = runpy.run_path(str(source / "__init__.py"), run_name="outrider_native")

        def build(task: tuple[str, tuple[str, ...]]) -> Path | None:
            level, threads = task
            path = folder / f"kernels-{level}{'-omp' if threads else ''}.so"
            flags = (*native["FLAGS"], *native["LEVELS"][level][0], *threads)
            command = [*compiler, *flags, str(source / "kernels.c"), "-o", str(path), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                self.app.display_warning(f"No kernels for {level}: {done.stderr.strip()[:200]}")
            return None if done.returncode else path

        tasks = [(level, native["THREADS"]) for level in native["LEVELS"]] + [("v3", ())]
        with ThreadPoolExecutor(2) as pool:
            return [path for path in pool.map(build, tasks) if path is not None]
