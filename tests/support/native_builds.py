"""Native kernels of several vector widths, each built once per test run and shared by all test processes."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from outrider.backends import ops
from outrider.backends.cpu import native

COMPILER = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
BUILDS = {"tuned": "", "narrow": "-mno-avx512f", "narrowest": "-mno-avx512f -mno-avx2 -mno-fma"}
Use = Callable[[str], None]


def _knows_avx512() -> bool:
    try:
        return " avx512f " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # unknown: build everything


if not _knows_avx512():
    del BUILDS["narrow"]  # the same instructions as `tuned`
BACKENDS = ("torch", *BUILDS)


@pytest.fixture(scope="session")
def native_builds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], native.Native]:
    """The build of a name, opened once per process."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "native"
    folder.mkdir(exist_ok=True)
    opened = {"torch": native.Native(None, "a test wants torch")}

    def build(name: str) -> native.Native:
        if name not in opened:
            with pytest.MonkeyPatch.context() as patch, FileLock(folder / "lock"):
                patch.setenv("CC", f"{COMPILER} {BUILDS[name]}")
                opened[name] = native.load(folder)
        return opened[name]

    return build


@pytest.fixture
def use_backend(native_builds: Callable[[str], native.Native], monkeypatch: pytest.MonkeyPatch) -> Use:
    """Run the operations by torch, or by a native build of one vector width."""

    def use(name: str) -> None:
        if name != "torch" and (COMPILER is None or (BUILDS[name] and platform.machine() not in ("x86_64", "AMD64"))):
            pytest.skip("no such build here")
        loaded = native_builds(name)
        assert name == "torch" or loaded.kernels is not None, loaded.reason
        monkeypatch.setattr(ops, "_loaded", lambda: loaded)

    return use


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, use_backend: Use) -> str:
    use_backend(request.param)
    return str(request.param)
