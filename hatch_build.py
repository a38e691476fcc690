"""Puts compiled kernels into a wheel, one library for each set of instructions, for machines without a C compiler.

On Linux, for the machine that builds it; OUTRIDER_PREBUILT=x86_64 or aarch64 names another, and then a library that
cannot be compiled is an error. Without a compiler the wheel is pure Python: kernels are compiled on the machine that
runs them, or torch's operations are used. CC is the compiler; for another machine, a cross compiler. An editable
install compiles nothing. Where a wheel has to run with an older C library than that of the machine that builds it,
build it in a manylinux container.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "outrider/backends/cpu/native"
CROSS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}


class PrebuiltKernels(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        native = runpy.run_path(str(Path(self.root, "src", NATIVE, "__init__.py")), run_name="outrider_native")
        asked = os.environ.get("OUTRIDER_PREBUILT", "")
        machine = asked or native["MACHINE"]
        compiler = _compiler(cross=machine != native["MACHINE"], machine=machine)
        possible = sys.platform == "linux" and machine in native["INSTRUCTIONS"] and compiler
        if asked and not possible:
            raise RuntimeError(f"Kernels for {asked} need Linux and a compiler for that machine: set CC.")
        if not possible:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-kernels-")
        libraries, problems = native["prebuild"](Path(self._folder.name), machine, compiler)
        if asked and problems:
            raise RuntimeError(problems[0])
        for problem in problems:
            self.app.display_warning(f"No kernels in the wheel: {problem}")
        if libraries:
            build_data["force_include"] |= {str(path): f"{NATIVE}/prebuilt/{path.name}" for path in libraries}
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-linux_{machine}"  # they do not depend on Python's version


def _compiler(cross: bool, machine: str) -> list[str]:
    """The command, empty if there is none."""
    if command := os.environ.get("CC"):
        return shlex.split(command)
    names = [CROSS.get(machine, "")] if cross else ["cc", "gcc", "clang"]
    return next(([path] for name in names if (path := shutil.which(name))), [])
