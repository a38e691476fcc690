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
# Whose logits are those of AVX-512, bit for bit: one of BUILDS, and what OUTRIDER_NATIVE forces.
EQUAL = ["narrow", *(pytest.param(name, marks=pytest.mark.slow) for name in ("avx2", "avx-vnni"))]
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
                patch.setenv("CC", f"{COMPILER} {BUILDS.get(name, '')}")
                if name not in BUILDS:
                    patch.setenv("OUTRIDER_NATIVE", name)
                opened[name] = native.load(folder)
        return opened[name]

    return build


def _runs_here(name: str) -> bool:
    if name == "torch":
        return True
    ours = not BUILDS.get(name, name) or platform.machine() in ("x86_64", "AMD64")  # all but `tuned` are for x86
    return COMPILER is not None and ours and set(native._cpu().split()).issuperset(native.FEATURES.get(name, ()))


@pytest.fixture
def use_backend(native_builds: Callable[[str], native.Native], monkeypatch: pytest.MonkeyPatch) -> Use:
    """Run the operations by torch, or by a native build of one vector width."""

    def use(name: str) -> None:
        if not _runs_here(name):
            pytest.skip("no such build here")
        loaded = native_builds(name)
        assert name == "torch" or loaded.kernels is not None, loaded.reason
        monkeypatch.setattr(ops, "_loaded", lambda: loaded)

    return use


@pytest.fixture
def use_avx512(native_builds: Callable[[str], native.Native], use_backend: Use) -> Callable[[], None]:
    """Run the operations by a build with AVX-512's products of bytes, or skip the test."""

    def use() -> None:
        use_backend("tuned")
        kernels = native_builds("tuned").kernels
        if kernels is None or kernels.dot_isa != "VNNI":
            pytest.skip("the processor has no AVX-512 VNNI")

    return use


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, use_backend: Use) -> str:
    use_backend(request.param)
    return str(request.param)
