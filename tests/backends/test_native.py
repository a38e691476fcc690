"""Native kernels are built once, checked before use, and not used if anything is wrong."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outrider.backends import ops
from outrider.backends.cpu import native, quantise as quant
from outrider.backends.toy import RandomWeights, toy_config
from outrider.models import paths

from support.native_builds import COMPILER

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


def _compiler(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_native_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    loaded = native.load(tmp_path)
    assert loaded.kernels is None
    assert "OUTRIDER_NATIVE" in loaded.reason
    assert not list(tmp_path.iterdir())


@needs_compiler
def test_instructions_can_be_forced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", _compiler(tmp_path / "cc", f'exec {COMPILER} "$@" -O0'))
    monkeypatch.setenv("OUTRIDER_NATIVE", "plain")
    loaded = native.load(tmp_path / "cache")
    assert loaded.kernels is not None, loaded.reason
    assert loaded.kernels.dot_isa == "plain C"
    monkeypatch.setenv("OUTRIDER_NATIVE", "mmx")
    assert "choose one of: 0, plain" in native.load(tmp_path / "cache").reason


@needs_compiler
@pytest.mark.slow
def test_without_a_compiler_the_wheels_libraries_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The best one that passes its check here; another processor's and a damaged one do not. Threads where they can."""
    folder, cache = tmp_path / "prebuilt", tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(native, "PREBUILT", folder)
    monkeypatch.setitem(native.INSTRUCTIONS, native.MACHINE, {"plain": ("-O0",), "damaged": (), "illegal": ()})
    fast = _compiler(tmp_path / "cc", f'exec {COMPILER} "$@" -O0')
    (library, *_, alone), problems = native.prebuild(folder, native.MACHINE, [fast])
    assert not problems
    assert alone.name == f"{native.MACHINE}-damaged-one-thread.so"
    (folder / f"{native.MACHINE}-damaged.so").write_bytes(b"damaged")
    trap = tmp_path / "trap.c"
    trap.write_text("void __attribute__((constructor)) die(void) { __builtin_trap(); }\n")
    illegal = folder / f"{native.MACHINE}-illegal.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", str(trap), "-o", str(illegal)], check=True)
    monkeypatch.setenv("CC", "/no/such/compiler")
    for _ in range(2):
        loaded = native.load(cache)
        assert loaded.kernels is not None, loaded.reason
        assert loaded.kernels.threaded
    assert len(list(cache.glob("prebuilt-*.checked"))) == 3
    library.unlink()
    loaded = native.load(cache)
    assert loaded.kernels is not None
    assert not loaded.kernels.threaded
    monkeypatch.setitem(native.FEATURES, "damaged", ("no-such-feature",))
    assert "/no/such/compiler" in native.load(cache).reason


@pytest.mark.parametrize(
    ("features", "names"),
    [
        ("fp asimd", ["plain"]),
        ("fp asimd asimddp", ["neon", "plain"]),  # Neoverse N1
        ("fp asimd i8mm asimddp", ["i8mm", "neon", "plain"]),  # Neoverse V1
    ],
)
def test_a_wheels_library_needs_its_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: str, names: list[str]
) -> None:
    known = list(native.INSTRUCTIONS["aarch64"])[::-1]  # the best first
    for name in known:
        (tmp_path / f"aarch64-{name}.so").touch()
    monkeypatch.setattr(native, "MACHINE", "aarch64")
    monkeypatch.setattr(native, "PREBUILT", tmp_path)
    monkeypatch.setattr(native, "_cpu", lambda: f"Features\t: {features}\naarch64")
    tried: list[str] = []
    monkeypatch.setattr(native, "_checked", lambda path, folder, threaded: tried.append(path.name))
    for find in native._prebuilt(tmp_path, known):
        find()
    assert tried == [f"aarch64-{name}.so" for name in names]


def test_what_a_compiler_cannot_make_is_reported(tmp_path: Path) -> None:
    libraries, problems = native.prebuild(tmp_path, "x86_64", ["/bin/false"])
    assert not libraries
    assert [problem.partition(":")[0] for problem in problems] == [
        *(f"x86_64-{name}.so" for name in native.INSTRUCTIONS["x86_64"]), "x86_64-avx2-one-thread.so",
    ]  # fmt: skip


@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler", "no-such-compiler-in-path"])
def test_a_failing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str) -> None:
    monkeypatch.setenv("CC", compiler)
    loaded = native.load(tmp_path)
    assert loaded.kernels is None
    assert loaded.reason
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(ops, "_loaded", lambda: loaded)
    assert ops.backend() == f"torch ({loaded.reason})"
    assert ops.gate_mul(torch.ones(1, 2)).shape == (1, 1)


def test_no_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C compiler" in native.load(tmp_path).reason


@needs_compiler
def test_a_folder_that_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert native.load(tmp_path / "file" / "native").kernels is None


@needs_compiler
def test_a_compiler_that_knows_less(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refuse = 'case "$*" in *-march=native*|*-fopenmp*) echo cannot >&2; exit 1;; esac\n'
    monkeypatch.setenv("CC", _compiler(tmp_path / "cc", f'{refuse}exec {COMPILER} "$@" -O0'))
    loaded = native.load(tmp_path / "cache")
    assert loaded.kernels is not None
    assert not loaded.kernels.threaded


@needs_compiler
def test_what_was_built_is_used_again_and_what_was_damaged_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv("CC", _compiler(tmp_path / "cc", f'echo "$*" >> {log}\nexec {COMPILER} "$@" -O0'))

    def builds() -> int:
        assert native.load(tmp_path / "cache").kernels
        return sum("kernels.c" in line for line in log.read_text().splitlines())

    assert [builds(), builds()] == [1, 1]
    (library,) = (tmp_path / "cache").glob("*.so")
    library.unlink()  # never write into a file that this process has mapped
    library.write_bytes(b"damaged")
    assert builds() == 2
    (verdict,) = (tmp_path / "cache").glob("*.checked")
    verdict.unlink()  # as after an interruption: built, not yet checked
    assert builds() == 3
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".checked", ".so"]


@needs_compiler
def test_a_library_that_fails_its_check_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("void __attribute__((constructor)) die(void) { __builtin_trap(); }\n")
    script = f'case "$*" in *--version*) echo 1; exit 0;; esac\n{COMPILER} -shared -fPIC {broken} -o "$OUT"'
    find_out = 'for word in "$@"; do [ "$last" = -o ] && OUT="$word"; last="$word"; done\n'
    monkeypatch.setenv("CC", _compiler(tmp_path / "cc", find_out + script))
    for _ in range(2):
        loaded = native.load(tmp_path / "cache")
        assert loaded.kernels is None
        assert "signal" in loaded.reason


@needs_compiler
def test_two_processes_may_build_and_quantise_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both caches in one pair of processes, which take long to start."""
    monkeypatch.setenv("CC", _compiler(tmp_path / "cc", f'exec {COMPILER} "$@" -O0'))
    code = (
        "import sys, pathlib; from outrider.backends.cpu import native, quantise as quant\n"
        "from outrider.backends.toy import RandomWeights, toy_config\n"
        "folder, config = pathlib.Path(sys.argv[1]), toy_config(1)\n"
        "quant.stored('name', lambda: quant.calibrate(config, RandomWeights(config, 1), [1, 2, 3]), folder / 'int8')\n"
        "sys.exit(native.load(folder / 'native').kernels is None)"
    )
    racing = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(2)]
    assert [process.wait() for process in racing] == [0, 0]
    kept, config = quant.stored("name", lambda: pytest.fail("built again"), tmp_path / "int8").tensors, toy_config(1)
    expected = quant.calibrated(config, RandomWeights(config, 1), [1, 2, 3])
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)


@needs_compiler
def test_backend_says_what_runs(
    native_builds: Callable[[str], native.Native], use_backend: Callable[[str], None]
) -> None:
    use_backend("tuned")
    loaded = native_builds("tuned")
    assert loaded.kernels is not None, loaded.reason
    assert ops.backend().startswith(f"native ({loaded.kernels.isa}, ")
    assert len(native._openmp_runtimes()) <= 1  # torch's own, shared


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    assert paths.cache_folder() == tmp_path / "home"
    monkeypatch.delenv("OUTRIDER_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert paths.cache_folder() == tmp_path / "outrider"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert paths.cache_folder() == Path.home() / "Library" / "Caches" / "outrider"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert paths.cache_folder() == tmp_path / "local" / "outrider"


@pytest.mark.windows
@pytest.mark.parametrize("name", native.INSTRUCTIONS["x86_64"])
def test_kernels_compile_for_windows(name: str, tmp_path: Path) -> None:
    if (compiler := shutil.which("x86_64-w64-mingw32-gcc")) is None:
        pytest.skip("no x86_64-w64-mingw32-gcc (Debian: gcc-mingw-w64-x86-64)")
    flags = (*native.FLAGS, "-DOWN_THREADS", *native.WINDOWS, *native.INSTRUCTIONS["x86_64"][name])
    quiet = ("-Werror=implicit-function-declaration", "-Werror=incompatible-pointer-types", "-Werror=return-type")
    source, library = Path(native.__file__).with_name("kernels.c"), tmp_path / "kernels.dll"
    subprocess.run([compiler, *flags, *quiet, str(source), "-o", str(library), "-lm"], check=True)
    shown = subprocess.run(
        ["x86_64-w64-mingw32-objdump", "-p", str(library)], capture_output=True, text=True, check=True
    )
    needed = {line.split()[-1].lower() for line in shown.stdout.splitlines() if "DLL Name" in line}
    assert needed <= {"kernel32.dll", "msvcrt.dll"}  # what every Windows has
    assert all(f"outrider_{function}" in shown.stdout for function in native.STRUCTS)
