"""Puts compiled kernels into a wheel: OUTRIDER_PREBUILT=x86_64 or aarch64, the machine that the wheel is for.

Without it the wheel is pure, and kernels are compiled at first use. CC is the compiler; for aarch64 elsewhere, a cross
compiler. The wheel's tag names Linux and the machine; where it has to run with an older C library than that of the
machine that builds it, build it in a manylinux container.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "outrider/backends/cpu/native"
CROSS = {"x86_64": "x86_64-linux-gnu-gcc", "aarch64": "aarch64-linux-gnu-gcc"}


class Prebuilt(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machine = os.environ.get("OUTRIDER_PREBUILT", "")
        if not machine or version == "editable":
            return
        spec = importlib.util.spec_from_file_location("native", Path(self.root, "src", NATIVE, "__init__.py"))
        assert spec is not None
        assert spec.loader is not None
        native = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = native  # its dataclasses look there
        spec.loader.exec_module(native)
        compiler = shlex.split(os.environ.get("CC") or ("cc" if machine == platform.machine() else CROSS[machine]))
        self._folder = tempfile.TemporaryDirectory()
        for path in native.prebuild(Path(self._folder.name), machine, compiler):
            build_data["force_include"][str(path)] = f"{NATIVE}/prebuilt/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{machine}"
